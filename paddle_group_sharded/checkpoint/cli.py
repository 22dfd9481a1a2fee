"""``python -m paddle_group_sharded checkpoint inspect|verify|diff|merge|reshard|convert``.

No command starts a process, and none holds more than one tensor in memory, except that a ``.pdparams`` or ``.pdopt``
file that is read is a pickle, which has to be taken whole.  Checksums are compared before anything is copied.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, Optional

from ..errors import UsageError
from ..tables import size_text
from .compare import Differs, compare
from .contents import Contents
from .describe import describe
from .manifest import MANIFEST_FILE, Manifest
from .read import pieces_of, read_manifest, verify_pieces
from .sources import open_source
from .targets import write_checkpoint_folder, write_paddle, write_safetensors, write_weights
from .tensor_file import TensorFiles

__all__ = ["register"]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_ANY = "a folder of save_checkpoint, of save_group_sharded_model, of layer files or of safetensors; or a file of those"


def register(commands: Any) -> None:
    """Add the command to argparse's sub-parsers; each sets ``run``, a function of the parsed arguments."""
    parser = commands.add_parser("checkpoint", help="look at, check, compare and convert checkpoints")
    actions = parser.add_subparsers(metavar="action", required=True)
    _register_reading(actions)
    _register_writing(actions)


def _register_reading(actions: Any) -> None:
    inspect = actions.add_parser("inspect", help="print a table of what is in a checkpoint")
    inspect.add_argument("path", type=Path, help=_ANY)
    inspect.set_defaults(run=_inspect)
    verify = actions.add_parser("verify", help="read every byte of a checkpoint and compare its checksums")
    verify.add_argument("path", type=Path, help="a folder of save_checkpoint")
    verify.set_defaults(run=_verify)
    diff = actions.add_parser("diff", help="say where two checkpoints differ, whatever their formats")
    diff.add_argument("first", type=Path, help=_ANY)
    diff.add_argument("second", type=Path, help="as the first; the exit status is 1 if they differ")
    diff.add_argument("--weights", action="store_true", help="compare the model only")
    diff.set_defaults(run=_diff)


def _register_writing(actions: Any) -> None:
    merge = actions.add_parser("merge", help="write all weights into one file")
    merge.add_argument("path", type=Path, help=_ANY)
    merge.add_argument("output", type=Path, help="NAME.safetensors or NAME.pdparams")
    merge.add_argument("--masters", action="store_true", help="fp32 masters in place of the 16-bit weights they are of")
    merge.set_defaults(run=_merge)
    reshard = actions.add_parser("reshard", help="write a checkpoint anew in another number of files")
    reshard.add_argument("path", type=Path, help="a folder of save_checkpoint")
    reshard.add_argument("output", type=Path, help="a new folder")
    reshard.add_argument("--files", type=int, required=True)
    reshard.set_defaults(run=_reshard)
    convert = actions.add_parser("convert", help="write a checkpoint in another format")
    convert.add_argument("path", type=Path, help=_ANY)
    convert.add_argument("output", type=Path, help="a new folder")
    convert.add_argument(
        "--to",
        choices=("checkpoint", "paddle", "safetensors"),
        required=True,
        help="of save_checkpoint; of save_group_sharded_model; or Hugging Face style safetensors, weights only",
    )
    convert.add_argument("--max-size", type=_size, default=5 * 2**30, help="of a safetensors file (default: 5G)")
    convert.set_defaults(run=_convert)


def _inspect(args: argparse.Namespace) -> str:
    with open_source(args.path) as contents:
        manifest = read_manifest(args.path) if contents.kind == "checkpoint" else None
        files = len(manifest.files) if manifest is not None else _count_files(args.path)
        return describe(contents, files, manifest)


def _count_files(path: Path) -> int:
    suffixes = (".pdparams", ".pdopt", ".pdmodel", ".safetensors")
    return sum(entry.suffix in suffixes for entry in path.iterdir()) if path.is_dir() else 1


def _verify(args: argparse.Namespace) -> str:
    manifest = _check(args.path)
    size = sum(info.size for info in manifest.files.values())
    files = _files(len(manifest.files))
    return f"{args.path}: {len(manifest.tensors)} tensors in {files}, {size_text(size)}: all right"


def _check(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    with TensorFiles(folder, manifest.files) as files:
        for name in manifest.files:
            files.entries(name)
        verify_pieces(files, pieces_of(manifest.tensors.values()))
    return manifest


def _checked_source(path: Path) -> Contents:
    if (path / MANIFEST_FILE).exists():
        _check(path)
    return open_source(path)


def _diff(args: argparse.Namespace) -> str:
    with open_source(args.first) as left, open_source(args.second) as right:
        has_states = all(any(key[0] == "optimizer" for key in contents.tensors) for contents in (left, right))
        kinds = ("model",) if args.weights or not has_states else ("model", "optimizer")
        found = compare(left, right, kinds)
    what = "weights" if kinds == ("model",) else "weights and optimizer states"
    if not found:
        return f"equal: the {what} of {args.first} and {args.second} have the same bits"
    lines = [f"{difference.name} {difference.text}" for difference in found]
    count = f"{len(found)} tensor{'s' if len(found) > 1 else ''}"
    return Differs("\n".join([f"the {what} differ in {count}; the first: {lines[0]}", *lines[1:]]))


def _merge(args: argparse.Namespace) -> str:
    with _checked_source(args.path) as contents:
        write_weights(contents, args.output, args.masters)
        return f"{args.output}: {len(contents.model)} tensors, {size_text(args.output.stat().st_size)}"


def _reshard(args: argparse.Namespace) -> str:
    if args.files < 1:
        raise UsageError(f"--files must be at least 1, got {args.files}")
    _check(args.path)
    with open_source(args.path) as contents:
        return _write_checkpoint(contents, args.output, args.files)


def _write_checkpoint(contents: Contents, folder: Path, files: int) -> str:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists already; give the name of a new or empty folder")
    write_checkpoint_folder(contents, folder.absolute(), files)
    return f"{folder}: {len(contents.tensors)} tensors in {_files(len(read_manifest(folder).files))}"


def _convert(args: argparse.Namespace) -> str:
    with _checked_source(args.path) as contents:
        if args.to == "checkpoint":
            return _write_checkpoint(contents, args.output, 1)
        if args.to == "paddle":
            names = write_paddle(contents, args.output)
        else:
            names = write_safetensors(contents, args.output, args.max_size)
    return f"{args.output}: {', '.join(names)}"


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _size(text: str) -> int:
    match: Optional[re.Match[str]] = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"expected bytes such as 500M or 5G, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]

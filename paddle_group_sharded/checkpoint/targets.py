"""Writing :class:`.contents.Contents` in any format; one tensor in memory at a time."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UsageError
from ..model_files import MODEL_FILE, NAME_TABLE, OPTIMIZER_FILE, optimizer_entries
from ..paddle_files import FileSet
from ..sharding.matching import MASTER_SUFFIX
from .contents import Contents, LazyTensor
from .data import unpack
from .durable import create, make_folder
from .job import Piece, SaveJob, compose
from .manifest import Manifest, piece_name
from .match import MASTER
from .progress import progress
from .tensor_file import Blob, write_tensors

__all__ = ["write_checkpoint_folder", "write_paddle", "write_safetensors", "write_weights"]

_CUT_FROM = 4096  # elements per file: smaller tensors are not cut
_PREFIX = "model"


def write_checkpoint_folder(contents: Contents, folder: Path, files: int) -> None:
    """As :func:`.save_checkpoint` of ``files`` ranks would have written it."""
    save = os.urandom(8).hex()
    pieces: list[list[Piece]] = [[] for _ in range(files)]
    for number, (key, tensor) in enumerate(contents.tensors.items()):
        count = files if tensor.numel >= _CUT_FROM * files else 1
        bounds = [tensor.numel * part // count for part in range(count + 1)]
        for part, (start, stop) in enumerate(zip(bounds, bounds[1:])):
            shape = tensor.shape if count == 1 else (stop - start,)
            name = piece_name(key, tensor.numel, start, stop)
            blob = Blob(name, tensor.dtype, shape, functools.partial(tensor.read, start, stop))
            if start < stop:
                place = part if count > 1 else number % files
                pieces[place].append(Piece(key, tensor.dtype, tensor.shape, start, stop, blob))
    jobs = [SaveJob(folder, save, rank, mine) for rank, mine in enumerate(pieces)]
    manifest = Manifest(
        save=save,
        world_size=contents.world_size,
        tensors={},
        aliases=contents.aliases,
        parameter_names=contents.parameter_names,
        data=contents.data,
        info=contents.info,
    )
    empty = {key: (tensor.dtype, tensor.shape) for key, tensor in contents.tensors.items() if tensor.numel == 0}
    jobs[0].open()
    try:
        try:
            written = [job.write() for job in jobs]
        except BaseException:
            for job in jobs:
                job.discard()
            raise
        jobs[0].publish(compose(empty, written, manifest))
    finally:
        jobs[0].close()


def write_safetensors(contents: Contents, folder: Path, max_bytes: int) -> list[str]:
    """``model.safetensors``, or several files of ``max_bytes`` at most with an index; the names of the files.

    A tied weight is under its first name.  Nothing but the model's tensors can be kept in this format.
    """
    parts: list[list[Blob]] = [[]]
    for blob in _blobs(contents.model):
        if parts[-1] and sum(other.size for other in parts[-1]) + blob.size > max_bytes:
            parts.append([])
        parts[-1].append(blob)
    _new_folder(folder)
    count = len(parts)
    names = [f"{_PREFIX}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = [f"{_PREFIX}.safetensors"] if count == 1 else names
    for name, part in zip(names, parts):
        _write(folder / name, part, "pt")  # what Hugging Face's own readers insist on
    if count > 1:
        index = {
            "metadata": {"total_size": sum(blob.size for part in parts for blob in part)},
            "weight_map": {blob.key: name for name, part in zip(names, parts) for blob in part},
        }
        with create(folder / f"{_PREFIX}.safetensors.index.json") as file:
            file.write(json.dumps(index, indent=2).encode())
    return names


def write_weights(contents: Contents, path: Path, masters: bool) -> None:
    """All weights in one file, ``.safetensors`` or ``.pdparams``; with ``masters`` fp32 ones where there are any."""
    tensors = contents.model
    if masters:
        tensors = {name: contents.tensors.get(("optimizer", name, MASTER), tensor) for name, tensor in tensors.items()}
    make_folder(path.parent)
    if path.suffix == ".safetensors":
        _write(path, list(_blobs(tensors)), "pd")
    elif path.suffix == ".pdparams":
        files = FileSet(str(path.parent))
        files.write(path.name, _model_entries(contents, tensors))
        files.publish()
    else:
        raise UsageError(f"expected a file NAME.safetensors or NAME.pdparams, got {path}")


def write_paddle(contents: Contents, folder: Path) -> list[str]:
    """``model.pdmodel`` and, with states, ``model.pdopt``, as :func:`.save_group_sharded_model` writes them."""
    _new_folder(folder)
    files = FileSet(str(folder))
    files.write(MODEL_FILE, _model_entries(contents, contents.model))
    names = [MODEL_FILE]
    if any(key[0] == "optimizer" for key in contents.tensors):
        files.write(OPTIMIZER_FILE, optimizer_entries(_optimizer_state(contents)))
        names.append(OPTIMIZER_FILE)
    files.publish()
    return names


def _new_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already; give the name of a new or empty folder")
    make_folder(folder)


def _blobs(tensors: Mapping[str, LazyTensor]) -> Iterable[Blob]:
    return (Blob(name, tensor.dtype, tensor.shape, tensor.whole) for name, tensor in tensors.items())


def _write(path: Path, blobs: list[Blob], made_for: str) -> None:
    with progress(path.name, sum(blob.size for blob in blobs)) as on_bytes:
        write_tensors(path, blobs, on_bytes, made_for)


class _Pickled:
    """Stands for an array in something that is pickled; reads it when its turn comes."""

    def __init__(self, tensor: LazyTensor) -> None:
        self._tensor = tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._tensor.whole().__reduce_ex__(protocol)


def _unique_names(contents: Contents) -> dict[str, str]:
    """Paddle's automatic name of each tensor, or its structured one where two tensors have the same automatic one."""
    names = {name: contents.parameter_names.get(name, name) for name in contents.model}
    counts: dict[str, int] = {}
    for automatic in names.values():
        counts[automatic] = counts.get(automatic, 0) + 1
    return {name: automatic if counts[automatic] == 1 else name for name, automatic in names.items()}


def _model_entries(contents: Contents, tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    automatic = _unique_names(contents)
    firsts = {**{name: name for name in tensors}, **contents.aliases}
    entries: dict[str, Any] = {name: _Pickled(tensors[first]) for name, first in firsts.items()}
    entries[NAME_TABLE] = {name: automatic[first] for name, first in firsts.items()}
    return entries


def _optimizer_state(contents: Contents) -> dict[str, Any]:
    automatic = _unique_names(contents)
    states = [(key[1], key[2], tensor) for key, tensor in contents.tensors.items() if key[0] == "optimizer"]
    masters = {name: tensor for name, state, tensor in states if state == MASTER}
    result: dict[str, Any] = {}
    for name, state, tensor in states:
        if state != MASTER:
            suffix = MASTER_SUFFIX if name in masters else ""
            result[f"{automatic[name]}{suffix}_{state}_0"] = _Pickled(tensor)
    if masters:
        result["master_weights"] = {automatic[name]: _Pickled(tensor) for name, tensor in masters.items()}
    if "scheduler" in contents.data:
        result["LR_Scheduler"] = unpack(contents.data["scheduler"], _no_array)
    return result


def _no_array(number: str) -> Any:
    raise CheckpointError("the scheduler's state holds an array, which Paddle's own files cannot")

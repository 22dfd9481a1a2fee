"""Checkpoints of other formats as :class:`.contents.Contents`.

Files of ``paddle.save`` are pickles: they are read because the user names them, never from inside of a checkpoint.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ..errors import CheckpointError
from ..model_files import MODEL_FILE, NAME_TABLE, OPTIMIZER_FILE
from ..paddle_files import read_file
from ..sharding.matching import MASTER_SUFFIX, split_key
from .contents import Contents, LazyTensor, open_checkpoint, same_bytes
from .data import pack
from .dtypes import dtype_name, numpy_dtype
from .manifest import MANIFEST_FILE, Key
from .match import MASTER
from .tensor_file import TensorFiles

__all__ = ["open_source"]

_LAYER_FILE = re.compile(r"layer_(\d+)(-virtual_pp_stage_\d+)?(-tensor_00)?-model_states\.pdparams")
_INDEX = ".safetensors.index.json"


def open_source(path: Path) -> Contents:
    """A checkpoint of any format that this package knows, told by what lies at ``path``."""
    if path.suffix == ".safetensors" and path.is_file():
        return _open_safetensors(path.parent, [path.name])
    if path.suffix == ".pdparams" and path.is_file():
        return _open_paddle(path, path.with_suffix(".pdopt"))
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: expected a folder of save_checkpoint, save_group_sharded_model or save_state_dict, a folder or "
            "file of safetensors, or NAME.pdparams"
        )
    names = sorted(entry.name for entry in path.iterdir())
    if MANIFEST_FILE in names:
        return open_checkpoint(path)
    if MODEL_FILE in names:
        return _open_paddle(path / MODEL_FILE, path / OPTIMIZER_FILE)
    layers = {name: int(match[1]) for name in names if (match := _LAYER_FILE.fullmatch(name))}
    if layers:
        return _open_layers(path, layers)
    index = [name for name in names if name.endswith(_INDEX)]
    if index:
        return _open_safetensors(path, _files_of_index(path / index[0]))
    tensor_files = [name for name in names if name.endswith(".safetensors")]
    if tensor_files:
        return _open_safetensors(path, tensor_files)
    raise CheckpointError(
        f"{path} holds neither {MANIFEST_FILE} nor {MODEL_FILE}, layer_NN-model_states.pdparams or .safetensors files; "
        "if it is a folder of save_checkpoint, the save was not finished"
    )


def _files_of_index(path: Path) -> list[str]:
    try:
        files = dict.fromkeys(json.loads(path.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files: {error!r}") from error
    return [str(name) for name in files]


def _open_safetensors(folder: Path, names: list[str]) -> Contents:
    tensors: dict[Key, LazyTensor] = {}
    with TensorFiles(folder) as files:
        for name in names:
            for key, entry in files.entries(name).items():
                if ("model", key) in tensors:
                    raise CheckpointError(f"{folder / name}: {key!r} is in another file too, expected each name once")
                tensors["model", key] = LazyTensor(
                    entry.dtype, entry.shape, functools.partial(_read_slice, files, name, key, entry.dtype)
                )
    return Contents("safetensors", tensors, files=files)


def _read_slice(files: TensorFiles, name: str, key: str, dtype: str, start: int, stop: int) -> Any:
    array = np.empty(stop - start, numpy_dtype(dtype))
    files.read_into(name, key, start, array)
    return array


# ---------------------------------------------------------------------------------------------------- files of Paddle


def _open_paddle(model_path: Path, optimizer_path: Path) -> Contents:
    entries = read_file(str(model_path)).entries
    parameter_names: dict[str, str] = entries.pop(NAME_TABLE, {})
    contents = Contents("paddle", {}, parameter_names=parameter_names)
    firsts: dict[str, list[str]] = {}  # Paddle's automatic name -> structured names of the tensors that have it
    for name, value in entries.items():
        tensor = _in_memory(value, f"{model_path}: {name}")
        known = firsts.setdefault(parameter_names.get(name, name), [])
        # A tied weight, which Paddle writes under each of its names.  An equal automatic name alone tells nothing: two
        # files of two processes may have been merged.
        first = next((other for other in known if same_bytes(contents.tensors["model", other], tensor)), None)
        if first is None:
            contents.tensors["model", name] = tensor
            known.append(name)
        else:
            contents.aliases[name] = first
    contents.parameter_names = {name: automatic for automatic, names in firsts.items() for name in names}
    if optimizer_path.is_file():
        _add_optimizer(contents, firsts, optimizer_path)
    return contents


def _add_optimizer(contents: Contents, firsts: Mapping[str, Sequence[str]], path: Path) -> None:
    by_parameter = {automatic: names[0] for automatic, names in firsts.items()}
    state = read_file(str(path)).entries
    state.pop(NAME_TABLE, None)
    masters = state.pop("master_weights", None) or {}
    scheduler = state.pop("LR_Scheduler", None)
    contents.data = {"extra": None, "optimizer": "unknown"}
    if scheduler is not None:
        contents.data["scheduler"] = pack(dict(scheduler), {}, f"{path}: LR_Scheduler")
    for key, value in state.items():
        parts = split_key(key, by_parameter)
        if parts is None:
            raise CheckpointError(f"{path}: {key!r} belongs to no parameter of the model beside it")
        _check_one_owner(firsts[parts[0]], f"{path}: {key!r}")
        rest = parts[1][len(MASTER_SUFFIX) :] if parts[1].startswith(MASTER_SUFFIX) else parts[1]
        stem, _, number = rest[1:].rpartition("_")  # the number counts optimizers of the process
        place = ("optimizer", by_parameter[parts[0]], stem if number.isdigit() else rest[1:])
        contents.tensors[place] = _in_memory(value, f"{path}: {key}")
    for key, value in masters.items():
        name = key[: -len(MASTER_SUFFIX)] if key.endswith(MASTER_SUFFIX) else key
        if name not in by_parameter:
            raise CheckpointError(f"{path}: the master weight {key!r} belongs to no parameter of the model beside it")
        _check_one_owner(firsts[name], f"{path}: the master weight {key!r}")
        contents.tensors["optimizer", by_parameter[name], MASTER] = _in_memory(value, f"{path}: {key}")


def _check_one_owner(names: Sequence[str], what: str) -> None:
    if len(names) > 1:
        raise CheckpointError(
            f"{what} may belong to any of {', '.join(names)}, whose values differ and which all have this automatic "
            "name; convert the model's file without the optimizer's beside it"
        )


def _in_memory(value: Any, what: str) -> LazyTensor:
    if not isinstance(value, (paddle.Tensor, np.ndarray)):
        raise CheckpointError(f"{what} is of type {type(value).__name__}, expected a tensor")
    array = value.numpy() if isinstance(value, paddle.Tensor) else value
    dtype = dtype_name(array.dtype, what)
    flat = np.ascontiguousarray(array).reshape(-1)
    return LazyTensor(dtype, tuple(array.shape), lambda start, stop: flat[start:stop])


def _open_layers(folder: Path, layers: Mapping[str, int]) -> Contents:
    """``3.weight`` for ``weight`` in the file of layer 3, as the pipeline's one-process model has it."""
    entries_of = functools.lru_cache(maxsize=1)(functools.partial(_layer_entries, folder))
    contents = Contents("layers", {})
    for file, index in sorted(layers.items(), key=lambda item: item[1]):
        for name, value in entries_of(file).items():
            key = ("model", f"{index}.{name}")
            if key in contents.tensors:
                raise CheckpointError(f"{folder} has several files of layer {index}; remove those that are not meant")
            found = _in_memory(value, f"{folder / file}: {name}")

            def read(start: int, stop: int, file: str = file, name: str = name) -> Any:
                return _in_memory(entries_of(file)[name], name).read(start, stop)

            contents.tensors[key] = LazyTensor(found.dtype, found.shape, read)
    return contents


def _layer_entries(folder: Path, file: str) -> dict[str, Any]:
    entries = read_file(str(folder / file)).entries
    entries.pop(NAME_TABLE, None)
    return entries

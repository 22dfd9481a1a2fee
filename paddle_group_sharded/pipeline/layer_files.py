"""One file per layer, under Paddle's names, readable at any number of stages, chunks and replicas.

``layer_03-tensor_00-model_states.pdparams`` holds what ``paddle.save(layer.state_dict())`` would for layer 3 of the
list; with chunks, ``-virtual_pp_stage_01`` stands in the middle, as Paddle writes it.  Reading goes by the number of
the layer alone.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple, Optional

from ..comm import Comm
from ..comm.agreement import agree
from ..errors import CheckpointError, GroupShardedError, UsageError
from ..paddle_files import FileSet, read_file
from .grid import Grid
from .layer_state import load_layers, shape_problems, state_of_layers
from .segment import Segmentation
from .shared import SharedWeights

__all__ = ["LayerFiles"]

_NAME = re.compile(r"layer_(\d+)(-virtual_pp_stage_\d+)?(-tensor_\d+)?-model_states\.pdparams")
_NAME_TABLE = "StructuredToParameterName@@"  # paddle.save keeps under it what each entry's tensor is called


class LayerFiles(NamedTuple):
    """The files of one rank's layers."""

    layers: Mapping[int, Any]  # this rank's, by number in the list
    shared: SharedWeights
    segmentation: Segmentation
    grid: Grid
    comm: Comm  # over all ranks of the launch

    def save(self, folder: str) -> None:
        """What :meth:`.paddle_members.PaddleMembers.save_state_dict` says."""
        folder = self._check(folder)
        save = self.comm.exchange(secrets.token_hex(8), "save layers")[0]
        files = FileSet(folder, save)
        mine = {index: self._name(index) for index in self.layers} if self.grid.replica == 0 else {}
        try:
            self._together("save layers", lambda: self._write(files, folder, mine))
            self._together("save layers", files.publish)
        finally:
            files.discard()
        self._together("save layers", lambda: _remove_others(folder, mine))

    def load(self, folder: str) -> None:
        """What :meth:`.paddle_members.PaddleMembers.set_state_dir` says."""
        folder = self._check(folder)
        values: dict[str, Any] = {}
        saves: dict[str, str] = {}
        self._together("load layers", lambda: self._read(folder, values, saves))
        met = {save: name for theirs in self.comm.exchange(saves, "load layers") for save, name in theirs.items()}
        if len(met) > 1:
            first, second, *_ = met.values()
            raise CheckpointError(
                f"{folder} holds files of different saves, such as {first} and {second}: a save has not been "
                f"finished; save again, or load an earlier folder"
            )
        load_layers(self.layers, self.shared, self.segmentation.num_layers, values)
        self.shared.synchronize()

    def _name(self, index: int) -> str:
        chunk = self.segmentation.virtual_stage_of_layer(index) // self.segmentation.num_stages
        middle = f"-virtual_pp_stage_{chunk:02d}" if self.segmentation.num_chunks > 1 else ""
        return f"layer_{index:02d}{middle}-tensor_00-model_states.pdparams"

    def _write(self, files: FileSet, folder: str, names: Mapping[int, str]) -> None:
        os.makedirs(folder, exist_ok=True)
        for index, name in names.items():
            state = self.layers[index].state_dict()
            entries: dict[str, Any] = {entry: tensor.numpy() for entry, tensor in state.items()}
            entries[_NAME_TABLE] = {entry: tensor.name for entry, tensor in state.items()}
            files.write(name, entries)

    def _read(self, folder: str, values: dict[str, Any], saves: dict[str, str]) -> None:
        """Fill ``values`` by one-process names; ``saves``: which save each belongs to, with a file of it."""
        found = _files_in(folder)
        foreign = [name for index in found if index >= self.segmentation.num_layers for name in found[index]]
        if foreign:
            raise CheckpointError(
                f"{os.path.join(folder, foreign[0])} is of another model: this one has {self.segmentation.num_layers} "
                f"layers"
            )
        for index in sorted(self.layers):
            targets = state_of_layers({index: self.layers[index]})
            names = found.get(index, [])
            if not targets or (not names and all(self._comes_from_elsewhere(name) for name in targets)):
                continue
            path = os.path.join(folder, _only(folder, index, names, self._name(index)))
            contents = read_file(path)
            contents.entries.pop(_NAME_TABLE, None)
            entries = {f"{index}.{name}": value for name, value in contents.entries.items()}
            missing = [f"missing: {name}" for name in targets if name not in entries]
            unexpected = [f"unexpected: {name}" for name in entries if name not in targets]
            problems = missing + unexpected or shape_problems(targets, entries)
            if problems:
                raise CheckpointError(f"{path} does not fit layer {index}; " + "; ".join(problems))
            values.update(entries)
            if contents.save is not None:
                saves[contents.save] = path

    def _comes_from_elsewhere(self, name: str) -> bool:
        """Whether ``name`` is a shared weight that an earlier layer of the list has: Paddle writes it there only."""
        return self.shared.aliases(name)[0] != name

    def _check(self, folder: Any) -> str:
        problem = None
        if not isinstance(folder, (str, os.PathLike)):
            problem = UsageError(f"path must be a folder, got {type(folder).__name__}")
        elif os.path.isfile(folder):
            problem = UsageError(f"path must be a folder, but {str(folder)!r} is a file")
        agree((self.comm,), "files of layers", problem)
        return str(os.fspath(folder))

    def _together(self, label: str, action: Callable[[], None]) -> None:
        """Run ``action``; every rank returns after all have run it, or raises what one has raised."""
        problem: Optional[GroupShardedError] = None
        try:
            action()
        except GroupShardedError as error:
            problem = error
        except Exception as error:  # a full disk, a folder that may not be written or read
            problem = CheckpointError(f"{label}: {error}")
        agree((self.comm,), label, problem)


def _files_in(folder: str) -> dict[int, list[str]]:
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} does not exist; expected a folder of save_state_dict")
    found: dict[int, list[str]] = {}
    for name in sorted(os.listdir(folder)):
        match = _NAME.fullmatch(name)
        if match:
            found.setdefault(int(match.group(1)), []).append(name)
    return found


def _only(folder: str, index: int, names: list[str], expected: str) -> str:
    if len(names) == 1:
        return names[0]
    if not names:
        raise CheckpointError(f"{os.path.join(folder, expected)} does not exist, nor another file of layer {index}")
    raise CheckpointError(
        f"{folder} has several files of layer {index}: {', '.join(names)}; remove those that are not meant (files of "
        f"tensor parallel ranks cannot be read)"
    )


def _remove_others(folder: str, names: Mapping[int, str]) -> None:
    """Remove files of these layers that an earlier save with other chunks has left behind."""
    found = _files_in(folder)
    for index, name in names.items():
        for other in found.get(index, []):
            if other != name:
                os.remove(os.path.join(folder, other))

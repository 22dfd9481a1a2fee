"""What a checkpoint of any format holds, tensors being read when they are asked for; no process of training needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np

from ..errors import CheckpointError
from .dtypes import itemsize, numpy_dtype
from .manifest import MANIFEST_FILE, Key, Manifest, TensorEntry, overlaps
from .read import read_manifest
from .tensor_file import TensorFiles

__all__ = ["Contents", "LazyTensor", "open_checkpoint", "same_bytes"]

_CHUNK = 1 << 20  # elements that are compared at a time


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is not in memory."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[int, int], Any]  # elements between two numbers of the flattened tensor, as a 1-D array

    @property
    def numel(self) -> int:
        """Elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def size(self) -> int:
        """Bytes."""
        return self.numel * itemsize(self.dtype)

    def whole(self) -> Any:
        """All of it, in its shape; bfloat16 as its bits."""
        return self.read(0, self.numel).reshape(self.shape)


def same_bytes(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether both are the same tensor: element type, shape and every byte."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    bounds = ((start, min(start + _CHUNK, one.numel)) for start in range(0, one.numel, _CHUNK))
    return all(np.array_equal(one.read(*part).view(np.uint8), other.read(*part).view(np.uint8)) for part in bounds)


@dataclass
class Contents:
    """Tensors by key (see :mod:`.manifest`), and what stands beside them; use it as a context, which closes files."""

    kind: str  # "checkpoint", "safetensors", "paddle", "layers"
    tensors: dict[Key, LazyTensor]
    aliases: dict[str, str] = field(default_factory=dict)
    parameter_names: dict[str, str] = field(default_factory=dict)
    data: Any = field(default_factory=lambda: {"extra": None})  # as data.pack() makes it
    world_size: int = 1
    info: dict[str, Any] = field(default_factory=dict)
    files: Optional[TensorFiles] = None  # that the tensors are read from

    def __enter__(self) -> Contents:
        return self

    def __exit__(self, *_: object) -> None:
        if self.files is not None:
            self.files.close()

    @property
    def model(self) -> dict[str, LazyTensor]:
        """Parameters and buffers, by their first names."""
        return {key[1]: tensor for key, tensor in self.tensors.items() if key[0] == "model"}


def open_checkpoint(folder: Path) -> Contents:
    """A folder of :func:`.save_checkpoint`."""
    manifest: Manifest = read_manifest(folder)
    files = TensorFiles(folder, manifest.files)
    return Contents(
        kind="checkpoint",
        tensors={key: _lazy(files, entry) for key, entry in manifest.tensors.items()},
        aliases=manifest.aliases,
        parameter_names=manifest.parameter_names,
        data=manifest.data,
        world_size=manifest.world_size,
        info=manifest.info,
        files=files,
    )


def _lazy(files: TensorFiles, entry: TensorEntry) -> LazyTensor:
    def read(start: int, stop: int) -> Any:
        array = np.empty(stop - start, numpy_dtype(entry.dtype))
        for piece, low, high in overlaps(entry.pieces, start, stop):
            found = files.entry(piece.file, piece.key).dtype
            if found != entry.dtype:
                path = files.folder / piece.file
                raise CheckpointError(f"{path}: {piece.key!r} is {found}, expected {entry.dtype} as in {MANIFEST_FILE}")
            files.read_into(piece.file, piece.key, low - piece.start, array[low - start : high - start])
        return array

    return LazyTensor(entry.dtype, entry.shape, read)

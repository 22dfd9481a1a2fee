"""The part of one named tensor that this rank has in memory: what is read to save it, and written to load it."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import paddle

from ..paddle_compat import flat_view, host_view
from ..sharding.ops import copy_into
from .assign import Offer
from .dtypes import dtype_name, itemsize, numpy_dtype
from .manifest import Key, TensorEntry, key_text, overlaps, piece_name
from .tensor_file import Blob, TensorFiles

__all__ = ["Holding", "whole_holding"]

Tensor = Any

_CHUNK = 1 << 20  # elements that are converted at a time
_SAMPLE = 1024  # elements at either end that tell whether replicas have drifted apart


@dataclass(frozen=True)
class Holding:
    """Elements ``start`` to ``stop`` of the flattened tensor ``key``."""

    key: Key
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    stop: int
    tensor: Tensor  # holds them one after the other; an array where it is only saved
    offset: int = 0  # of the first one in ``tensor``
    own: bool = False  # the ranks' values may differ; that of the first rank counts

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return dtype_name(self.tensor.dtype, key_text(self.key))

    def offer(self) -> Offer:
        """What is told to the other ranks."""
        size = (self.stop - self.start) * itemsize(self.dtype)
        checksum = self._checksum(self.stop - self.start) if self.own else self._checksum(_SAMPLE)
        return Offer(self.key, self.dtype, self.shape, self.start, self.stop, size, checksum, self.own)

    def blob(self) -> Blob:
        """What is written: in the tensor's own shape where it is whole."""
        numel, count = math.prod(self.shape), self.stop - self.start
        name = piece_name(self.key, numel, self.start, self.stop)
        return Blob(name, self.dtype, self.shape if count == numel else (count,), self.array)

    def array(self) -> Any:
        """The elements as a 1-D array: the memory itself where it is on the host, else a copy."""
        if isinstance(self.tensor, np.ndarray):
            flat = np.ascontiguousarray(self.tensor, numpy_dtype(self.dtype)).reshape(-1)
            return flat[self.offset : self.offset + self.stop - self.start]
        view = self._view()
        return host_view(view if view.place.is_cpu_place() else view.cpu())

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.start == 0 and self.stop == math.prod(self.shape)

    def _checksum(self, count: int) -> int:
        """crc32 of the first and the last ``count`` elements' bytes."""
        checksum = 0
        for start, stop in _ends(self.stop - self.start, count):
            part = replace(self, start=self.start + start, stop=self.start + stop, offset=self.offset + start)
            checksum = zlib.crc32(part.array().view(np.uint8), checksum)
        return checksum

    def load(self, files: TensorFiles, entry: TensorEntry) -> None:
        """Overwrite the elements by those of ``entry``, converting where its element type is another one."""
        if not _in_order(self.tensor):
            whole = Holding(self.key, self.shape, self.start, self.stop, paddle.empty_like(self.tensor).contiguous())
            whole.load(files, entry)
            self.tensor.copy_(whole.tensor.reshape(self.tensor.shape), False)
            return
        in_place = entry.dtype == self.dtype and self.tensor.place.is_cpu_place()
        for piece, low, high in overlaps(entry.pieces, self.start, self.stop):
            target = flat_view(self.tensor, self.offset + low - self.start, self.offset + high - self.start)
            if in_place:
                files.read_into(piece.file, piece.key, low - piece.start, host_view(target))
                continue
            for first in range(0, high - low, _CHUNK):
                last = min(first + _CHUNK, high - low)
                array = np.empty(last - first, numpy_dtype(entry.dtype))
                files.read_into(piece.file, piece.key, low - piece.start + first, array)
                copy_into(flat_view(target, first, last), _to_tensor(array, entry.dtype))

    def _view(self) -> Tensor:
        tensor = self.tensor if _in_order(self.tensor) else self.tensor.contiguous()
        return flat_view(tensor, self.offset, self.offset + self.stop - self.start)


def whole_holding(key: Key, tensor: Tensor, own: bool = False) -> Holding:
    """A whole tensor."""
    return Holding(key, tuple(tensor.shape), 0, int(tensor.size), tensor, own=own)


def _ends(size: int, count: int) -> list[tuple[int, int]]:
    return [(0, size)] if size <= 2 * count else [(0, count), (size - count, size)]


def _in_order(tensor: Tensor) -> bool:
    return not tensor.size or bool(tensor.is_contiguous())


def _to_tensor(array: Any, dtype: str) -> Tensor:
    tensor = paddle.to_tensor(array)
    return tensor.view("bfloat16") if dtype == "bfloat16" else tensor

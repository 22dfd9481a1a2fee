"""Where two checkpoints differ, whatever their formats; a few megabytes of a tensor in memory at a time."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import numpy as np

from .contents import Contents, LazyTensor
from .manifest import Key, key_text

__all__ = ["Difference", "Differs", "compare"]

_CHUNK = 1 << 20  # elements


class Difference(NamedTuple):
    """One tensor that is not the same in both."""

    name: str
    text: str  # what differs, for people


class Differs(str):
    """A text that tells of a difference; the command that prints it ends with status 1."""


def compare(left: Contents, right: Contents, kinds: tuple[str, ...]) -> list[Difference]:
    """All differences in tensors whose keys begin with one of ``kinds``, in the order of ``left``."""
    ours = {key: tensor for key, tensor in left.tensors.items() if key[0] in kinds}
    theirs = {key: tensor for key, tensor in right.tensors.items() if key[0] in kinds}
    found = []
    for key, tensor in ours.items():
        other = _find(theirs, right, key)
        if other is None:
            found.append(Difference(key_text(key), "is in the first only"))
            continue
        text = _difference(tensor, other)
        if text:
            found.append(Difference(key_text(key), text))
    for key, tensor in theirs.items():
        if key in ours:
            continue
        other = _find(ours, left, key)  # tied there, and here a tensor of its own, perhaps with other values
        text = "is in the second only" if other is None else _difference(other, tensor)
        if text:
            found.append(Difference(key_text(key), text))
    return found


def _find(tensors: dict[Key, LazyTensor], contents: Contents, key: Key) -> Optional[LazyTensor]:
    """The tensor of ``key``, which may stand there under another name of a tied one."""
    if key in tensors or key[0] not in ("model", "optimizer"):
        return tensors.get(key)
    names = [contents.aliases.get(key[1], key[1])]
    return next((tensors[found] for name in names if (found := (key[0], name, *key[2:])) in tensors), None)


def _difference(one: LazyTensor, other: LazyTensor) -> str:
    if one.shape != other.shape and not one.numel == other.numel == 1:
        return f"has shape {list(one.shape)} and {list(other.shape)}"
    if one.dtype != other.dtype:
        return f"has dtype {one.dtype} and {other.dtype}"
    count, first, largest = 0, -1, 0.0
    for start in range(0, one.numel, _CHUNK):
        stop = min(start + _CHUNK, one.numel)
        a, b = one.read(start, stop), other.read(start, stop)
        unequal = np.flatnonzero(_bits(a) != _bits(b))
        if unequal.size:
            first = start + int(unequal[0]) if first < 0 else first
            count += int(unequal.size)
            apart = np.abs(_values(a[unequal], one.dtype) - _values(b[unequal], one.dtype))
            largest = max(largest, float(np.nanmax(apart)) if not np.isnan(apart).all() else float("nan"))
    if not count:
        return ""
    return f"differs in {count} of {one.numel} elements, by {largest:.6g} at most, first at {_place(first, one.shape)}"


def _place(index: int, shape: tuple[int, ...]) -> str:
    return str([int(part) for part in np.unravel_index(index, shape)]) if shape else "[]"


def _bits(array: Any) -> Any:
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.itemsize in (1, 2, 4, 8) else array


def _values(array: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.complex128 if dtype.startswith("complex") else np.float64)

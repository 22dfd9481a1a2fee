"""Tensors at the border to the network: names of dtypes, what can be summed how, and host arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from ..errors import UsageError
from ..paddle_compat import host_view
from .base import Segment

__all__ = [
    "MOVED",
    "SUMMED_AS",
    "check_tensor",
    "dtype_name",
    "host_widened",
    "numel_of",
    "overwrite",
    "overwrite_bytes",
    "widened",
]

Tensor = Any
Array = npt.NDArray[Any]

_SUMMED = {"float32", "float64", "int8", "uint8", "int32", "int64"}

SUMMED_AS = {"float16": "float32", "bfloat16": "float32", "int16": "int32", "bool": "int32"}
"""The wider dtypes in which gloo sums right, and fast, what it does not sum itself."""

MOVED = _SUMMED | {"float16", "bfloat16", "bool"}
"""The dtypes that gloo moves; others have to be moved as bytes."""


def dtype_name(tensor: Tensor) -> str:
    """``"float32"`` and so on, alike on every Paddle version."""
    return str(tensor.dtype).rpartition(".")[2]


def numel_of(segment: Segment) -> int:
    """Elements of a tensor, or of a stretch of zeros; quicker than ``tensor.size``."""
    return segment if isinstance(segment, int) else math.prod(segment.shape)


def check_tensor(tensor: Tensor, label: str, summed: bool = False) -> None:
    """Raise :class:`UsageError` for a tensor that cannot be communicated (``summed``: not even added up)."""
    if not tensor.is_contiguous():
        raise UsageError(
            f"'{label}': expected a contiguous tensor, got shape {list(tensor.shape)} with strides "
            f"{list(tensor.strides)}; pass tensor.contiguous()"
        )
    name = dtype_name(tensor)
    if summed and name not in _SUMMED and name not in SUMMED_AS:
        names = ", ".join(sorted(_SUMMED | set(SUMMED_AS)))
        raise UsageError(f"'{label}': expected a dtype that can be summed ({names}), got {name}")


def widened(dtype: str) -> str:
    """The dtype in which ``dtype`` is summed."""
    return SUMMED_AS.get(dtype, dtype)


def host_widened(tensor: Tensor) -> Array:
    """The elements, 1-D, in the dtype in which they are summed; a view of the tensor's memory if that is its own."""
    name = dtype_name(tensor)
    array: Array = host_view(tensor)
    if name == "bfloat16":  # the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(widened(name), copy=False)


def overwrite(tensor: Tensor, array: Array) -> None:
    """Write ``array``, 1-D and in the dtype in which ``tensor`` is summed, into the memory of ``tensor``."""
    if dtype_name(tensor) in SUMMED_AS:
        array = host_view(paddle.to_tensor(array).cast(tensor.dtype))
    host_view(tensor)[:] = array


def overwrite_bytes(tensor: Tensor, data: bytes) -> None:
    """Write the bytes of other tensors of its dtype into the memory of ``tensor``."""
    view = host_view(tensor)
    view[:] = np.frombuffer(data, view.dtype)

"""Tensors at the border to the network: names of dtypes, what can be summed how, and host arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from ..errors import UsageError

__all__ = [
    "MOVED",
    "SUMMED_AS",
    "check_tensor",
    "dtype_name",
    "from_bytes",
    "overwrite",
    "to_host",
    "to_host_widened",
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


def to_host(tensor: Tensor) -> Array:
    """A copy of the elements, 1-D; bfloat16 as its 16-bit patterns."""
    array: Array = tensor.numpy().reshape(-1)
    return array


def to_host_widened(tensor: Tensor) -> Array:
    """A copy of the elements, 1-D, in the dtype in which they are summed."""
    name = dtype_name(tensor)
    array = to_host(tensor)
    if name == "bfloat16":  # the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(widened(name), copy=False)


def from_bytes(data: bytes, dtype: str) -> Array:
    """The elements that :func:`to_host` gave, for :func:`overwrite`; bytes where NumPy does not know the dtype."""
    try:
        return np.frombuffer(data, dtype)
    except TypeError:
        return np.frombuffer(data, np.uint8)


def overwrite(tensor: Tensor, array: Array) -> None:
    """Write ``array`` (1-D) into the memory of ``tensor``: elements in its dtype or a wider one, or its bytes."""
    if array.dtype == np.uint8 and dtype_name(tensor) != "uint8":
        target = tensor.detach().reshape_([-1]).view("uint8")
        target.copy_(paddle.to_tensor(array), True)
    else:
        value = paddle.to_tensor(array.reshape(tuple(tensor.shape)))
        tensor.copy_(value if value.dtype == tensor.dtype else value.cast(tensor.dtype), True)

"""Copies and sums between flat tensors whose dtypes may differ.

Paddle has no CPU kernels that add 16-bit tensors, so those sums go through float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from ..paddle_compat import host_view

__all__ = ["LOW_PRECISION", "accumulate", "copy_into", "same_bits", "scale_into", "to_float32"]

Tensor = Any

LOW_PRECISION = (paddle.float16, paddle.bfloat16)


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy ``value`` into the memory of ``target`` (1-D, the same number of elements), casting where needed."""
    if target.dtype != value.dtype:
        value = value.astype(target.dtype)
    if target.size:
        target.copy_(value, False)


def scale_into(target: Tensor, value: Tensor, scale: float) -> None:
    """Set ``target`` to ``scale`` times ``value`` (1-D, the same number of elements); ``value`` may be changed."""
    if target.dtype == value.dtype == paddle.float32 and target.place.is_cpu_place():
        np.multiply(host_view(value), np.float32(scale), out=host_view(target))  # one pass over memory instead of two
    else:
        value.scale_(scale)
        copy_into(target, value)


def accumulate(target: Tensor, value: Tensor) -> None:
    """Add ``value`` to ``target`` in its memory (1-D, the same number of elements)."""
    if target.dtype in LOW_PRECISION:
        copy_into(target, target.astype(paddle.float32) + to_float32(value))
    else:
        target.add_(value.astype(target.dtype) if value.dtype != target.dtype else value)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two 1-D tensors of one dtype and size hold the same values; nan equals nan."""
    if one.place.is_cpu_place():
        return bool(np.array_equal(host_view(one).view(np.uint8), host_view(other).view(np.uint8)))
    return bool(((one == other) | ((one != one) & (other != other))).all())


def to_float32(value: Tensor) -> Tensor:
    """``value`` itself where it is not of a 16-bit dtype, else a float32 copy."""
    return value.astype(paddle.float32) if value.dtype in LOW_PRECISION else value

"""Optimizer states of pieces: what a state looks like, and its whole form.

A state belongs to a parameter.  Where Paddle gives it the parameter's shape it is cut like the parameter itself; a
scalar (a running product of betas) is the same on every rank that owns a piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

import numpy as np
import paddle

from ..paddle_compat import bind_view, flat_view, fresh_states, new_param
from .ops import copy_into

__all__ = ["StateSpec", "probe_states", "slice_state", "whole_shape"]

Tensor = Any
Optimizer = Any

_PROBE_NUMEL = 2  # more than one element, so that a state of one element is known to be a scalar


class StateSpec(NamedTuple):
    """One kind of state of an optimizer."""

    name: str  # as in the optimizer's own table, "moment1"
    scalar: bool
    lead: tuple[int, ...]  # dimensions before the parameter's own (ASGD keeps several gradients)
    dtype: Any
    shape: Optional[tuple[int, ...]] = None  # of the whole state, where it need not follow the parameter's


def probe_states(optimizer: Optimizer, like: Tensor, dtype: Any, whole: bool) -> dict[str, StateSpec]:
    """The states that ``optimizer`` keeps for a parameter of ``dtype``.

    They are found by giving states to a tiny parameter, or with ``whole`` to one of the shape of ``like``: the states
    of a user's own rule may have any shape.
    """
    param = new_param(like, like.shape if whole else [_PROBE_NUMEL], dtype)
    values = paddle.zeros(param.shape).astype(dtype).flatten()
    if values.size:
        bind_view(param, values, 0, int(values.size))
    specs = {}
    for name, state in fresh_states(optimizer, param).items():
        shape = tuple(state.shape)
        if whole:
            specs[name] = StateSpec(name, False, (), state.dtype, shape)
            continue
        scalar = shape[-1:] != (_PROBE_NUMEL,)
        specs[name] = StateSpec(name, scalar, () if scalar else shape[:-1], state.dtype)
    return specs


def whole_shape(spec: StateSpec, shape: Iterable[int]) -> list[int]:
    """Shape of the state of a parameter of ``shape``."""
    if spec.shape is not None:
        return list(spec.shape)
    return [1] if spec.scalar else [*spec.lead, *shape]


def slice_state(spec: StateSpec, whole: Tensor, numel: int, start: int, stop: int) -> Tensor:
    """The state of elements ``start`` to ``stop`` of a parameter with ``numel`` elements, as memory of its own."""
    if spec.scalar or spec.shape is not None:
        return whole.clone() if whole.size else whole
    rows = int(np.prod(spec.lead, dtype=np.int64))
    piece = paddle.empty([rows * (stop - start)], dtype=whole.dtype)
    for row in range(rows):
        source = flat_view(whole, row * numel + start, row * numel + stop)
        copy_into(flat_view(piece, row * (stop - start), (row + 1) * (stop - start)), source)
    return piece.reshape([*spec.lead, stop - start])

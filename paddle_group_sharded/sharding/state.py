"""Optimizer states of pieces: what a state looks like, and its whole form.

A state belongs to a parameter.  Where Paddle gives it the parameter's shape it is cut like the parameter itself; a
scalar (a running product of betas) is the same on every rank that owns a piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import paddle

from ..paddle_compat import create_accumulators, flat_view, new_param
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


def probe_states(optimizer: Optimizer, like: Tensor, dtype: Any) -> dict[str, StateSpec]:
    """The states that ``optimizer`` keeps for a parameter of ``dtype``, found by giving a tiny one its states."""
    param = new_param(like, [_PROBE_NUMEL], dtype)
    param.name = paddle.utils.unique_name.generate("state_probe")  # optimizers remember names for ever
    copy_from = paddle.zeros([_PROBE_NUMEL]).astype(dtype)
    copy_from._share_buffer_to(param)
    holder, optimizer._accumulators_holder = optimizer._accumulators_holder, {}
    names = len(optimizer._opti_name_list)
    try:
        create_accumulators(optimizer, [param])
    finally:
        optimizer._accumulators_holder = holder
        del optimizer._opti_name_list[names:]
    specs = {}
    for name, by_param in optimizer._accumulators.items():
        state = by_param.pop(param.name, None)
        if state is None:
            continue
        shape = tuple(state.shape)
        scalar = shape[-1:] != (_PROBE_NUMEL,)
        specs[name] = StateSpec(name, scalar, () if scalar else shape[:-1], state.dtype)
    optimizer._master_weights.pop(param.name, None)
    return specs


def whole_shape(spec: StateSpec, shape: Iterable[int]) -> list[int]:
    """Shape of the state of a parameter of ``shape``."""
    return [1] if spec.scalar else [*spec.lead, *shape]


def slice_state(spec: StateSpec, whole: Tensor, numel: int, start: int, stop: int) -> Tensor:
    """The state of elements ``start`` to ``stop`` of a parameter with ``numel`` elements, as memory of its own."""
    if spec.scalar:
        return whole.clone()
    rows = int(np.prod(spec.lead, dtype=np.int64))
    piece = paddle.empty([rows * (stop - start)], dtype=whole.dtype)
    for row in range(rows):
        source = flat_view(whole, row * numel + start, row * numel + stop)
        copy_into(flat_view(piece, row * (stop - start), (row + 1) * (stop - start)), source)
    return piece.reshape([*spec.lead, stop - start])

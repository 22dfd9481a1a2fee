"""Whole states for an optimizer that is not sharded.

Paddle's own ``set_state_dict`` finds states by names that count the optimizers which the process has made, and checks
them when a parameter is first stepped, if ever; here they go by parameter, and all are checked before one is set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import paddle

from .paddle_compat import (
    accumulators,
    create_accumulators,
    flat_view,
    keeps_masters,
    lr_scheduler,
    master_weights,
    param_groups,
    take_pending_states,
)
from .sharding.matching import Found, Owner, match_states
from .sharding.ops import LOW_PRECISION, copy_into
from .sharding.rules import steps_pieces, unwrap_optimizer
from .sharding.state import StateSpec, probe_states
from .sharding.whole import as_tensor

__all__ = ["prepare_plain_optimizer"]

Tensor = Any

_logger = logging.getLogger(__name__)


def prepare_plain_optimizer(optimizer: Any, state: Mapping[str, Any], source: str) -> Callable[[], None]:
    """Check a whole state, called ``source`` in messages; what is returned takes it and does not fail.

    Keys use this process's parameter names.  Raises :class:`CheckpointError` for what does not fit.
    """
    inner = unwrap_optimizer(optimizer)
    params = [tensor for _, tensors, _ in param_groups(inner) for tensor in tensors]
    whole = not steps_pieces(inner)
    specs: dict[Any, dict[str, StateSpec]] = {}
    owners = {}
    for tensor in params:
        dtype = paddle.float32 if keeps_masters(inner) and tensor.dtype in LOW_PRECISION else tensor.dtype
        kind = (dtype, tuple(tensor.shape) if whole else None)
        if kind not in specs:
            specs[kind] = probe_states(inner, tensor, dtype, whole)
        has_states = any(_unit_name(inner, tensor) in by_name for by_name in accumulators(inner).values())
        label = f"{tensor.name!r} {list(tensor.shape)}"
        owners[tensor.name] = Owner(label, list(tensor.shape), specs[kind], has_states)
    found = match_states(state, owners, lr_scheduler(inner) is not None, source)
    if found.fresh:
        _logger.warning("%s has no state of %s: it begins afresh there", source, ", ".join(found.fresh))
    return lambda: _take(inner, params, found)


def _take(inner: Any, params: list[Tensor], found: Found) -> None:
    take_pending_states(inner)
    for tensor in params:
        states = found.states.get(tensor.name, {})
        if any(_unit_name(inner, tensor) not in accumulators(inner).get(state, {}) for state in states):
            create_accumulators(inner, [tensor])
        for state, value in states.items():
            _copy(accumulators(inner)[state][_unit_name(inner, tensor)], value)
        master = master_weights(inner).get(tensor.name)
        if master is not None:
            _copy(master, found.masters.get(tensor.name, tensor))
    scheduler = lr_scheduler(inner)
    if found.scheduler and scheduler is not None:
        scheduler.set_state_dict(dict(found.scheduler))


def _unit_name(inner: Any, tensor: Tensor) -> str:
    """Under which name ``inner`` keeps the states of ``tensor``: its master's, where it has one."""
    master = master_weights(inner).get(tensor.name)
    return str(tensor.name if master is None else master.name)


def _copy(target: Tensor, value: Any) -> None:
    if target.size:
        copy_into(flat_view(target), flat_view(as_tensor(value)))

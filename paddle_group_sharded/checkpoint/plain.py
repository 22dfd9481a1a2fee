"""A model and an optimizer that are not sharded: every rank holds whole tensors of them, perhaps not all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Optional

import paddle

from ..errors import UsageError
from ..paddle_compat import (
    accumulators,
    create_accumulators,
    has_memory,
    keeps_masters,
    master_weights,
    param_groups,
    pending_states,
    take_pending_states,
)
from ..sharding.matching import Owner, match_states
from ..sharding.ops import LOW_PRECISION, copy_into
from ..sharding.rules import steps_pieces
from ..sharding.state import StateSpec, probe_states, whole_shape
from ..sharding.whole import as_tensor
from .holding import Holding, whole_holding
from .match import MASTER, StateOwner
from .subject import Names, differs_by_rank

__all__ = ["PlainSubject"]

Tensor = Any


class PlainSubject:
    """See :class:`.subject.Subject`."""

    level = "none"

    def __init__(self, names: Names, optimizer: Optional[Any]) -> None:
        """``names``: of this rank's tensors; ``optimizer``: the innermost one."""
        self.names = names
        for name, tensor in self.names.tensors.items():
            if tensor.size and not has_memory(tensor):
                raise UsageError(f"parameter {name!r} is not initialised; call its initialize() first")
        self._inner = optimizer
        self._params: dict[str, Tensor] = {}
        self._specs: dict[Any, dict[str, StateSpec]] = {}
        if self._inner is not None:
            self._params = {
                self.names.of(tensor): tensor for _, tensors, _ in param_groups(self._inner) for tensor in tensors
            }
            self._settle_pending()

    def _settle_pending(self) -> None:
        """Put what ``set_state_dict`` keeps for parameters that have not been stepped where it belongs."""
        if not pending_states(self._inner):
            return
        owners = {
            tensor.name: Owner(name, list(tensor.shape), self._specs_of(tensor), False)
            for name, tensor in self._params.items()
            if not self._has_states(tensor)
        }
        found = match_states(pending_states(self._inner), owners, False, "the state that the optimizer was given", True)
        take_pending_states(self._inner)
        for tensor in self._params.values():
            values = found.states.get(tensor.name, {})
            if values:
                create_accumulators(self._inner, [tensor])
            for state, value in values.items():
                target: Tensor = self._state(tensor, state)
                copy_into(target, as_tensor(value).reshape(target.shape))

    def _specs_of(self, tensor: Tensor) -> dict[str, StateSpec]:
        whole = not steps_pieces(self._inner)
        master = keeps_masters(self._inner) and tensor.dtype in LOW_PRECISION
        kind = (paddle.float32 if master else tensor.dtype, tuple(tensor.shape) if whole else None)
        if kind not in self._specs:
            self._specs[kind] = probe_states(self._inner, tensor, kind[0], whole)
        return self._specs[kind]

    def _unit_name(self, tensor: Tensor) -> str:
        """Under which name the optimizer keeps the states of ``tensor``: its master's, where it has one."""
        master = master_weights(self._inner).get(tensor.name)
        return str(tensor.name if master is None else master.name)

    def _has_states(self, tensor: Tensor) -> bool:
        name = self._unit_name(tensor)
        return any(name in by_name for by_name in accumulators(self._inner).values())

    def _state(self, tensor: Tensor, state: str) -> Optional[Tensor]:
        if state == MASTER:
            return master_weights(self._inner).get(tensor.name)
        return accumulators(self._inner).get(state, {}).get(self._unit_name(tensor))

    # --------------------------------------------------------------------------------------------------------- saving

    def model(self) -> list[Holding]:
        """See :class:`.subject.Subject`."""
        return [
            whole_holding(("model", name), tensor, differs_by_rank(name, tensor))
            for name, tensor in self.names.tensors.items()
        ]

    def states(self) -> list[Holding]:
        """See :class:`.subject.Subject`."""
        wanted = {name: [*self._specs_of(tensor), MASTER] for name, tensor in self._params.items()}
        return [
            whole_holding(("optimizer", name, state), tensor)
            for name, states in wanted.items()
            for state in states
            if (tensor := self._state(self._params[name], state)) is not None
        ]

    # -------------------------------------------------------------------------------------------------------- loading

    def owners(self) -> dict[str, StateOwner]:
        """See :class:`.subject.Subject`."""
        owners = {}
        for name, tensor in self._params.items():
            specs = self._specs_of(tensor)
            shapes = {state: tuple(whole_shape(spec, tensor.shape)) for state, spec in specs.items()}
            if keeps_masters(self._inner) and tensor.dtype in LOW_PRECISION:
                shapes[MASTER] = tuple(tensor.shape)
            scalars = frozenset(state for state, spec in specs.items() if spec.scalar)
            owners[name] = StateOwner(shapes, scalars, self._has_states(tensor))
        return owners

    def begin_load(self) -> None:
        """See :class:`.subject.Subject`."""
        if self._inner is not None:
            take_pending_states(self._inner)

    def end_weights(self) -> None:
        """See :class:`.subject.Subject`.  Masters follow their parameters."""
        for tensor in self._params.values():
            master = self._state(tensor, MASTER)
            if master is not None:
                value = tensor.astype(paddle.float32)
                same = master.astype(tensor.dtype).astype(paddle.float32) == value
                master.copy_(paddle.where(same, master, value), False)  # keeps its digits where it rounds to the value

    def state_targets(self, wanted: Mapping[str, Iterable[str]]) -> list[Holding]:
        """See :class:`.subject.Subject`."""
        targets = []
        for name, states in wanted.items():
            tensor = self._params[name]
            if any(self._state(tensor, state) is None for state in states):
                create_accumulators(self._inner, [tensor])
            for state in states:
                target = self._state(tensor, state)
                if target is not None:
                    targets.append(whole_holding(("optimizer", name, state), target))
        return targets

"""Whole gradients and whole optimizer states of one parameter, read and set by name."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import paddle

from ..errors import StateError, UsageError
from ..paddle_compat import flat_view
from .engine import Engine
from .group import ParamGroup
from .param import ShardedParam
from .states import StateTable

__all__ = ["Views"]

Tensor = Any


class Views:
    """Reads and writes by structured name, or by the Parameter itself; every call is collective."""

    def __init__(self, engine: Engine, states: StateTable) -> None:
        """Look into ``engine`` and ``states``."""
        self._engine = engine
        self._states = states

    def grad(self, key: Any) -> Optional[Tensor]:
        """The averaged gradient that the step will see, in the parameter's shape; None where no rank has one.

        Collective.  Gradients that no_sync() has kept back are reduced first.
        """
        param = self._engine.param_of(key)
        self._engine.finish_grads()
        return self._whole_grads(param.group).get(param)

    def give_back_grads(self) -> None:
        """Leave gradients that have not been stepped with the parameters, averaged and whole.  Collective."""
        engine = self._engine
        waiting = bool(engine.reducer.left) or any(group.gradients.any for group in engine.groups)
        for comm in (engine.comm, engine.dp_comm):
            waiting = any(comm.exchange(waiting, "gradients that have not been stepped"))
        if not waiting:
            return
        engine.finish_grads()
        found: dict[ShardedParam, Tensor] = {}
        for group in engine.groups:
            if group.expects_grad:
                found.update(self._whole_grads(group))
        engine.drop_grads(keep_reached=True)
        for param, grad in found.items():
            param.tensor.grad = grad

    def _whole_grads(self, group: ParamGroup) -> dict[ShardedParam, Tensor]:
        """The gradients of one group in the parameters' shapes, where any rank has one.  Collective."""
        label = f"gradients of {group.name}"
        by_rank = self._engine.comm.exchange([param.reached for param in group.params], label)
        full = self._engine.full_group(group, group.gradients.shard(), label)
        found = {}
        for param, slot, *reached in zip(group.params, group.layout.slots, *by_rank):
            if any(reached) and param.expects_grad and param.numel:
                found[param] = flat_view(full, slot.start, slot.stop).clone().reshape(param.tensor.shape)
        return found

    def set_grad(self, key: Any, value: Any) -> None:
        """Replace the gradient by a whole tensor, given alike on every rank.  Collective."""
        param = self._engine.param_of(key)
        value = self._checked(param, value, list(param.tensor.shape), "gradient")
        self._engine.finish_grads()
        param.reached = True
        piece = param.group.pieces[param.index]
        if piece is not None:
            param.group.gradients.set(param.index, flat_view(value, piece.start, piece.stop))

    def state_names(self, key: Any) -> list[str]:
        """The states that the optimizer keeps for a parameter, such as ``moment1``; none before its first step."""
        param = self._engine.param_of(key)
        if param not in self._states.stepped:
            return []
        names = list(self._states.specs(param))
        return [*names, "master_weight"] if self._states.is_master(param) else names

    def state(self, key: Any, name: str) -> Tensor:
        """The whole state ``name`` of a parameter.  Collective.

        Raises :class:`StateError` where the parameter has not been stepped yet, :class:`UsageError` for an unknown
        name.
        """
        param = self._engine.param_of(key)
        self._check_state(param, name)
        return self._states.whole_of(param, name)

    def set_state(self, key: Any, name: str, value: Any) -> None:
        """Replace the whole state ``name`` of a parameter; every rank gives the same value."""
        param = self._engine.param_of(key)
        self._check_state(param, name)
        value = self._checked(param, value, self._states.shape_of(param, name), f"state {name}")
        self._states.set_whole(param, name, value)

    def _check_state(self, param: ShardedParam, name: str) -> None:
        names = self.state_names(param.tensor)
        if not names:
            raise StateError(f"parameter {param} has no optimizer state yet; it gets one at its first step")
        if name not in names:
            raise UsageError(f"parameter {param} has no state {name!r}; it has {', '.join(names)}")

    @staticmethod
    def _checked(param: ShardedParam, value: Any, shape: list[int], what: str) -> Tensor:
        value = value if isinstance(value, paddle.Tensor) else paddle.to_tensor(np.asarray(value))
        if list(value.shape) != shape:
            raise UsageError(f"{what} of {param}: expected shape {shape}, got {list(value.shape)}")
        return value

"""A model and an optimizer that went through ``group_sharded_parallel``: every rank holds pieces of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Optional

import paddle

from ..errors import UsageError
from ..paddle_compat import accumulators, bind_view, create_accumulators, has_memory, release
from ..sharding.engine import Engine
from ..sharding.group import GroupState, ParamGroup
from ..sharding.optimizer import ShardedOptimizer
from ..sharding.param import ShardedParam
from ..sharding.state import StateSpec, whole_shape
from ..sharding.unit import WholeUnit
from .holding import Holding, whole_holding
from .match import MASTER, StateOwner
from .subject import Names, differs_by_rank

__all__ = ["ShardedSubject"]

Tensor = Any


class ShardedSubject:
    """See :class:`.subject.Subject`."""

    def __init__(self, engine: Engine, state: Mapping[str, Tensor], optimizer: Optional[Any]) -> None:
        """``state``: the parameters and buffers by every name; parameters may hold no memory."""
        if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
            raise UsageError(
                "optimizer must be the one that group_sharded_parallel returned beside the model, got "
                f"{type(optimizer).__name__}"
            )
        if optimizer is not None and optimizer._engine is not engine:
            raise UsageError("optimizer belongs to another model; pass the one that was returned beside this model")
        self.names = Names(state)
        self.level = engine.config.level.value
        self._engine = engine
        self._table = None if optimizer is None else optimizer._states
        self._optim = None if optimizer is None else optimizer._optim
        self._units = {} if optimizer is None else optimizer._units
        self._params: dict[str, ShardedParam] = {}
        if optimizer is not None:
            self._params = {self.names.of(param.tensor): param for param in engine.params if param.optimized}

    # --------------------------------------------------------------------------------------------------------- saving

    def model(self) -> list[Holding]:
        """See :class:`.subject.Subject`."""
        for group in self._engine.groups:
            group.adopt_writes()
        cut = {id(group): self._is_cut(group) for group in self._engine.groups}
        holdings = []
        for name, tensor in self.names.tensors.items():
            key = ("model", name)
            param = self._engine.by_id.get(id(tensor))
            if param is None or not cut[id(param.group)]:
                holdings.append(whole_holding(key, tensor, differs_by_rank(name, tensor)))
                continue
            piece = param.group.pieces[param.index]
            start, stop, offset = (0, 0, 0) if piece is None else (piece.start, piece.stop, piece.shard_start)
            holdings.append(Holding(key, tuple(tensor.shape), start, stop, param.group.shard, offset))
        return holdings

    def _is_cut(self, group: ParamGroup) -> bool:
        """Whether all ranks agree on the values of ``group``, so that each needs to read or write its shard only."""
        if group.placements.param:
            return True
        return not any(differs_by_rank(param.name, param.tensor) for param in group.params)

    def states(self) -> list[Holding]:
        """See :class:`.subject.Subject`."""
        if self._table is None:
            return []
        self._table.refresh_rewritten()
        holdings: list[Holding] = []
        for name, param in self._params.items():
            if param in self._table.stepped and param in self._units:
                for state, spec in self._table.specs(param).items():
                    holdings += self._state_parts(name, param, state, spec)
                holdings += self._master_part(name, param)
        return holdings

    def _state_parts(self, name: str, param: ShardedParam, state: str, spec: StateSpec) -> Iterator[Holding]:
        unit = self._units[param]
        tensor = accumulators(self._optim).get(state, {}).get(unit.tensor.name)
        if tensor is None:
            return
        key = ("optimizer", name, state)
        if spec.scalar or spec.shape is not None:
            yield whole_holding(key, tensor)
            return
        shape = tuple(whole_shape(spec, param.tensor.shape))
        width = unit.stop - unit.start
        for row in range(math.prod(spec.lead)):
            start = row * param.numel + unit.start
            yield Holding(key, shape, start, start + width, tensor, row * width)

    def _master_part(self, name: str, param: ShardedParam) -> Iterator[Holding]:
        unit = self._units[param]
        if not unit.is_master or (isinstance(unit, WholeUnit) and (unit.stale or not has_memory(unit.tensor))):
            return  # a stale one will be made anew from the parameter
        yield Holding(("optimizer", name, MASTER), tuple(param.tensor.shape), unit.start, unit.stop, unit.tensor)

    # -------------------------------------------------------------------------------------------------------- loading

    def owners(self) -> dict[str, StateOwner]:
        """See :class:`.subject.Subject`."""
        owners = {}
        for name, param in self._params.items():
            if self._table is None:
                break
            specs = self._table.specs(param)
            shapes = {state: tuple(whole_shape(spec, param.tensor.shape)) for state, spec in specs.items()}
            if self._table.is_master(param):
                shapes[MASTER] = tuple(param.tensor.shape)
            scalars = frozenset(state for state, spec in specs.items() if spec.scalar)
            owners[name] = StateOwner(shapes, scalars, param in self._table.stepped)
        return owners

    def begin_load(self) -> None:
        """See :class:`.subject.Subject`."""
        self._engine.residency.release_all()
        for group in self._engine.groups:
            group.adopt_writes()

    def end_weights(self) -> None:
        """See :class:`.subject.Subject`."""
        for group in self._engine.groups:
            group.rewritten = True
            if group.placements.param:
                if group.state is GroupState.FULL:  # inside of gathered()
                    group.reload()
            elif self._is_cut(group):
                work = group.publish()
                if work is not None:
                    work.wait()
        if self._table is not None:
            self._table.refresh_rewritten()

    def state_targets(self, wanted: Mapping[str, Iterable[str]]) -> list[Holding]:
        """See :class:`.subject.Subject`."""
        targets: list[Holding] = []
        if self._table is not None:
            self._table.before_change()
        for name, states in wanted.items():
            param = self._params[name]
            if self._table is None:
                break
            self._table.stepped[param] = None
            if param not in self._units:
                continue
            self._make_states(param)
            specs = self._table.specs(param)
            for state in states:
                if state == MASTER:
                    self._make_master(param)
                    targets += self._master_part(name, param)
                else:
                    targets += self._state_parts(name, param, state, specs[state])
        return targets

    def _make_states(self, param: ShardedParam) -> None:
        """Give the unit fresh states where it has none."""
        unit = self._units[param]
        table = accumulators(self._optim)
        if all(unit.tensor.name in table.get(state, {}) for state in self._specs(param)):
            return
        absent = not has_memory(unit.tensor)
        if absent:  # a whole unit has memory from its first step on; its states are made for what has memory
            bind_view(unit.tensor, paddle.zeros([param.numel]).astype(unit.tensor.dtype), 0, param.numel)
        create_accumulators(self._optim, [unit.tensor])
        if absent:
            release(unit.tensor)

    def _specs(self, param: ShardedParam) -> Iterable[str]:
        return () if self._table is None else self._table.specs(param)

    def _make_master(self, param: ShardedParam) -> None:
        unit = self._units[param]
        if isinstance(unit, WholeUnit) and unit.is_master:
            if not has_memory(unit.tensor):
                bind_view(unit.tensor, paddle.zeros([param.numel]), 0, param.numel)
            unit.stale = False

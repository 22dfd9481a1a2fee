"""The optimizer's states as a table: taken over, whole for saving, and read back.

Keys are those of an unsharded run: ``<parameter name>_<state>_0``, with ``_fp32_master_0`` after the name where the
state belongs to a master weight, and the masters themselves under ``master_weights``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Optional

import paddle

from ..paddle_compat import (
    accumulators,
    add_pending_states,
    bind_view,
    create_accumulators,
    flat_view,
    forget_fused_params,
    has_memory,
    lr_scheduler,
    master_weights,
    pending_states,
    release,
    set_master_weights,
    share_memory,
    take_pending_states,
)
from .engine import Engine
from .group import ParamGroup
from .matching import MASTER_SUFFIX, Found, Owner, match_states
from .ops import LOW_PRECISION, copy_into
from .param import ShardedParam
from .state import StateSpec, probe_states, slice_state, whole_shape
from .unit import WholeUnit
from .whole import as_tensor

__all__ = ["StateTable"]

Tensor = Any
Optimizer = Any

_logger = logging.getLogger(__name__)


class StateTable:
    """The states of one sharded optimizer."""

    def __init__(
        self,
        inner: Optimizer,
        engine: Engine,
        units: Mapping[ShardedParam, Any],
        owners: Mapping[ShardedParam, int],
        whole: bool,
        master: bool,
    ) -> None:
        """Look after the states that ``inner`` keeps for ``units``."""
        self._inner = inner
        self._engine = engine
        self._units = units
        self._owners = owners
        self._whole_units = whole
        self._master = master
        self._specs: dict[Any, dict[str, StateSpec]] = {}
        self.before_change: Callable[[], None] = lambda: None  # called before states are changed from outside a step
        self._learned: set[ShardedParam] = set()
        self.stepped: dict[ShardedParam, None] = {}  # those that have states; the same on every rank

    def specs(self, param: ShardedParam) -> dict[str, StateSpec]:
        """The kinds of state that ``param`` has or would get."""
        dtype = paddle.float32 if self.is_master(param) else param.group.dtype
        key = (dtype, tuple(param.tensor.shape) if self._whole_units else None)
        if key not in self._specs:
            self._specs[key] = probe_states(self._inner, param.tensor, dtype, self._whole_units)
        return self._specs[key]

    def is_master(self, param: ShardedParam) -> bool:
        """Whether ``param`` is stepped as a float32 copy; the same on every rank."""
        return self._master and param.group.dtype in LOW_PRECISION

    def learn(self, params: Iterable[ShardedParam]) -> None:
        """Know states that a user's rule has made in its first step of ``params``, not before.  Collective."""
        new = [param for param in params if param not in self._learned]
        if not (self._whole_units and new):
            return
        self._learned.update(new)
        found: dict[int, dict[str, tuple[tuple[int, ...], str]]] = {}
        for number, param in enumerate(new):
            unit = self._units.get(param)
            if unit is not None:
                states = ((name, by_name.get(unit.tensor.name)) for name, by_name in accumulators(self._inner).items())
                found[number] = {
                    name: (tuple(state.shape), str(state.dtype).rpartition(".")[2])
                    for name, state in states
                    if state is not None and name not in self.specs(param)
                }
        for by_number in self._engine.comm.exchange(found, "states of the first step"):
            for number, states_of_param in by_number.items():
                for name, (shape, dtype) in states_of_param.items():
                    spec = StateSpec(name, False, (), getattr(paddle, dtype), shape)
                    self.specs(new[number])[name] = spec

    # --------------------------------------------------------------------------------------------------- taking over

    def adopt(self) -> None:
        """Cut the states that the optimizer already has; the whole tensors are given up one by one."""
        inner = self._inner
        masters = master_weights(inner)
        # What set_state_dict left for parameters that have not been stepped; the states of others have moved on since.
        known = {name for by_name in accumulators(inner).values() for name in by_name}
        known |= {name for name, master in masters.items() if master.name in known}
        unstepped = [param for param in self._all_params() if param.tensor.name not in known]
        pending = self._match(pending_states(inner), unstepped, "the state that the optimizer was given", True)
        take_pending_states(inner)
        names = {param.tensor.name: param for param in self._all_params()}
        names.update({master.name: names[name] for name, master in masters.items() if name in names})
        forget_fused_params(inner)
        for state_name, by_name in list(accumulators(inner).items()):
            for name in list(by_name):
                if name in names:
                    self._adopt_state(self.specs(names[name]).get(state_name), by_name, name, names[name])
        for name, master in masters.items():
            if name in names:
                self._set_master(names[name], master)
        set_master_weights(inner, {})
        self._take(pending)

    def _all_params(self) -> Iterator[ShardedParam]:
        return (param for param in self._engine.params if param.optimized)

    def _adopt_state(
        self, spec: Optional[StateSpec], by_name: dict[str, Tensor], name: str, param: ShardedParam
    ) -> None:
        whole = by_name.pop(name)
        self.stepped[param] = None
        unit = self._units.get(param)
        if unit is None:
            return
        if spec is None or spec.scalar or self._whole_units:
            by_name[unit.tensor.name] = whole
            return
        piece = slice_state(spec, whole, param.numel, unit.start, unit.stop)
        piece.name = whole.name
        by_name[unit.tensor.name] = piece

    def _set_master(self, param: ShardedParam, master: Tensor) -> None:
        unit = self._units.get(param)
        if unit is not None and unit.is_master:
            value = flat_view(master, unit.start, unit.stop)
            if self._whole_units:
                value = value.reshape(param.tensor.shape).clone()
                share_memory(value, unit.tensor)
                unit.stale = False
            else:
                copy_into(flat_view(unit.tensor), value)

    def refresh_rewritten(self) -> None:
        """Copies of pieces follow weights that somebody other than a step has written."""
        for group in self._engine.groups:
            group.adopt_writes()
            if not group.rewritten:
                continue
            group.rewritten = False
            for param in group.params:
                unit = self._units.get(param)
                if isinstance(unit, WholeUnit):
                    unit.stale = True
                elif unit is not None and unit.is_copy:
                    unit.refresh()

    # ------------------------------------------------------------------------------------------------------- whole

    def whole(self, keep: bool, as_arrays: bool = False) -> dict[str, Any]:
        """The state as an unsharded optimizer's ``state_dict()``; empty where ``keep`` is False.  Collective.

        Memory grows by the result, where it is kept, and one group.  The values are tensors, or NumPy arrays.
        """
        result: dict[str, Any] = {}
        masters: dict[str, Any] = {}
        for group in self._engine.groups:
            params = [param for param in group.params if param in self.stepped]
            if not params:
                continue
            for spec in self.specs(params[0]).values():
                for param, value in self._whole_state(group, params, spec, keep):
                    if keep:
                        suffix = MASTER_SUFFIX if self.is_master(param) else ""
                        value.name = f"{param.tensor.name}{suffix}_{spec.name}_0"
                        result[value.name] = value.numpy() if as_arrays else value
            if self.is_master(params[0]):
                for param, value in self._whole_masters(group, params, keep):
                    if keep:
                        value.name = f"{param.tensor.name}{MASTER_SUFFIX}"
                        masters[param.tensor.name] = value.numpy() if as_arrays else value
        if masters:
            result["master_weights"] = masters
        scheduler = lr_scheduler(self._inner)
        if keep and scheduler is not None:
            result["LR_Scheduler"] = scheduler.state_dict()
        return result

    def whole_of(self, param: ShardedParam, name: str) -> Tensor:
        """The whole state ``name`` (or ``master_weight``) of ``param``.  Collective."""
        if name == "master_weight":
            return next(value for _, value in self._whole_masters(param.group, [param], keep=True))
        spec = self.specs(param)[name]
        return next(value for _, value in self._whole_state(param.group, [param], spec, keep=True))

    def shape_of(self, param: ShardedParam, name: str) -> list[int]:
        """Shape of the whole state ``name`` of ``param``."""
        spec = StateSpec(name, False, (), None) if name == "master_weight" else self.specs(param)[name]
        return whole_shape(spec, param.tensor.shape)

    def set_whole(self, param: ShardedParam, name: str, value: Tensor) -> None:
        """Take a whole state of ``param``; the weights follow a new master weight."""
        self.before_change()
        if name == "master_weight":
            self._engine.write_param(param, value)
            self.refresh_rewritten()
            self._set_master(param, value)
        else:
            self._store(param, self.specs(param)[name], value)

    def state_of(self, param: ShardedParam, name: str) -> Optional[Tensor]:
        """This rank's own part of state ``name`` of ``param``, or None."""
        unit = self._units.get(param)
        return None if unit is None else accumulators(self._inner).get(name, {}).get(unit.tensor.name)

    def _whole_state(
        self, group: ParamGroup, params: list[ShardedParam], spec: StateSpec, keep: bool
    ) -> Iterator[tuple[ShardedParam, Tensor]]:
        label = f"state {spec.name} of {group.name}"
        if self._whole_units:
            for param in params:
                own_spec = self.specs(param)[spec.name]  # its shape is that of this parameter's state
                yield param, self._from_owner(param, self.state_of(param, spec.name), own_spec, label)
            return
        if spec.scalar:
            own = [(param.index, self.state_of(param, spec.name)) for param in params]
            mine = {index: state.numpy() for index, state in own if state is not None}
            merged: dict[int, Any] = {}
            for part in self._engine.comm.exchange(mine, label):
                merged.update(part)
            for param in params:
                if keep:
                    yield param, paddle.to_tensor(merged[param.index]).astype(spec.dtype)
            return
        rows = 1
        for size in spec.lead:
            rows *= size
        parts: dict[ShardedParam, list[Tensor]] = {param: [] for param in params}
        for row in range(rows):
            pieces = {param: self.state_of(param, spec.name) for param in params}
            for param, whole in self._join(group, pieces, row, spec.dtype, label, keep):
                parts[param].append(whole)
        if keep:
            for param in params:
                shape = whole_shape(spec, param.tensor.shape)
                yield param, (paddle.concat(parts[param]).reshape(shape) if param.numel else paddle.zeros(shape))

    def _join(
        self,
        group: ParamGroup,
        pieces: Mapping[ShardedParam, Optional[Tensor]],
        row: int,
        dtype: Any,
        label: str,
        keep: bool,
    ) -> list[tuple[ShardedParam, Tensor]]:
        """Row ``row`` of each piece, from every rank, as whole 1-D tensors."""
        shard = paddle.zeros([group.layout.shard_numel]).astype(dtype)
        for param, state in pieces.items():
            piece = group.pieces[param.index]
            if piece is not None and state is not None:
                source = flat_view(state, row * piece.numel, (row + 1) * piece.numel)
                copy_into(flat_view(shard, piece.shard_start, piece.shard_start + piece.numel), source)
        full = self._engine.full_group(group, shard, label)
        if not keep:
            return []
        slots = group.layout.slots
        views = [(param, flat_view(full, slots[param.index].start, slots[param.index].stop)) for param in pieces]
        return [(param, view.clone() if param.numel else view) for param, view in views]

    def _whole_masters(
        self, group: ParamGroup, params: list[ShardedParam], keep: bool
    ) -> Iterator[tuple[ShardedParam, Tensor]]:
        label = f"master weights of {group.name}"
        own = {param: self._units[param].tensor if param in self._units else None for param in params}
        if self._whole_units:
            spec = StateSpec("master", False, (), paddle.float32)
            for param in params:
                yield param, self._from_owner(param, own[param], spec, label)
            return
        for param, whole in self._join(group, own, 0, paddle.float32, label, keep):
            yield param, whole.reshape(param.tensor.shape)

    def _from_owner(self, param: ShardedParam, own: Optional[Tensor], spec: StateSpec, label: str) -> Tensor:
        owner = self._owners[param]
        if self._engine.comm.rank == owner and own is not None and own.size:
            value = own.clone()
        else:
            value = paddle.zeros(whole_shape(spec, param.tensor.shape)).astype(spec.dtype)
        self._engine.comm.broadcast(value, owner, f"{label}: {param.name}").wait()
        return value

    def give_back(self) -> None:
        """Leave the inner optimizer with whole states over the user's own parameters.  Collective."""
        self.before_change()
        state = self.whole(keep=True)
        masters = state.pop("master_weights", {})
        inner = self._inner
        for unit in self._units.values():
            for by_name in accumulators(inner).values():
                by_name.pop(unit.tensor.name, None)
        for param in self.stepped:
            suffix = MASTER_SUFFIX if self.is_master(param) else ""
            for spec in self.specs(param).values():
                value = state[f"{param.tensor.name}{suffix}_{spec.name}_0"]
                accumulators(inner)[spec.name][f"{param.tensor.name}{suffix}"] = value
        if masters:
            set_master_weights(inner, masters)

    # ------------------------------------------------------------------------------------------------------ loading

    def prepare(self, state_dict: Mapping[str, Any], source: str = "the optimizer state") -> Callable[[], None]:
        """Check a whole state, called ``source`` in messages; what is returned takes it and does not fail.

        Raises :class:`CheckpointError` as :func:`.matching.match_states` says.
        """
        found = self._match(state_dict, self._all_params(), source)
        if found.fresh:
            _logger.warning("%s has no state of %s: it begins afresh there", source, ", ".join(found.fresh))

        def commit() -> None:
            self._take(found)
            scheduler = lr_scheduler(self._inner)
            if found.scheduler and scheduler is not None:
                scheduler.set_state_dict(dict(found.scheduler))

        return commit

    def _match(
        self, state_dict: Mapping[str, Any], params: Iterable[ShardedParam], source: str, partial: bool = False
    ) -> Found:
        owners = {
            param.tensor.name: Owner(repr(param), list(param.tensor.shape), self.specs(param), param in self.stepped)
            for param in params
        }
        has_scheduler = lr_scheduler(self._inner) is not None
        return match_states(state_dict, owners, has_scheduler, source, partial, may_have_more=self._whole_units)

    def _take(self, found: Found) -> None:
        self.before_change()
        self.refresh_rewritten()  # before the masters are set, which the weights would overwrite otherwise
        for param in self._all_params():
            name = param.tensor.name
            for state, value in found.states.get(name, {}).items():
                self._store(param, self.specs(param)[state], as_tensor(value))
            if name in found.masters:
                self._set_master(param, as_tensor(found.masters[name]))
            if param in self._units and name in found.more:
                add_pending_states(self._inner, found.more[name])

    def _store(self, param: ShardedParam, spec: StateSpec, whole: Tensor) -> None:
        self.stepped[param] = None
        unit = self._units.get(param)
        if unit is None:
            return
        by_name = accumulators(self._inner)[spec.name]
        if unit.tensor.name not in by_name:
            absent = not has_memory(unit.tensor)
            if absent:  # a whole unit has memory from its first step on; its states are made for what has memory
                bind_view(unit.tensor, paddle.zeros([param.numel]).astype(unit.tensor.dtype), 0, param.numel)
            create_accumulators(self._inner, [unit.tensor])
            if absent:
                release(unit.tensor)
        state = slice_state(spec, whole, param.numel, unit.start, unit.stop)
        copy_into(flat_view(by_name[unit.tensor.name]), flat_view(state))

"""The optimizer's states as a table: taken over, whole for saving, and read back.

Keys are those of an unsharded run: ``<parameter name>_<state>_0``, with ``_fp32_master_0`` after the name where the
state belongs to a master weight, and the masters themselves under ``master_weights``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

import paddle

from ..errors import CheckpointError
from ..paddle_compat import create_accumulators, flat_view
from .engine import Engine
from .group import ParamGroup
from .ops import copy_into
from .param import ShardedParam
from .state import StateSpec, probe_states, slice_state, whole_shape
from .unit import WholeUnit

__all__ = ["StateTable"]

Tensor = Any
Optimizer = Any

MASTER_SUFFIX = "_fp32_master_0"


class StateTable:
    """The states of one sharded optimizer."""

    def __init__(
        self,
        inner: Optimizer,
        engine: Engine,
        units: Mapping[ShardedParam, Any],
        owners: Mapping[ShardedParam, int],
        whole: bool,
    ) -> None:
        """Look after the states that ``inner`` keeps for ``units``."""
        self._inner = inner
        self._engine = engine
        self._units = units
        self._owners = owners
        self._whole_units = whole
        self._specs: dict[Any, dict[str, StateSpec]] = {}
        self.stepped: dict[ShardedParam, None] = {}  # those that have states; the same on every rank

    def specs(self, param: ShardedParam) -> dict[str, StateSpec]:
        """The kinds of state that ``param`` has or would get."""
        unit = self._units.get(param)
        dtype = unit.tensor.dtype if unit is not None else self._unit_dtype(param)
        if dtype not in self._specs:
            self._specs[dtype] = probe_states(self._inner, param.tensor, dtype)
        return self._specs[dtype]

    def _unit_dtype(self, param: ShardedParam) -> Any:
        same = (unit.tensor.dtype for other, unit in self._units.items() if other.group.dtype == param.group.dtype)
        return next(same, param.group.dtype)

    def is_master(self, param: ShardedParam) -> bool:
        """Whether ``param`` is stepped as a float32 copy; the same on every rank."""
        return bool(self._unit_dtype(param) != param.group.dtype)

    # --------------------------------------------------------------------------------------------------- taking over

    def adopt(self) -> None:
        """Cut the states that the optimizer already has; the whole tensors are given up one by one."""
        inner = self._inner
        masters = dict(getattr(inner, "_master_weights", None) or {})
        pending = dict(inner._accumulators_holder)
        inner._accumulators_holder = {}
        names = {param.tensor.name: param for param in self._all_params()}
        names.update({master.name: names[name] for name, master in masters.items() if name in names})
        for by_name in inner._accumulators.values():
            for name in list(by_name):
                if name in names:
                    self._adopt_state(by_name, name, names[name])
        for name, master in masters.items():
            if name in names:
                self._set_master(names[name], master)
        if hasattr(inner, "_master_weights"):
            inner._master_weights = {}
        if pending:
            self.load(pending)

    def _all_params(self) -> Iterator[ShardedParam]:
        return (param for param in self._engine.params if param.optimized)

    def _adopt_state(self, by_name: dict[str, Tensor], name: str, param: ShardedParam) -> None:
        whole = by_name.pop(name)
        self.stepped[param] = None
        unit = self._units.get(param)
        if unit is None:
            return
        shape, param_shape = tuple(whole.shape), tuple(param.tensor.shape)
        scalar = shape[len(shape) - len(param_shape) :] != param_shape and whole.size == 1
        if scalar or self._whole_units:
            by_name[unit.tensor.name] = whole
            return
        lead = shape[: len(shape) - len(param_shape)]
        piece = slice_state(StateSpec("", False, lead, whole.dtype), whole, param.numel, unit.start, unit.stop)
        piece.name = whole.name
        by_name[unit.tensor.name] = piece

    def _set_master(self, param: ShardedParam, master: Tensor) -> None:
        unit = self._units.get(param)
        if unit is not None and unit.is_master:
            value = flat_view(master, unit.start, unit.stop)
            if self._whole_units:
                value = value.reshape(param.tensor.shape).clone()
                value._share_buffer_to(unit.tensor)
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
        scheduler = self._inner._learning_rate
        if keep and isinstance(scheduler, paddle.optimizer.lr.LRScheduler):
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
        if name == "master_weight":
            self._engine.write_param(param, value)
            self.refresh_rewritten()
            self._set_master(param, value)
        else:
            self._store(param, self.specs(param)[name], value)

    def state_of(self, param: ShardedParam, name: str) -> Optional[Tensor]:
        """This rank's own part of state ``name`` of ``param``, or None."""
        unit = self._units.get(param)
        return None if unit is None else self._inner._accumulators.get(name, {}).get(unit.tensor.name)

    def _whole_state(
        self, group: ParamGroup, params: list[ShardedParam], spec: StateSpec, keep: bool
    ) -> Iterator[tuple[ShardedParam, Tensor]]:
        label = f"state {spec.name} of {group.name}"
        if self._whole_units:
            for param in params:
                yield param, self._from_owner(param, self.state_of(param, spec.name), spec, label)
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
                yield param, paddle.concat(parts[param]).reshape(whole_shape(spec, param.tensor.shape))

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
        return [
            (param, flat_view(full, slots[param.index].start, slots[param.index].stop).clone()) for param in pieces
        ]

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
        if self._engine.comm.rank == owner and own is not None:
            value = own.clone()
        else:
            value = paddle.zeros(whole_shape(spec, param.tensor.shape)).astype(spec.dtype)
        self._engine.comm.broadcast(value, owner, f"{label}: {param.name}").wait()
        return value

    def give_back(self) -> None:
        """Leave the inner optimizer with whole states over the user's own parameters.  Collective."""
        state = self.whole(keep=True)
        masters = state.pop("master_weights", {})
        inner = self._inner
        for unit in self._units.values():
            for by_name in inner._accumulators.values():
                by_name.pop(unit.tensor.name, None)
        for param in self.stepped:
            suffix = MASTER_SUFFIX if self.is_master(param) else ""
            for spec in self.specs(param).values():
                value = state[f"{param.tensor.name}{suffix}_{spec.name}_0"]
                inner._accumulators[spec.name][f"{param.tensor.name}{suffix}"] = value
        if masters:
            inner._master_weights = masters

    # ------------------------------------------------------------------------------------------------------ loading

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Take a whole state; every rank gives the same.  Nothing is changed where something does not fit."""
        self.prepare(state_dict)()

    def prepare(self, state_dict: Mapping[str, Any], source: str = "the optimizer state") -> Callable[[], None]:
        """Check a whole state, called ``source`` in messages; what is returned takes it and does not fail.

        Raises :class:`CheckpointError` for an entry of another shape, for a parameter that has only some of its states,
        and where nothing belongs to this optimizer.  Entries of parameters that it does not have are left alone.
        """
        states = dict(state_dict)
        scheduler_state = states.pop("LR_Scheduler", None)
        masters = states.pop("master_weights", None) or {}
        self._check_masters(masters, source)
        found = self._match(states, source)

        def commit() -> None:
            self.refresh_rewritten()  # before the masters are set, which the weights would overwrite otherwise
            for param, spec, value in found:
                self._store(param, spec, _as_tensor(value))
            for param in self._all_params():
                if param.tensor.name in masters:
                    self._set_master(param, _as_tensor(masters[param.tensor.name]))
            scheduler = self._inner._learning_rate
            if scheduler_state and isinstance(scheduler, paddle.optimizer.lr.LRScheduler):
                scheduler.set_state_dict(scheduler_state)

        return commit

    def _check_masters(self, masters: Mapping[str, Any], source: str) -> None:
        for param in self._all_params():
            value = masters.get(param.tensor.name)
            if value is not None and list(value.shape) != list(param.tensor.shape):
                raise CheckpointError(
                    f"{source}: master weight of {param}: expected shape {list(param.tensor.shape)}, got {list(value.shape)}"
                )

    def _match(self, states: Mapping[str, Any], source: str) -> list[tuple[ShardedParam, StateSpec, Any]]:
        by_stem = {}
        for key, value in states.items():
            stem, _, number = key.rpartition("_")
            by_stem[stem if number.isdigit() else key] = value
        found: list[tuple[ShardedParam, StateSpec, Any]] = []
        for param in self._all_params():
            specs = self.specs(param)
            here = []
            for spec in specs.values():
                stems = (f"{param.tensor.name}{suffix}_{spec.name}" for suffix in ("", MASTER_SUFFIX))
                value = next((by_stem[stem] for stem in stems if stem in by_stem), None)
                if value is not None:
                    here.append((param, spec, value))
                    self._check_shape(param, spec, value, source)
            if here and len(here) != len(specs):
                missing = sorted(set(specs) - {spec.name for _, spec, _ in here})
                raise CheckpointError(f"{source}: of {param} only some states are there; missing: {', '.join(missing)}")
            found.extend(here)
        if by_stem and not found and any(True for param in self._all_params() if self.specs(param)):
            example = next(iter(by_stem))
            raise CheckpointError(
                f"{source}: no entry belongs to a parameter of this optimizer; there is {example!r}, "
                f"expected names such as {next(self._all_params()).tensor.name!r}"
            )
        return found

    def _check_shape(self, param: ShardedParam, spec: StateSpec, value: Any, source: str) -> None:
        expected = whole_shape(spec, param.tensor.shape)
        size = 1
        for dim in value.shape:
            size *= dim
        if list(value.shape) != expected and not (spec.scalar and size == 1):
            raise CheckpointError(
                f"{source}: state {spec.name} of {param}: expected shape {expected}, got {list(value.shape)}"
            )

    def _store(self, param: ShardedParam, spec: StateSpec, whole: Tensor) -> None:
        self.stepped[param] = None
        unit = self._units.get(param)
        if unit is None:
            return
        by_name = self._inner._accumulators[spec.name]
        if unit.tensor.name not in by_name:
            if not unit.tensor._is_initialized():
                unit.load(param.group.full)
            create_accumulators(self._inner, [unit.tensor])
        state = slice_state(spec, whole, param.numel, unit.start, unit.stop)
        copy_into(flat_view(by_name[unit.tensor.name]), flat_view(state))


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)

"""Small neighbouring pieces are stepped as one: a thousand biases cost one kernel instead of a thousand.

Neighbours lie next to each other in the shard, and so do their gradients (:meth:`.group.ParamGroup.packed_grad`).  A
:class:`Batch` is a parameter over the whole stretch with states of its own; the states of its pieces are views of them,
under the pieces' own names in the optimizer's table, so whoever reads or saves states sees pieces as ever.  Whoever
changes them dissolves the batches before; the next step makes them again.

Pieces share a batch only if every number that the optimizer uses is equal for them: rates, decays, clipping factors,
and the running products that count their steps.  Which do is decided anew at each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import paddle

from ..paddle_compat import accumulators, bind_view, flat_view, functions_of_params, new_param
from .group import ParamGroup
from .layout import ALIGN, Run
from .ops import copy_into
from .param import ShardedParam
from .rules import rounds_alike_everywhere
from .state import StateSpec
from .unit import PieceUnit

__all__ = ["Fusion", "Step"]

Tensor = Any
Optimizer = Any


class Step(NamedTuple):
    """What one step does with one piece."""

    unit: PieceUnit
    factor: float  # that clipping multiplies its gradient by


class Batch:
    """Neighbouring pieces as one parameter."""

    def __init__(self, run: Run, units: Sequence[PieceUnit], number: int) -> None:
        """``units`` of ``run`` in the order of the shard; ``number``: of all batches made, as optimizers keep names."""
        self.run = run
        self.units = list(units)
        first, last = units[0], units[-1]
        self.group: ParamGroup = first.param.group
        self.start, self.stop = first.shard_start, last.shard_start + last.numel
        self.tensor = new_param(first.param.tensor, [self.stop - self.start], self.group.dtype)
        self.tensor.name = f"{first.tensor.name}_and_neighbours_{number}"
        bind_view(self.tensor, self.group.shard, self.start, self.stop)

    def grad(self) -> Tensor:
        """The reduced gradients of the pieces, 1-D, with zeros between them."""
        return self.group.gradients.packed(self.run, self.start, self.stop)

    def part_of(self, state: Tensor, unit: PieceUnit) -> Tensor:
        """The part of a state of this batch that belongs to ``unit``."""
        start = unit.shard_start - self.start
        return flat_view(state, start, start + unit.numel)


class Fusion:
    """The batches of one sharded optimizer."""

    def __init__(self, optimizer: Optimizer, specs: Callable[[ShardedParam], Mapping[str, StateSpec]]) -> None:
        """``specs``: the kinds of state of a parameter."""
        self._optimizer = optimizer
        self._specs = specs
        self._functions: list[Callable[[Tensor], Any]] = []
        self._cut_anywhere = rounds_alike_everywhere(optimizer)
        self._joinable: dict[ParamGroup, bool] = {}
        self._made = 0
        self._batches: dict[tuple[ParamGroup, Run], list[Batch]] = {}
        self._history: dict[PieceUnit, tuple[Any, int]] = {}  # scalar states at some time, and the steps since

    def batched(self, steps: Iterable[Step], options: Mapping[str, Any]) -> tuple[list[Batch], list[Step]]:
        """Split one parameter group's share of a step into batches and what is stepped alone.

        ``options``: of the parameter group.
        """
        self._functions = functions_of_params(self._optimizer, options)
        steps = list(steps)
        times = Counter(step.unit for step in steps)
        runs: dict[tuple[ParamGroup, Run], list[Step]] = {}
        alone: list[Step] = []
        for step in steps:
            group, run = step.unit.param.group, step.unit.run
            if run is None or times[step.unit] > 1 or not self._can_join(step.unit):
                alone.append(step)
            else:
                runs.setdefault((group, run), []).append(step)
        batches: list[Batch] = []
        for key, members in runs.items():
            found, rest = self._batches_of(key, members)
            batches += found
            alone += rest
        return batches, alone

    def _can_join(self, unit: PieceUnit) -> bool:
        """Whether the states of a stretch are those of its pieces one after the other; some have rows of them."""
        group = unit.param.group
        if group not in self._joinable:
            self._joinable[group] = not any(spec.lead for spec in self._specs(unit.param).values())
        return self._joinable[group]

    def _batches_of(self, key: tuple[ParamGroup, Run], steps: list[Step]) -> tuple[list[Batch], list[Step]]:
        stretches = list(self._stretches(steps))
        wanted = [[step.unit for step in stretch] for stretch in stretches if len(stretch) > 1]
        alone = [stretch[0] for stretch in stretches if len(stretch) == 1]
        batches = self._batches.get(key, [])
        if [batch.units for batch in batches] != wanted:
            self._dissolve(key)
            batches = self._batches[key] = [self._make(key[1], units) for units in wanted]
        for step in steps:
            origin, count = self._history[step.unit]
            self._history[step.unit] = origin, count + 1
        return batches, alone

    def _stretches(self, steps: list[Step]) -> Iterator[list[Step]]:
        """Neighbours that are stepped alike."""
        stretch: list[Step] = []
        numbers: Any = None
        for step in sorted(steps, key=lambda step: step.unit.shard_start):
            unit = step.unit
            own = self._numbers(step)
            joins = own is not None and own == numbers and self._follows(stretch[-1].unit, unit)
            if stretch and not joins:
                yield stretch
                stretch = []
            stretch.append(step)
            numbers = own
        if stretch:
            yield stretch

    def _follows(self, before: PieceUnit, unit: PieceUnit) -> bool:
        gap = unit.shard_start - (before.shard_start + before.numel)
        return gap == 0 or (gap < ALIGN and self._cut_anywhere)

    def _numbers(self, step: Step) -> Optional[tuple[Any, ...]]:
        """All that makes the step of one piece differ from that of another; None if it cannot share a batch."""
        unit, factor = step
        if unit not in self._history:
            self._history[unit] = self._scalars(unit), 0
        if not unit.param.group.gradients.has(unit.param.index):
            return None
        tensor = unit.param.tensor
        options = (tensor.optimize_attr.get("learning_rate"), tensor.regularizer, getattr(tensor, "need_clip", True))
        return factor, self._history[unit], options, [function(tensor) for function in self._functions]

    def _scalars(self, unit: PieceUnit) -> Any:
        table = accumulators(self._optimizer)
        states = [table.get(spec.name, {}).get(unit.tensor.name) for spec in self._scalar_specs(unit)]
        return [None if state is None else state.numpy().tolist() for state in states]

    def _scalar_specs(self, unit: PieceUnit) -> list[StateSpec]:
        return [spec for spec in self._specs(unit.param).values() if spec.scalar]

    def _make(self, run: Run, units: list[PieceUnit]) -> Batch:
        """A batch whose states are what its pieces have so far, if anything."""
        self._made += 1
        batch = Batch(run, units, self._made)
        table = accumulators(self._optimizer)
        for spec in self._specs(units[0].param).values():
            by_name = table.get(spec.name, {})
            states = [by_name.get(unit.tensor.name) for unit in units]
            if states[0] is None:
                continue  # the batch gets fresh ones at its first step
            if spec.scalar:
                whole = states[0].clone()
            else:
                whole = paddle.zeros([batch.stop - batch.start], dtype=states[0].dtype)
                for unit, state in zip(units, states):
                    copy_into(batch.part_of(whole, unit), flat_view(state))
            by_name[batch.tensor.name] = whole
        self._share(batch)
        return batch

    def _share(self, batch: Batch) -> None:
        """Let the pieces' states be views of the batch's."""
        table = accumulators(self._optimizer)
        for spec in self._specs(batch.units[0].param).values():
            whole = table.get(spec.name, {}).get(batch.tensor.name)
            if whole is not None:
                for unit in batch.units:
                    table[spec.name][unit.tensor.name] = whole if spec.scalar else batch.part_of(whole, unit)

    def finish(self, batches: Iterable[Batch]) -> None:
        """After a step: what it has created belongs to the pieces."""
        table = accumulators(self._optimizer)
        for batch in batches:
            name = batch.units[-1].tensor.name
            if any(name not in table[spec.name] for spec in self._specs(batch.units[0].param).values()):
                self._share(batch)

    def _dissolve(self, key: tuple[ParamGroup, Run]) -> None:
        table = accumulators(self._optimizer)
        for batch in self._batches.pop(key, []):
            for spec in self._specs(batch.units[0].param).values():
                table.get(spec.name, {}).pop(batch.tensor.name, None)
                if spec.scalar:  # the vectors may stay views of what the batch had
                    by_name = table.get(spec.name, {})
                    for unit in batch.units:
                        if unit.tensor.name in by_name:
                            by_name[unit.tensor.name] = by_name[unit.tensor.name].clone()

    def dissolve(self) -> None:
        """Make every piece's states its own again: somebody is about to change them."""
        for key in list(self._batches):
            self._dissolve(key)
        self._history.clear()

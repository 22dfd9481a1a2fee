"""``plan()``: what each level would hold and send, before anything is wrapped; and how right that was, afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional, Union

import paddle
from paddle import nn

from .checks import engine_config
from .errors import UsageError
from .plan_check import PlanCheck, PlanRow, measured_step
from .plan_facts import ModelFacts
from .sharding.forecast import Forecast, data_parallel, sharded
from .sharding.level import Level
from .tables import aligned, bytes_text, count_text

__all__ = ["Plan", "PlanRow", "plan"]

Tensor = Any

_NONE = "none"
_COLUMNS = ("parameters", "gradients", "states", "sum", "formula", "buffers", "activations", "peak")


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` found; ``print()`` shows it as a table."""

    rows: tuple[PlanRow, ...]
    """A row for each number of ranks and each level."""
    parameters: int
    """Elements of the model's parameters."""
    optimizer: str
    """Class name of the optimizer, or ``"no optimizer"``."""
    dp_size: int
    """Ranks that hold each shard."""

    def row(self, level: str, world_size: int) -> PlanRow:
        """The row of one level; :class:`UsageError` if it was not asked for."""
        for row in self.rows:
            if (row.level, row.world_size) == (level, world_size):
                return row
        known = ", ".join(f"{row.level!r} on {row.world_size}" for row in self.rows)
        raise UsageError(f"the plan has no row for level {level!r} on {world_size} ranks, only for {known}")

    @contextmanager
    def check(self, model: Any, optimizer: Any) -> Iterator[PlanCheck]:
        """Measure one step of a wrapped model beside the prediction of its level.  Each rank measures by itself.

        The context holds one whole step, from the forward pass to ``optimizer.step()``; what it yields is filled in at
        its end::

            with plan.check(model, optimizer) as check:
                loss_of(model(batch)).backward()
                optimizer.step()
            print(check)
        """
        with measured_step(model, optimizer, self.row, self.dp_size) as check:
            yield check

    def __str__(self) -> str:
        """A table for each number of ranks."""
        texts = []
        for world_size in dict.fromkeys(row.world_size for row in self.rows):
            replicas = f", {self.dp_size} replicas" if self.dp_size > 1 else ""
            title = (
                f"{count_text(self.parameters)} parameters, {self.optimizer}, {world_size} rank{'s' * (world_size > 1)}"
                f"{replicas}: bytes of a rank, and elements that it sends in a step"
            )
            lines = [
                [
                    "DataParallel" if row.level == _NONE else row.level,
                    *(bytes_text(getattr(row, column)) for column in _COLUMNS),
                    count_text(row.sent),
                    str(row.collectives),
                ]
                for row in self.rows
                if row.world_size == world_size
            ]
            texts.append(f"{title}\n{aligned([['level', *_COLUMNS, 'sent', 'collectives'], *lines])}")
        return "\n\n".join(texts)


def plan(
    model: nn.Layer,
    optimizer: Any = None,
    level: Optional[str] = None,
    world_size: Union[None, int, Sequence[int]] = None,
    *,
    buffer_max_size: int = 2**23,
    segment_size: int = 0,
    exclude_layer: Optional[Sequence[Any]] = None,
    dp_size: int = 1,
    activations: Optional[int] = None,
    sample: Optional[Callable[[], Tensor]] = None,
) -> Plan:
    """Predict memory and communication of a training step at each level, on any number of ranks.

    No communication, and nothing is changed: call it before wrapping, in one process.  The model may have been made
    under ``paddle.LazyGuard``, and then takes no memory.

    Args:
        model: as for ``group_sharded_parallel``; not wrapped yet.
        optimizer: over parameters of ``model``; None: states count as nothing.  States that a rule of your own makes in
            its first step, not before, cannot be known.
        level: ``"os"``, ``"os_g"``, ``"p_g_os"``, or ``"none"`` for ``paddle.DataParallel``; None for all four.
        world_size: ranks that share the model, one number or several; None: those of this launch.
        buffer_max_size: as will be given to ``group_sharded_parallel``, like ``segment_size`` and ``exclude_layer``.
        segment_size: see there.
        exclude_layer: see there.
        dp_size: ranks of ``dp_group``.
        activations: bytes that a forward pass keeps for backward, where they are known.
        sample: runs the forward pass of ``model`` on one rank's batch and returns the loss.  It is called once, and
            its backward pass is run: activations, the order of gathers and weights that are used twice are then
            measured.  Without it, layers are taken to run once, in registration order.

    Returns:
        A :class:`Plan`.

    Raises:
        UsageError: for what ``group_sharded_parallel`` would refuse, and for numbers of ranks below 1.

    Example:
        >>> import paddle
        >>> from paddle_group_sharded import plan
        >>> model = paddle.nn.Sequential(*(paddle.nn.Linear(512, 512) for _ in range(4)))
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> found = plan(model, optimizer, world_size=[8, 64])
        >>> found.row("p_g_os", 8).sum  # bytes of parameters, gradients and states
        2101312
    """
    if activations is not None and sample is not None:
        raise UsageError("expected activations or sample, got both; sample measures them")
    if activations is not None and (not isinstance(activations, int) or activations < 0):
        raise UsageError(f"activations must be a number of bytes, at least 0, got {activations!r}")
    sizes = [_ranks("world_size", size) for size in _as_list(world_size)]
    _ranks("dp_size", dp_size)
    levels = [_NONE, *(known.value for known in Level)] if level is None else [level]
    arguments = {
        "offload": False,
        "sync_buffers": False,
        "sync_comm": False,
        "buffer_max_size": buffer_max_size,
        "segment_size": segment_size,
        "exclude_layer": exclude_layer,
    }
    facts = ModelFacts(model, optimizer)
    config = engine_config(Level.P_G_OS, arguments)
    facts.find_moments(config, activations or 0, sample)
    rows = []
    for ranks in sizes:
        for name in levels:
            if name == _NONE:
                found = data_parallel(facts.params(False), facts.step(False), ranks * dp_size)
            else:
                found = _forecast(facts, Level.parse(name), arguments, ranks, dp_size)
            rows.append(_row(name, ranks, found))
    return Plan(tuple(rows), facts.numel, facts.optimizer_name, dp_size)


def _forecast(facts: ModelFacts, level: Level, arguments: dict[str, Any], ranks: int, dp_size: int) -> Forecast:
    groups = facts.groups(engine_config(level, arguments), ranks)
    return sharded(facts.params(True), groups, level.placements, facts.step(True), ranks, facts.limits, dp_size)


def _row(level: str, world_size: int, found: Forecast) -> PlanRow:
    return PlanRow(level, world_size, **found._asdict())


def _as_list(world_size: Union[None, int, Sequence[int]]) -> list[Any]:
    if world_size is None:
        return [paddle.distributed.get_world_size()]
    return list(world_size) if isinstance(world_size, (list, tuple, range)) else [world_size]


def _ranks(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be a number of ranks, at least 1, got {value!r}")
    return value

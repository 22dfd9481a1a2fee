"""What is predicted of a step, and one real step measured beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .comm.recording import Record, RecordingComm
from .errors import UsageError
from .paddle_compat import accumulators, element_size, has_memory
from .sharding.allocator import PeakMeter
from .sharding.forecast import RankForecast
from .sharding.model import ShardedModel
from .sharding.optimizer import ShardedOptimizer
from .tables import aligned, bytes_text, count_text

__all__ = ["CheckRow", "PlanCheck", "PlanRow", "measured_step"]

Tensor = Any


class PlanRow(NamedTuple):
    """One level on one number of ranks.  All is of one rank, the one that has most; bytes unless said otherwise."""

    level: str  # "none" is paddle.DataParallel
    world_size: int  # ranks that share the model
    parameters: int  # kept between steps
    gradients: int  # kept from backward to the step
    states: int  # of the optimizer, with float32 masters and copies that it steps
    formula: float  # of the three above by the ZeRO paper: without padding, and nothing kept whole
    buffers: int  # the most, beside the above, of gathered parameters and of whole and packed gradients at one moment
    activations: int  # the most that a forward pass keeps for backward
    peak: int  # at any moment of a step; less than the sum where the maxima above are at different moments
    sent: float  # elements in a step, counted as native ring collectives move them
    collectives: int  # in a step
    by_rank: tuple[RankForecast, ...]  # states and peak of each rank of the group, which differ a little

    @property
    def sum(self) -> int:
        """Bytes of parameters, gradients and states: what :attr:`formula` predicts."""
        return self.parameters + self.gradients + self.states


class CheckRow(NamedTuple):
    """One quantity."""

    name: str  # "parameters", "states", "peak" in bytes; "sent" in elements; "collectives"
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Measured over predicted; 1 where both are nothing."""
        return self.measured / self.predicted if self.predicted else float(not self.measured) or float("inf")


class PlanCheck:
    """What :meth:`.plan.Plan.check` measured on this rank; ``print()`` shows it as a table."""

    def __init__(self, title: str) -> None:
        """Without rows until the step is over."""
        self.title = title
        self.rows: tuple[CheckRow, ...] = ()

    def __str__(self) -> str:
        """Measured, predicted, and their ratio."""
        if not self.rows:
            return f"{self.title}: nothing measured yet; the context has not ended"
        shown: dict[str, Callable[[float], str]] = {"sent": count_text, "collectives": "{:.0f}".format}
        lines = []
        for row in self.rows:
            text = shown.get(row.name, bytes_text)
            lines.append([row.name, text(row.measured), text(row.predicted), f"{row.ratio:.3f}"])
        return f"{self.title}\n{aligned([['', 'measured', 'predicted', 'ratio'], *lines])}"


@contextmanager
def measured_step(
    model: Any, optimizer: Any, row_of: Callable[[str, int], PlanRow], dp_size: int
) -> Iterator[PlanCheck]:
    """See :meth:`.plan.Plan.check`; ``row_of`` gives the prediction for a level and a number of ranks."""
    if not isinstance(model, ShardedModel) or not isinstance(optimizer, ShardedOptimizer):
        raise UsageError(
            "check() takes the model and the optimizer that group_sharded_parallel returned, got "
            f"{type(model).__name__} and {type(optimizer).__name__}"
        )
    engine = model._engine
    if engine.dp_comm.world_size != dp_size:
        replicas = engine.dp_comm.world_size
        raise UsageError(f"expected a model with the dp_size={dp_size} of the plan, got {replicas} replicas")
    level = engine.config.level.value
    row = row_of(level, engine.comm.world_size)
    check = PlanCheck(f"{level} on {row.world_size} ranks, rank {engine.comm.ranks[engine.comm.rank]}")
    comms: list[Any] = [comm for comm in (engine.comm, engine.dp_comm) if comm is engine.comm or dp_size > 1]
    before = [comm.on_run for comm in comms]
    recorders = [RecordingComm(comm) for comm in comms]
    own = _own_bytes(model, optimizer)
    meter = PeakMeter()
    try:
        yield check
    finally:
        for comm, observer in zip(comms, before):
            comm.on_run = observer
    log = [record for recorder in recorders for record in recorder.log if _counts(record)]
    predicted = row.by_rank[engine.comm.rank]
    peak = [] if meter.peak is None else [CheckRow("peak", own + meter.peak, predicted.peak)]
    check.rows = (
        CheckRow("parameters", engine.memory_report()["kept"], row.parameters),
        CheckRow("states", _bytes_of(_states(optimizer)), predicted.states),
        *peak,
        CheckRow("sent", sum(record.elements_sent for record in log), row.sent),
        CheckRow("collectives", len(log), row.collectives),
    )


def _counts(record: Record) -> bool:
    return record.op not in ("exchange", "barrier")  # they carry a few Python values


def _own_bytes(model: ShardedModel, optimizer: ShardedOptimizer) -> int:
    """What lives of the model and its optimizer, whatever else the process holds."""
    engine = model._engine
    grads = (tensor for group in engine.groups for tensor in group.gradients.storage)
    buffers = (buffer for _, buffer in engine.layer.named_buffers() if has_memory(buffer))
    kept: int = engine.memory_report()["kept"]
    return kept + _bytes_of([*_states(optimizer), *grads, *buffers])


def _states(optimizer: ShardedOptimizer) -> Iterator[Tensor]:
    """The states, and what is stepped in memory of its own."""
    for by_name in accumulators(optimizer._optim).values():
        yield from by_name.values()
    for unit in optimizer._units.values():
        if getattr(unit, "is_copy", True) and has_memory(unit.tensor):
            yield unit.tensor


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of the memory that they lie in; some are views of others."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + int(tensor.size) * element_size(tensor.dtype))
        for tensor in tensors
        if tensor.size and has_memory(tensor)
    )
    total = end = 0
    for start, stop in spans:
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total

"""A log of every operation that ran, in the order in which it ran: what tests and reports count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, Protocol

from .base import Comm, Segment, Server, Work
from .verdict import Request

__all__ = ["Record", "RecordingComm"]

Tensor = Any


class Record(NamedTuple):
    """One operation; all but ``asked`` is equal on every rank."""

    op: str
    label: str
    numel: int  # elements of the full tensor
    dtype: str
    elements_sent: float  # per rank, see elements_sent()
    asked: bool  # False where this rank only took part because others asked


def elements_sent(op: str, numel: int, world_size: int) -> float:
    """Elements that a rank sends in a ring collective over ``numel`` elements, as native backends run it.

    One pass around the ring moves ``(world_size - 1) / world_size`` of the full tensor out of every rank: so do
    ``all_gather``, ``reduce_scatter`` and, averaged over the ranks, ``broadcast``.  ``all_reduce`` is two passes.
    ``exchange`` and ``barrier`` count as nothing.
    """
    passes = {"all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_reduce": 2}.get(op, 0)
    return passes * numel * (world_size - 1) / world_size


class ObservedComm(Comm, Protocol):
    """A communicator that tells what it runs: all of this package do."""

    on_run: Optional[Callable[[Request, bool], None]]


class RecordingComm:
    """A :class:`~.base.Comm` that passes everything on to another and logs what it runs, also for other ranks."""

    def __init__(self, inner: ObservedComm) -> None:
        """``inner``: recorded from here on, by one recorder at a time."""
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.ranks = inner.ranks
        self.log: list[Record] = []  # an operation is here at the latest when its Work has been waited for
        self._inner = inner
        inner.on_run = self._record

    def clear(self) -> None:
        """Forget the log."""
        self.log.clear()

    def _record(self, request: Request, stand_in: bool) -> None:
        op, label, numel, dtype, _ = request
        self.log.append(Record(op, label, numel, dtype, elements_sent(op, numel, self.world_size), not stand_in))

    def all_gather(self, full: Tensor, shard: Tensor, label: str) -> Work:
        """See :class:`~.base.Comm`, as for all that follow."""
        return self._inner.all_gather(full, shard, label)

    def reduce_scatter(self, segments: Sequence[Segment], numel: int, label: str) -> Work:
        """Passed on."""
        return self._inner.reduce_scatter(segments, numel, label)

    def all_reduce(self, tensor: Tensor, label: str, op: str = "sum") -> Work:
        """Passed on."""
        return self._inner.all_reduce(tensor, label, op)

    def broadcast(self, tensor: Tensor, src: int, label: str) -> Work:
        """Passed on."""
        return self._inner.broadcast(tensor, src, label)

    def exchange(self, value: Any, label: str) -> list[Any]:
        """Passed on."""
        return self._inner.exchange(value, label)

    def barrier(self, label: str) -> None:
        """Passed on."""
        self._inner.barrier(label)

    def serve(self, label: str, server: Optional[Server]) -> None:
        """Passed on."""
        self._inner.serve(label, server)

    def close(self) -> None:
        """Passed on; the log stays."""
        self._inner.close()

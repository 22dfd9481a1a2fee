"""One rank alone: the same contract without a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional

import paddle

from ..paddle_compat import flat_view
from .base import Overlap, Segment, Server, Work
from .dtypes import numel_of
from .operations import AllGather, AllReduce, Barrier, Broadcast, Exchange, Operation, ReduceScatter
from .verdict import Request

__all__ = ["LocalComm"]

Tensor = Any


class _Done:
    """The :class:`~.base.Work` of an operation that has run."""

    def __init__(self, result: Any = None) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result


class LocalComm:
    """A :class:`~.base.Comm` of one rank: what it would send stays where it is."""

    rank = 0
    world_size = 1

    def __init__(self, ranks: tuple[int, ...] = (0,)) -> None:
        """``ranks``: the one global rank."""
        self.ranks = ranks
        self.on_run: Optional[Callable[[Request, bool], None]] = None
        """Called with each operation, as :attr:`.gloo.GlooComm.on_run` is."""

    def all_gather(self, full: Tensor, shard: Tensor, label: str) -> Work:
        """See :class:`~.base.Comm`."""
        self._ran(AllGather(full, shard, label, 1))
        if numel_of(full) and full.data_ptr() != shard.data_ptr():
            full.detach().copy_(shard, True)
        return _Done()

    def reduce_scatter(self, segments: Sequence[Segment], numel: int, label: str) -> Work:
        """See :class:`~.base.Comm`.  The overlaps are the whole segments."""
        request = self._ran(ReduceScatter(segments, numel, label, 0, 1))
        return _Done(
            [
                Overlap(index, 0, _flat(segment, request.dtype or "float32"))
                for index, (segment, size) in enumerate(zip(segments, request.detail))
                if size
            ]
        )

    def all_reduce(self, tensor: Tensor, label: str, op: str = "sum") -> Work:
        """See :class:`~.base.Comm`."""
        self._ran(AllReduce(tensor, label, op, 1))
        return _Done()

    def broadcast(self, tensor: Tensor, src: int, label: str) -> Work:
        """See :class:`~.base.Comm`."""
        self._ran(Broadcast(tensor, src, label, 0, 1))
        return _Done()

    def exchange(self, value: Any, label: str) -> list[Any]:
        """See :class:`~.base.Comm`.  The value is a copy, as if it had travelled."""
        operation = Exchange(value, label)
        self._ran(operation)
        return operation.combine([operation.offer()], "")

    def barrier(self, label: str) -> None:
        """See :class:`~.base.Comm`."""
        self._ran(Barrier(label))

    def serve(self, label: str, server: Optional[Server]) -> None:
        """Nobody else can ask."""

    def close(self) -> None:
        """Nothing is open."""

    def _ran(self, operation: Operation) -> Request:
        if self.on_run is not None:
            self.on_run(operation.request, False)
        return operation.request


def _flat(segment: Segment, dtype: str) -> Tensor:
    return paddle.zeros([segment], dtype=dtype) if isinstance(segment, int) else flat_view(segment)

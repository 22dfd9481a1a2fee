"""Accelerators: Paddle's collectives on its communication stream, over the user's group.

They run in the order of the calls and overlap with computing without a thread.  Nothing checks that the ranks agree:
every rank must ask for everything in the same order, gathers included, and a rank that is missing is the backend's to
notice (``FLAGS_nccl_blocking_wait`` and the launch's own time limits).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional

import paddle

from ..paddle_compat import flat_view
from .base import Overlap, Segment, Server, Work
from .operations import AllGather, AllReduce, Barrier, Broadcast, Exchange, Operation, ReduceScatter
from .verdict import Request

__all__ = ["NativeComm"]

Tensor = Any


class _Task:
    """A :class:`~.base.Work` that makes the computing stream wait for the communication stream."""

    def __init__(self, task: Any, result: Callable[[], Any], tensors: Sequence[Tensor]) -> None:
        self._task = task
        self._result = result
        self._tensors: Optional[Sequence[Tensor]] = tensors  # the communication stream reads and writes them

    def wait(self) -> Any:
        if self._tensors is not None:
            self._task.wait()
            self._tensors = None
        return self._result()


class NativeComm:
    """A :class:`~.base.Comm` over a ``paddle.distributed`` group whose backend is not gloo."""

    def __init__(self, group: Any, rank: int, ranks: Sequence[int]) -> None:
        """``group``: None for the default group; ``rank``: in the group; ``ranks``: global."""
        self.rank = rank
        self.world_size = len(ranks)
        self.ranks = tuple(ranks)
        self.on_run: Optional[Callable[[Request, bool], None]] = None
        """Called with each operation, as :attr:`.gloo.GlooComm.on_run` is."""
        self._group = group
        self._dtypes: dict[str, Any] = {}  # by label, of the last reduction that had tensors

    def all_gather(self, full: Tensor, shard: Tensor, label: str) -> Work:
        """See :class:`~.base.Comm`."""
        self._runs(AllGather(full, shard, label, self.world_size))
        return self._start(paddle.distributed.stream.all_gather, full, shard)

    def reduce_scatter(self, segments: Sequence[Segment], numel: int, label: str) -> Work:
        """See :class:`~.base.Comm`.  Where all segments are zeros, the dtype is that of the label's last reduction."""
        operation = ReduceScatter(segments, numel, label, self.rank, self.world_size)
        request = self._runs(operation)
        dtype = next((segment.dtype for segment in segments if not isinstance(segment, int)), None)
        if dtype is None:
            dtype = self._dtypes.get(label, paddle.get_default_dtype())
        self._dtypes[label] = dtype
        packed = _packed(segments, numel, dtype)
        own = paddle.empty([numel // self.world_size], dtype=dtype)
        start = paddle.distributed.stream.reduce_scatter
        return self._start(start, own, packed, result=lambda: _overlaps(own, request.detail, self.rank))

    def all_reduce(self, tensor: Tensor, label: str, op: str = "sum") -> Work:
        """See :class:`~.base.Comm`."""
        self._runs(AllReduce(tensor, label, op, self.world_size))
        reduce_op = paddle.distributed.ReduceOp.SUM if op == "sum" else paddle.distributed.ReduceOp.MAX
        return self._start(paddle.distributed.stream.all_reduce, tensor, op=reduce_op)

    def broadcast(self, tensor: Tensor, src: int, label: str) -> Work:
        """See :class:`~.base.Comm`."""
        self._runs(Broadcast(tensor, src, label, self.rank, self.world_size))
        return self._start(paddle.distributed.stream.broadcast, tensor, src=self.ranks[src])

    def exchange(self, value: Any, label: str) -> list[Any]:
        """See :class:`~.base.Comm`."""
        self._runs(Exchange(value, label))
        values: list[Any] = []
        paddle.distributed.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self, label: str) -> None:
        """See :class:`~.base.Comm`."""
        self._runs(Barrier(label))
        paddle.distributed.barrier(self._group)

    def serve(self, label: str, server: Optional[Server]) -> None:
        """Nothing: every rank has to ask for every gather."""

    def close(self) -> None:
        """Nothing: the group is the user's."""

    def _runs(self, operation: Operation) -> Request:
        if self.on_run is not None:
            self.on_run(operation.request, False)
        return operation.request

    def _start(
        self, collective: Callable[..., Any], *tensors: Tensor, result: Callable[[], Any] = lambda: None, **options: Any
    ) -> Work:
        task = collective(*tensors, group=self._group, sync_op=False, use_calc_stream=False, **options)
        return _Task(task, result, tensors)


def _packed(segments: Sequence[Segment], numel: int, dtype: Any) -> Tensor:
    """One flat tensor: the segment itself where it is everything, else a copy of all, zeros and padding included."""
    parts = [paddle.zeros([each], dtype=dtype) if isinstance(each, int) else flat_view(each) for each in segments]
    padding = numel - sum(int(part.size) for part in parts)
    if padding:
        parts.append(paddle.zeros([padding], dtype=dtype))
    parts = [part for part in parts if part.size]
    return parts[0] if len(parts) == 1 else paddle.concat(parts)


def _overlaps(own: Tensor, sizes: Sequence[int], rank: int) -> list[Overlap]:
    """What this rank's interval holds of each segment, as views of it."""
    share = int(own.size)
    overlaps = []
    begin = -rank * share  # of the segment, counted from the start of this rank's interval
    for segment, size in enumerate(sizes):
        first, last = max(begin, 0), min(begin + size, share)
        if first < last:
            overlaps.append(Overlap(segment, first - begin, flat_view(own, first, last)))
        begin += size
    return overlaps

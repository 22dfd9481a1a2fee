"""What the trainers do in ``test_local.py``, ``test_recording.py`` and ``test_native.py``."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_group_sharded.comm import LocalComm, RecordingComm, Server, create_comm
from paddle_group_sharded.comm.native import NativeComm
from paddle_group_sharded.errors import UsageError
from unittests.comm.dygraph_gloo import host, tensor
from unittests.comm.inputs import MOVED, values


def alone() -> dict[str, Any]:
    """The whole contract on one rank."""
    comm = create_comm()
    result: dict[str, Any] = {"type": type(comm).__name__, "place": (comm.rank, comm.world_size, comm.ranks)}
    result["gathered"] = []
    for dtype in MOVED:
        shard = tensor(values(0, 5, 0, dtype), dtype)
        full = paddle.zeros([5], dtype)
        comm.all_gather(full, shard, dtype).wait()
        comm.all_gather(full, full, "in place").wait()
        result["gathered"].append(bool((host(full) == host(shard)).all()))
    segments = [paddle.full([2, 3], 1.0), 4, paddle.zeros([0]), paddle.full([], 3.0)]
    overlaps = comm.reduce_scatter(segments, 20, "reduce").wait()
    result["overlaps"] = [(each.segment, each.start, each.value.numpy().tolist()) for each in overlaps]
    result["view"] = overlaps[0].value.data_ptr() == segments[0].data_ptr()
    result["zeros"] = [str(each.value.dtype) for each in comm.reduce_scatter([3], 3, "zeros").wait()]
    value = paddle.full([3], 7.0)
    comm.all_reduce(value, "sum").wait()
    comm.all_reduce(value, "max", "max").wait()
    comm.broadcast(value, 0, "broadcast").wait()
    result["value"] = value
    sent = {"a": [1]}
    received = comm.exchange(sent, "exchange")
    received[0]["a"].append(2)
    result["exchanged"] = (received, sent)
    comm.barrier("barrier")
    comm.serve("gather", Server(lambda: value, 3))
    comm.serve("gather", None)
    comm.close()
    comm.close()
    return result


def group_of_one() -> Any:
    """A group of one rank in a launch of two."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    comm = create_comm(groups[dist.get_rank()])
    return type(comm).__name__, comm.rank, comm.world_size, comm.ranks


def refused_alone() -> list[str]:
    """Arguments that several ranks would refuse are refused by one alone, so that tests on one rank find them."""
    comm = LocalComm()
    ones = paddle.ones([4])
    calls: list[Callable[[], Any]] = [
        lambda: comm.all_gather(paddle.zeros([5]), ones, "size"),
        lambda: comm.all_gather(paddle.zeros([4], "int32"), ones, "dtype"),
        lambda: comm.reduce_scatter([ones, ones.cast("int32")], 8, "dtypes"),
        lambda: comm.reduce_scatter([ones], 3, "numel"),
        lambda: comm.all_reduce(ones, "op", "mean"),
        lambda: comm.broadcast(ones, 1, "src"),
        lambda: comm.all_reduce(paddle.ones([2, 3]).t(), "strides"),
    ]
    messages = []
    for call in calls:
        try:
            call()
            messages.append("")
        except UsageError as error:
            messages.append(str(error))
    return messages


def recorded(native: bool = False) -> dict[str, Any]:
    """One operation of each kind."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    comm = RecordingComm(NativeComm(None, rank, range(world_size)) if native else create_comm())
    comm.all_gather(paddle.zeros([8 * world_size]), paddle.ones([8]), "gather").wait()
    if not native:
        segments = [paddle.ones([6]), 12 * world_size - 6]
        comm.reduce_scatter(segments, 12 * world_size, "reduce").wait()
    comm.all_reduce(paddle.ones([10], "float64"), "sum").wait()
    comm.broadcast(paddle.ones([4], "int32"), 0, "weights").wait()
    comm.exchange(comm.rank, "hello")
    comm.barrier("end")
    log = [tuple(record) for record in comm.log]
    comm.clear()
    comm.barrier("after")
    return {"log": log, "after": [tuple(record) for record in comm.log]}


def native_calls() -> dict[str, Any]:
    """The accelerators' communicator over gloo, with a reduce-scatter, which gloo lacks, made of its all-reduce."""

    def reduce_scatter(out: paddle.Tensor, full: paddle.Tensor, group: Any, **options: Any) -> Any:
        full = full.clone()
        task = dist.stream.all_reduce(full, group=group, **options)
        share = out.size
        out.copy_(full[dist.get_rank() * share : (dist.get_rank() + 1) * share], True)
        return task

    original = dist.stream.reduce_scatter
    dist.stream.reduce_scatter = reduce_scatter
    try:
        return _native_calls()
    finally:
        dist.stream.reduce_scatter = original


def _native_calls() -> dict[str, Any]:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    comm = NativeComm(None, rank, range(world_size))
    full = paddle.zeros([3 * world_size])
    comm.all_gather(full, paddle.full([3], float(rank)), "gather").wait()
    segments = [tensor(values(rank, 6)).reshape([2, 3]), 5, paddle.zeros([0]), tensor(values(rank, 1))]
    work = comm.reduce_scatter(segments, 12, "reduce")
    overlaps = [(each.segment, each.start, each.value) for each in work.wait()]
    (whole,) = comm.reduce_scatter([tensor(values(rank, 12))], 12, "whole").wait()
    zeros = comm.reduce_scatter([12], 12, "reduce").wait()
    value = paddle.full([2], float(rank))
    comm.all_reduce(value, "sum").wait()
    largest = paddle.full([2], float(rank))
    comm.all_reduce(largest, "max", "max").wait()
    source = paddle.full([2], float(rank))
    comm.broadcast(source, world_size - 1, "weights").wait()
    exchanged = comm.exchange({"rank": rank}, "hello")
    comm.barrier("end")
    return {
        "full": full,
        "overlaps": overlaps,
        "whole": (whole.segment, whole.start, whole.value),
        "zeros": [np.count_nonzero(each.value.numpy()) for each in zeros],
        "values": (value, largest, source),
        "exchanged": exchanged,
    }

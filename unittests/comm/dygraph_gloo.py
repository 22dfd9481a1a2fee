"""What the trainers do in ``test_gloo.py``: calls with values that the test can compute itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_group_sharded.comm import Comm, RecordingComm, Server, create_comm
from paddle_group_sharded.errors import CommError, UsageError
from unittests.comm.inputs import MOVED, SUMMED, values


def tensor(array: np.ndarray, dtype: str = "float32") -> paddle.Tensor:
    """``array`` as a tensor; complex values get an imaginary part."""
    if dtype == "complex64":
        return paddle.to_tensor((array + 1j * (array + 1)).astype("complex64"))
    return paddle.to_tensor(array).cast(dtype)


def host(value: paddle.Tensor) -> np.ndarray:
    """The elements as float64, or complex."""
    if value.dtype == paddle.complex64:
        return value.numpy()
    return value.cast("float64").numpy()


def all_reduced(numels: Sequence[int]) -> dict[tuple[str, int], tuple[str, np.ndarray]]:
    """A sum for every dtype and size."""
    comm, results = create_comm(), {}
    for dtype in SUMMED:
        for numel in numels:
            value = tensor(values(comm.rank, numel, numel, dtype), dtype)
            comm.all_reduce(value, f"{dtype} {numel}").wait()
            results[dtype, numel] = (str(value.dtype), host(value))
    comm.close()
    return results


def all_reduced_in_shapes() -> dict[str, Any]:
    """Tensors with other than one dimension, and the maximum."""
    comm = create_comm()
    scalar = paddle.to_tensor(float(comm.rank + 1))
    matrix = paddle.full([3, 4], float(comm.rank + 1))
    large = paddle.full([200, 200], float(comm.rank + 1))
    nothing = paddle.zeros([0])
    maxima = [paddle.to_tensor([comm.rank, -comm.rank]).cast(dtype) for dtype in ("int32", "float32", "float16")]
    large_maximum = paddle.full([40000], float(comm.rank))
    for index, value in enumerate((scalar, matrix, large, nothing)):
        comm.all_reduce(value, f"shape {index}").wait()
    for value in (*maxima, large_maximum):
        comm.all_reduce(value, "max", "max").wait()
    return {
        "scalar": scalar,
        "matrix": matrix,
        "large": large,
        "nothing": nothing,
        "maxima": maxima,
        "large_maximum": large_maximum,
    }


def gathered(numels: Sequence[int]) -> dict[tuple[str, int, bool], np.ndarray]:
    """Every dtype and size, from a tensor of its own and in place."""
    comm, results = create_comm(), {}
    for dtype in MOVED:
        for numel in numels:
            shard = tensor(values(comm.rank, numel, numel, dtype), dtype)
            full = paddle.zeros([numel * comm.world_size], dtype)
            comm.all_gather(full, shard, f"{dtype} {numel}").wait()
            results[dtype, numel, False] = host(full)
            full = paddle.zeros([numel * comm.world_size], dtype)
            if numel:
                own = full._slice(comm.rank * numel, (comm.rank + 1) * numel)
                own.copy_(shard, True)
                shard = own
            comm.all_gather(full, shard, f"{dtype} {numel} in place").wait()
            results[dtype, numel, True] = host(full)
    comm.close()
    return results


def broadcasted(numels: Sequence[int]) -> dict[tuple[str, int, int], np.ndarray]:
    """Every dtype, size and source."""
    comm, results = create_comm(), {}
    for dtype in MOVED:
        for numel in numels:
            for src in range(comm.world_size):
                value = tensor(values(comm.rank, numel, numel, dtype), dtype)
                comm.broadcast(value, src, f"{dtype} {numel} from {src}").wait()
                results[dtype, numel, src] = host(value)
    scalar = paddle.to_tensor(float(comm.rank))
    comm.broadcast(scalar, comm.world_size - 1, "scalar").wait()
    results["scalar", 1, comm.world_size - 1] = host(scalar)
    comm.close()
    return results


def reduce_scattered(
    plans: Sequence[tuple[str, tuple[int, ...], int]], zeros: Sequence[tuple[int, int]] = ()
) -> list[list[tuple[int, int, str, np.ndarray]]]:
    """One reduce-scatter per ``(dtype, sizes, numel)``; ``zeros`` lists ``(rank, segment)`` given as a number."""
    comm, results = create_comm(), []
    for dtype, sizes, numel in plans:
        segments: list[Any] = [
            size if (comm.rank, index) in zeros else tensor(values(comm.rank, size, index, dtype), dtype)
            for index, size in enumerate(sizes)
        ]
        overlaps = comm.reduce_scatter(segments, numel, f"{dtype} {sizes}").wait()
        results.append([(each.segment, each.start, str(each.value.dtype), host(each.value)) for each in overlaps])
    comm.close()
    return results


def large_gradients_are_not_copied() -> bool:
    """Whether the overlap of a large float32 segment lies in the segment's own memory."""
    comm = create_comm()
    segment = paddle.full([300, 100], 1.0)
    (overlap,) = comm.reduce_scatter([segment], 30000, "gradient").wait()
    return bool(overlap.value.data_ptr() == segment.data_ptr() + 4 * overlap.start)


def asynchronous(count: int) -> dict[str, Any]:
    """Many operations queued at once, on data that depend on each other, waited for in reverse."""
    comm = create_comm()
    value = paddle.ones([30000])
    full = paddle.zeros([30000 * comm.world_size])
    works = []
    for index in range(count):
        works.append(comm.all_reduce(value, f"sum {index}"))
        works.append(comm.all_gather(full, value, f"gather {index}"))
    for work in reversed(works):
        work.wait()
        work.wait()
    return {"value": value, "full": full}


def no_autograd() -> list[bool]:
    """Whether results of operations on tensors that require gradients stay outside of autograd."""
    comm = create_comm()
    parameter = paddle.create_parameter([20000], "float32")
    gradient = paddle.ones([4]) * parameter[:4]
    (*_, overlap) = comm.reduce_scatter([gradient, 20000 - 4], 20000, "reduce").wait() or [None]
    comm.broadcast(parameter, 0, "parameter").wait()
    comm.all_reduce(parameter, "parameter").wait()
    return [overlap is None or overlap.value.stop_gradient, parameter.is_leaf, parameter.grad is None]


def exchanged() -> list[Any]:
    """Python values of every rank, small and large."""
    comm = create_comm()
    first = comm.exchange({"rank": comm.rank, "name": "x" * comm.rank}, "first")
    second = comm.exchange(b"y" * (1 << 20), "large")
    comm.barrier("end")
    return [first, [len(each) for each in second]]


def with_the_users_own_collectives(steps: int) -> dict[str, np.ndarray]:
    """The user's all-reduces on the default group, from this thread, while ours run in theirs."""
    comm = create_comm()
    ours, users = paddle.ones([50000]), paddle.ones([50000])
    for step in range(steps):
        work = comm.all_reduce(ours, f"step {step}")
        dist.all_reduce(users)
        users /= comm.world_size
        work.wait()
        ours /= comm.world_size
    return {"ours": ours[:4], "users": users[:4]}


def several_comms() -> dict[str, Any]:
    """Two communicators over the same ranks, with crossing queues, and one over a subgroup."""
    first, second = create_comm(), create_comm()
    a, b = paddle.full([20000], 1.0), paddle.full([20000], 10.0)
    works = [first.all_reduce(a, "on first"), second.all_reduce(b, "on second"), first.all_reduce(a, "again")]
    for work in works:
        work.wait()
    result: dict[str, Any] = {"first": float(a[0].item()), "second": float(b[0].item())}
    ranks = list(range(1, first.world_size))
    group = dist.new_group(ranks)
    if first.rank in ranks:
        comm = create_comm(group)
        value = paddle.full([20000], float(first.rank))
        comm.all_reduce(value, "subgroup").wait()
        result["subgroup"] = (comm.rank, comm.world_size, comm.ranks, float(value[0].item()))
    else:
        try:
            create_comm(group)
        except UsageError as error:
            result["refused"] = str(error)
    return result


def serving(steps: int) -> dict[str, Any]:
    """Rank 0 asks for a gather alone, and all ranks for different ones at once, while others do other things."""
    comm = RecordingComm(create_comm())
    numel = 30000 if comm.world_size == 2 else 5
    shards = [paddle.full([numel], 10.0 * index + comm.rank) for index in range(comm.world_size)]
    for index, shard in enumerate(shards):
        server = Server(lambda shard=shard: shard, numel * comm.world_size)
        comm.serve(f"gather {index}", server)
    seen = []

    def gather(index: int) -> None:
        full = paddle.zeros([numel * comm.world_size])
        comm.all_gather(full, shards[index], f"gather {index}").wait()
        seen.append((index, full.numpy()[::numel].tolist()))

    for step in range(steps):
        if comm.rank == step % comm.world_size:
            gather(0)  # alone
        gather(comm.rank)  # each another one
        total = paddle.to_tensor(1.0)
        comm.all_reduce(total, f"step {step}").wait()
        seen.append(("sum", total.item()))
        comm.exchange(step, "exchange")
        if comm.rank == 0:
            gather(1)
            gather(1)
        comm.barrier("barrier")
    for index in range(comm.world_size):
        comm.serve(f"gather {index}", None)
    comm.barrier("end")
    return {"seen": seen, "log": [tuple(record) for record in comm.log]}


def unregistered() -> str:
    """A gather that was served once and is not any more."""
    comm = create_comm()
    shard = paddle.ones([3])
    comm.serve("gather", Server(lambda: shard, 3 * comm.world_size))
    comm.serve("gather", None)
    return _message(
        lambda: (
            comm.all_gather(paddle.zeros([3 * comm.world_size]), shard, "gather").wait()
            if comm.rank == 0
            else comm.barrier("other")
        )
    )


def random_operations(seed: int, count: int) -> list[Any]:
    """A sequence that is equal on all ranks, in flight together."""
    rng = np.random.default_rng(seed)
    comm = create_comm()
    waiting: list[tuple[Any, Callable[[Any], Any]]] = []
    results = []
    for index in range(count):
        numel = int(rng.choice([0, 1, 5, 1000, 20000, 70000]))
        value = tensor(values(comm.rank, numel, index))
        kind = rng.integers(5)
        if kind == 0:
            work = comm.all_reduce(value, f"{index}")
            waiting.append((work, lambda _, value=value: value))
        elif kind == 1:
            work = comm.broadcast(value, int(rng.integers(comm.world_size)), f"{index}")
            waiting.append((work, lambda _, value=value: value))
        elif kind == 2:
            full = paddle.zeros([numel * comm.world_size])
            work = comm.all_gather(full, value, f"{index}")
            waiting.append((work, lambda _, full=full: full))
        elif kind == 3:
            segments = [value, int(rng.integers(4)), tensor(values(comm.rank, 7, index))]
            total = numel + segments[1] + 7
            work = comm.reduce_scatter(segments, total + -total % comm.world_size, f"{index}")
            waiting.append((work, lambda overlaps: [(each.segment, each.start, each.value) for each in overlaps]))
        else:
            results.append(comm.exchange(index * (comm.rank + 1), f"{index}"))
        if rng.random() < 0.3:
            results += [result(work.wait()) for work, result in waiting]
            waiting.clear()
    return results + [result(work.wait()) for work, result in waiting]


def refusals() -> dict[str, Optional[str]]:
    """Arguments that are wrong on this rank alone can be refused before anybody else is involved."""
    comm = create_comm()
    ones = paddle.ones([4])
    return {
        "gather size": _message(lambda: comm.all_gather(paddle.zeros([7]), ones, "g")),
        "gather dtype": _message(lambda: comm.all_gather(paddle.zeros([4 * comm.world_size], "int32"), ones, "g")),
        "segments": _message(lambda: comm.reduce_scatter([ones, ones.cast("int32")], 8 * comm.world_size, "r")),
        "numel": _message(lambda: comm.reduce_scatter([ones], 3, "r")),
        "op": _message(lambda: comm.all_reduce(ones, "a", "prod")),
        "src": _message(lambda: comm.broadcast(ones, 7, "b")),
        "strides": _message(lambda: comm.all_reduce(paddle.ones([3, 4]).t(), "t")),
        "complex": _message(lambda: comm.all_reduce(paddle.zeros([2], "complex64"), "c")),
        "still works": _message(lambda: comm.barrier("end")),
    }


def after_close() -> str:
    """A call on a closed communicator; closing twice is fine."""
    comm: Comm = create_comm()
    value = paddle.ones([50000])
    comm.all_reduce(value, "before")
    comm.close()
    comm.close()
    if value[0].item() != comm.world_size:
        return "close() did not finish what was under way"
    return _message(lambda: comm.barrier("after"))


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (CommError, UsageError) as error:
        return f"{type(error).__name__}: {error}"
    return ""

"""What the trainers do in ``test_channel.py``."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Callable

import numpy as np
import paddle

from paddle_group_sharded.comm import Receiver, Sender, create_channels, create_comm
from paddle_group_sharded.errors import CommError, UsageError
from unittests.comm.dygraph_gloo import host, tensor
from unittests.comm.inputs import MOVED, values

SHAPES = ((), (1,), (0,), (3, 0), (2, 3, 4), (300, 100))


def message(call: Callable[[], Any]) -> str:
    """What ``call`` raises, or nothing."""
    try:
        call()
    except (CommError, UsageError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def both_ways() -> tuple[int, Sender, Receiver]:
    """The rank, and a channel to and from the other of two ranks."""
    comm = create_comm()
    ends = create_channels(comm, {"up": (0, 1), "down": (1, 0)})
    to, back = (ends["up"], ends["down"]) if comm.rank == 0 else (ends["down"], ends["up"])
    return comm.rank, to, back


def every_kind() -> list[Any]:
    """Every dtype and shape, and Python values between them, full duplex."""
    rank, sender, receiver = both_ways()
    for dtype in MOVED:
        for shape in SHAPES:
            array = values(rank, int(np.prod(shape)), len(shape), dtype).reshape(shape)
            sender.send(tensor(array, dtype), f"{dtype} {shape}")
        sender.send_object({"rank": rank, "dtype": dtype}, dtype)
    results = []
    for dtype in MOVED:
        for shape in SHAPES:
            got = receiver.recv(shape, dtype, f"{dtype} {shape}")
            results.append((str(got.dtype), list(got.shape), host(got)))
        results.append(receiver.recv_object(dtype))
    sender.close()
    receiver.close()
    return results


def duplex(count: int, numel: int) -> list[float]:
    """Both ranks send large tensors before either receives."""
    rank, sender, receiver = both_ways()
    works = [sender.send(paddle.full([numel], float(10 * rank + index)), f"{index}") for index in range(count)]
    received = [receiver.irecv([numel], paddle.float32, f"{index}") for index in range(count)]
    sums = [float(work.wait().mean().item()) for work in reversed(received)]
    for work in works:
        work.wait()
    return sums


def out_of_step(count: int) -> list[float]:
    """Rank 0 is far ahead with sending; rank 1 takes its time and computes between."""
    rank, sender, receiver = both_ways()
    if rank == 0:
        for index in range(count):
            sender.send(paddle.full([1000 * index + 1], float(index)), f"{index}")
        return [float(receiver.recv([1], "float32", "end").item())]
    total = []
    for index in range(count):
        time.sleep(0.01)
        total.append(float(receiver.recv([1000 * index + 1], "float32", f"{index}").mean().item()))
    sender.send(paddle.to_tensor([sum(total)]), "end")
    return total


def temporary() -> float:
    """A sent tensor that nobody else holds lives until it has been sent."""
    rank, sender, receiver = both_ways()
    for index in range(20):
        sender.send(paddle.full([200000], float(index)), "x")
    return sum(float(receiver.recv([200000], "float32", "x").mean().item()) for _ in range(20))


def strided() -> list[float]:
    """A transposed tensor arrives with its values in order."""
    rank, sender, receiver = both_ways()
    sender.send(paddle.arange(6, dtype="float32").reshape([2, 3]).t(), "t")
    return receiver.recv([3, 2], "float32", "t").flatten().tolist()


def messages() -> dict[str, Any]:
    """A value with any number of tensors; then a failure, which ends the channel; then ends that are abandoned."""
    rank, sender, receiver = both_ways()
    tensors = [paddle.full([2, 3], float(rank)), paddle.to_tensor(rank == 0), paddle.zeros([0, 4], dtype="int8")]
    sender.send_message({"from": rank}, tensors, "1F0")
    sender.send_message(None, [], "1F1")
    sender.send_message((), [tensors[0].t()], "1F2")
    sender.send_failure(f"rank {rank} has had enough")
    works = [receiver.irecv_message(label) for label in ("1F0", "1F1", "1F2")]
    late = receiver.irecv_message("1F3")
    values = [work.wait() for work in works]
    errors = [message(late.wait), message(lambda: receiver.irecv_message("1F4"))]
    for end in (sender, receiver):
        end.abandon()
        end.abandon()
    errors.append(message(lambda: sender.send_message(None, [], "1F5")))
    return {"values": values, "errors": errors, "dtypes": [str(tensor.dtype) for tensor in values[0][1]]}


def late(seconds: float) -> float:
    """The receiver comes later than gloo would wait."""
    rank, sender, receiver = both_ways()
    if rank == 0:
        sender.send(paddle.ones([4_000_000]), "large").wait()
        return 4e6
    time.sleep(seconds)
    return float(receiver.recv([4_000_000], "float32", "large").sum().item())


def missing(limit: float) -> list[str]:
    """Nobody sends."""
    comm = create_comm()
    ends = create_channels(comm, {"only": (0, 1)}, timeout=limit)
    if comm.rank == 0:
        comm.barrier("the other has given up")
        return ["", message(ends["only"].close)]
    first = message(lambda: ends["only"].recv([2], "float32", "2F0"))
    comm.barrier("the other has given up")
    return [first, message(lambda: ends["only"].recv([2], "float32", "2F1"))]


def unexpected() -> list[str]:
    """What the receiver expects differs from what was sent: shape, dtype, label, kind."""
    comm = create_comm()
    routes = {name: (0, 1) for name in ("shape", "dtype", "label", "kind", "message")}
    ends = create_channels(comm, routes)
    if comm.rank == 0:
        for name in routes:
            ends[name].send(paddle.ones([2, 3]), "2F0")
        comm.barrier("received")
        return []
    results = [
        message(lambda: ends["shape"].recv([3, 2], "float32", "2F0")),
        message(lambda: ends["dtype"].recv([2, 3], "float64", "2F0")),
        message(lambda: ends["label"].recv([2, 3], "float32", "2F1")),
        message(lambda: ends["kind"].recv_object("2F0")),
        message(lambda: ends["message"].irecv_message("2F0").wait()),
    ]
    comm.barrier("received")
    return results


def killed() -> list[str]:
    """Rank 1 is killed while rank 0 waits for it, and has more to send than the sockets hold."""
    rank, sender, receiver = both_ways()
    if rank == 1:
        receiver.recv([1], "float32", "first")
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    sender.send(paddle.ones([1]), "first").wait()
    sender.send(paddle.ones([8_000_000]), "large")
    start = time.monotonic()
    received = message(lambda: receiver.recv([1], "float32", "never"))
    seconds = time.monotonic() - start
    return [received, message(sender.close), message(sender.close), str(seconds < 3)]


def many_routes() -> dict[str, Any]:
    """Several channels between the same ranks, and a ring; each rank has the ends that concern it."""
    comm = create_comm()
    size = comm.world_size
    routes = {("ring", rank): (rank, (rank + 1) % size) for rank in range(size)}
    routes.update({("second", rank): (rank, (rank + 1) % size) for rank in range(size)})
    ends = create_channels(comm, routes)
    before = (comm.rank - 1) % size
    ends["second", comm.rank].send_object(f"second of {comm.rank}", "name")
    ends["ring", comm.rank].send_object(f"ring of {comm.rank}", "name")
    got = [ends["ring", before].recv_object("name"), ends["second", before].recv_object("name")]
    return {"keys": sorted(ends), "got": got}


def refusals() -> list[str]:
    """Routes that cannot be, and calls on a closed channel."""
    comm = create_comm()
    ends = create_channels(comm, {"a": (0, 1)})
    results = [
        message(lambda: create_channels(comm, {"loop": (1, 1)})),
        message(lambda: create_channels(comm, {5: (0, 9)})),
    ]
    ends["a"].close()
    end = ends["a"]
    if isinstance(end, Sender):
        results.append(message(lambda: end.send(paddle.ones([1]), "x")))
    else:
        results.append(message(lambda: end.recv([1], "float32", "x")))
    return results

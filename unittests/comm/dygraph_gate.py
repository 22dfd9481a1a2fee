"""What the trainers do in ``test_gate.py``: be late, disagree, end, fail."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from typing import Any, Callable, Optional

import paddle

from paddle_group_sharded.comm import Comm, Server, create_comm
from paddle_group_sharded.comm import gate as gate_module
from paddle_group_sharded.errors import CommError


def message(call: Callable[[], Any]) -> str:
    """What ``call`` raises, or nothing."""
    try:
        call()
    except CommError as error:
        return str(error)
    return ""


def timed(call: Callable[[], Any]) -> tuple[str, float]:
    """What ``call`` raises, and after how many seconds."""
    start = time.monotonic()
    return message(call), time.monotonic() - start


def reduce(comm: Comm, label: str, numel: int = 3) -> Any:
    """An operation of all ranks."""
    return comm.all_reduce(paddle.ones([numel]), label).wait()


class Log(logging.Handler):
    """The lines that the gate logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.lines.append(record.getMessage())

    def __enter__(self) -> Log:
        logging.getLogger(gate_module.__name__).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger(gate_module.__name__).removeHandler(self)


def late(rank: int, seconds: float, numel: int, warn_after: Optional[float] = None) -> dict[str, Any]:
    """One rank comes late to a large and to a small operation."""
    comm = create_comm()
    original = gate_module._WARN_AFTER
    gate_module._WARN_AFTER = warn_after or original
    try:
        with Log() as log:
            if comm.rank == rank:
                time.sleep(seconds)
            value = paddle.ones([numel])
            comm.all_reduce(value, "late").wait()
            comm.barrier("end")
    finally:
        gate_module._WARN_AFTER = original
    return {"value": value[:3], "log": log.lines}


def late_to_open(seconds: float) -> float:
    """The last rank comes late to the opening of the communicator."""
    paddle.distributed.barrier()
    if paddle.distributed.get_rank() == paddle.distributed.get_world_size() - 1:
        time.sleep(seconds)
    comm = create_comm()
    value = paddle.ones([20000])
    comm.all_reduce(value, "first").wait()
    return float(value[0].item())


def absent_from_opening(limit: float) -> list[str]:
    """The last rank comes to the opening when the others have given up; a second try works."""
    paddle.distributed.barrier()
    if paddle.distributed.get_rank() == paddle.distributed.get_world_size() - 1:
        time.sleep(limit + 1)
    first = message(lambda: create_comm(timeout=limit))
    paddle.distributed.barrier()
    return [first, message(lambda: reduce(create_comm(), "second try"))]


def missing(rank: int, limit: float, away: float) -> dict[str, Any]:
    """One rank does not come in time; what the others see, and what it sees when it comes at last."""
    comm = create_comm(timeout=limit)
    reduce(comm, "all are here")
    if comm.rank == rank:
        time.sleep(away)
    first, seconds = timed(lambda: reduce(comm, "too late"))
    return {"first": first, "seconds": seconds, "second": message(lambda: comm.barrier("after"))}


def arrives_just_in_time(limit: float, hub_away: float, other_away: float) -> list[str]:
    """The hub comes late, and then waits for another rank longer than the first ones would have waited for the hub."""
    comm = create_comm(timeout=limit)
    original = gate_module._GRACE
    gate_module._GRACE = 0.0
    try:
        time.sleep({0: hub_away, 1: 0.0, 2: other_away}[comm.rank])
        return [message(lambda: reduce(comm, "patience"))]
    finally:
        gate_module._GRACE = original


def differing(queued: int) -> dict[str, Any]:
    """Every rank asks for something else, with more behind it in the queue."""
    comm = create_comm()
    value = paddle.ones([4])
    calls = [
        lambda: comm.all_reduce(value, "loss"),
        lambda: comm.broadcast(value, 0, "weights"),
        lambda: comm.all_gather(paddle.zeros([4 * comm.world_size]), value, "save_group_sharded_model"),
    ]
    work = calls[comm.rank]()
    behind = []
    for index in range(queued):
        try:
            behind.append(comm.all_reduce(value, f"behind {index}"))
        except CommError:
            break
    return {
        "first": message(work.wait),
        "again": message(work.wait),
        "behind": [message(each.wait) for each in behind],
        "later": message(lambda: comm.barrier("later")),
        "closed": message(comm.close),
    }


def another_comm_survives() -> list[str]:
    """A failed communicator does not touch the others over the same ranks, before it or after."""
    before, broken = create_comm(), create_comm()
    reduce(before, "before", 20000)
    first = message(lambda: broken.barrier(f"only rank {broken.rank}"))
    broken.close()
    after = create_comm()
    return [first, message(lambda: reduce(before, "before", 20000)), message(lambda: reduce(after, "after", 20000))]


def killed(rank: int, numel: int) -> tuple[str, float]:
    """One rank is killed while the others wait for it."""
    comm = create_comm()
    reduce(comm, "all are here", 20000)
    if comm.rank == rank:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    return timed(lambda: reduce(comm, "with the dead", numel))


def killed_while_serving() -> tuple[str, float]:
    """The last rank is killed after the others have begun to gather."""
    comm = create_comm()
    shard = paddle.ones([30000])

    def die() -> paddle.Tensor:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
        return shard

    dies = comm.rank == comm.world_size - 1
    comm.serve("gather", Server(die if dies else lambda: shard, 30000 * comm.world_size))
    if dies:
        comm.barrier("end")
    return timed(lambda: comm.all_gather(paddle.zeros([30000 * comm.world_size]), shard, "gather").wait())


def ends_early() -> tuple[str, float]:
    """Rank 1 closes while the others go on."""
    comm = create_comm()
    if comm.rank == 1:
        comm.close()
        return "", 0.0
    return timed(lambda: comm.barrier("one more"))


def dropped() -> list[int]:
    """A communicator that nobody holds any more ends its thread and closes its sockets."""
    counts = []
    for _ in range(3):
        comm: Optional[Comm] = create_comm()
        if comm is not None:
            reduce(comm, "once", 20000)
            comm.barrier("end")
        comm = None
        gc.collect()
        threads = sum("group_sharded" in thread.name for thread in threading.enumerate())
        counts.append((threads, len(os.listdir("/proc/self/fd"))))
    return [counts[-1][0], counts[-1][1] - counts[0][1]]

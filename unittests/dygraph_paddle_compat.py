"""Inside a trainer: the functions of paddle_compat that need other ranks."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_group_sharded.paddle_compat import GlooGroup, current_host, open_tcp_store, tcp_store


def store_and_host() -> dict[str, Any]:
    """The launch's store, a store of our own, the host."""
    rank = dist.get_rank()
    store = tcp_store()
    if rank == 0:
        store.set("compat/text", "hello")
    store.add("compat/sum", rank + 1)
    dist.barrier()
    port = 0
    own = None
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        own = open_tcp_store("127.0.0.1", port, True)
        store.set("compat/port", str(port))
    else:
        own = open_tcp_store("127.0.0.1", int(store.get("compat/port")), False)
    own.add("mine", 10)
    dist.barrier()
    result = {
        "text": store.get("compat/text"),
        "sum": store.add("compat/sum", 0),
        "host": current_host(),
        "own": own.add("mine", 0),
    }
    dist.barrier()  # the store's server goes with its object
    return result


def gloo_group() -> dict[str, Any]:
    """Every method, on values that tell the ranks apart."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = tcp_store()
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        own = open_tcp_store("127.0.0.1", port, True)
        store.set("compat/gloo", str(port))
    else:
        own = open_tcp_store("127.0.0.1", int(store.get("compat/gloo")), False)
    group = GlooGroup(own, rank, world_size, 0x7000_0001)
    full = paddle.zeros([2 * world_size])
    group.all_gather(full, paddle.full([2], float(rank)))
    summed, largest = paddle.full([3], rank + 1.0), paddle.full([3], rank + 1.0)
    group.all_reduce(summed, "sum")
    group.all_reduce(largest, "max")
    sent = paddle.full([2], 10.0 + rank)
    group.broadcast(sent, 1)
    received = paddle.zeros([4])
    if rank == 0:
        group.send(paddle.arange(4, dtype="float32"), 1)
    elif rank == 1:
        group.recv(received, 0)
    result = {"full": full, "sum": summed, "max": largest, "sent": sent, "received": received}
    values = {name: np.array(tensor.numpy()) for name, tensor in result.items()}
    dist.barrier()
    return values

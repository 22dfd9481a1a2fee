"""The only part of the package that talks to the network.

*group rank*: the number of a rank in its group, from 0; *global rank*: its number in the launch.  *full*: the flat
tensor that all ranks share; *shard*: the ``1/world_size`` of it that one rank owns.  *gate*: where ranks agree before
an operation runs; *hub*: group rank 0, which decides there.
"""

from __future__ import annotations

from typing import Any

import paddle

from ..errors import UsageError
from .base import Comm, Overlap, Segment, Server, Work
from .channel import Receiver, Sender, create_channels
from .gloo import GlooComm
from .local import LocalComm
from .native import NativeComm
from .recording import Record, RecordingComm

__all__ = [
    "Comm",
    "LocalComm",
    "Overlap",
    "Receiver",
    "Record",
    "RecordingComm",
    "Segment",
    "Sender",
    "Server",
    "Work",
    "create_channels",
    "create_comm",
]


def create_comm(group: Any = None, timeout: float = 1800.0) -> Comm:
    """Open a communicator over ``group`` (a ``paddle.distributed`` group; None: all ranks of the launch).

    Collective over the members of the group, in the same order on each; others must not call.  ``timeout``: seconds
    that an operation waits for ranks that have not come, before it raises :class:`CommError` naming them.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise UsageError(f"timeout must be a number of seconds above 0, got {timeout!r}")
    if not paddle.distributed.is_initialized():
        world_size = paddle.distributed.get_world_size()
        if world_size > 1:
            raise UsageError(
                f"expected an initialized parallel environment, as the launch has {world_size} ranks; call "
                "fleet.init(is_collective=True) or paddle.distributed.init_parallel_env() first"
            )
        return LocalComm()
    if group is not None and not hasattr(group, "ranks"):
        raise UsageError(
            f"group must be what paddle.distributed.new_group() returned, or None for all ranks, got {group!r}"
        )
    global_rank = paddle.distributed.get_rank()
    ranks = tuple(range(paddle.distributed.get_world_size())) if group is None else tuple(group.ranks)
    if global_rank not in ranks:
        raise UsageError(
            f"expected a rank of the group {list(ranks)}, but this is rank {global_rank}; build the sharded model on "
            "the members of its group only"
        )
    if len(ranks) == 1:
        return LocalComm(ranks)
    if paddle.get_device() != "cpu":
        return NativeComm(group, ranks.index(global_rank), ranks)
    return GlooComm.connect(ranks.index(global_rank), ranks, timeout)

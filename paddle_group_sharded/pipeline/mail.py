"""The messages of one rank: one channel to and one from each rank that it shares a stage boundary with.

Receives are posted when a step begins, so a message is read as soon as it comes, while the rank computes, and the rank
that sent it never waits for this one to listen.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Protocol

from ..comm import Comm, Receiver, Sender, Work, create_channels
from .action import Action, Plan
from .grid import Grid

__all__ = ["Mail", "Post"]

Tensor = Any


class Post(Protocol):
    """What a runner needs of its surroundings to exchange messages."""

    def expect(self, transfers: Iterable[tuple[Action, int]]) -> None:
        """Post the receives of a step, in order, each with the pipeline rank that it comes from."""

    def send(self, action: Action, peer: int, value: Any, tensors: list[Tensor]) -> None:
        """Send to a pipeline rank; returns at once."""

    def recv(self, action: Action) -> tuple[Any, list[Tensor]]:
        """What comes for a receive that was posted.  Blocks."""


class Mail:
    """A :class:`Post` over channels."""

    def __init__(self, comm: Comm, grid: Grid, plan: Plan, timeout: float) -> None:
        """Open the channels of all pipelines of the launch.  Collective over ``comm``, which has all its ranks."""
        places = plan.stage_to_rank
        pairs = {pair for a, b in zip(places, places[1:]) if a != b for pair in ((a, b), (b, a))}
        position = {rank: index for index, rank in enumerate(comm.ranks)}
        routes: dict[Hashable, tuple[int, int]] = {
            (replica, *pair): (position[ranks[pair[0]]], position[ranks[pair[1]]])
            for replica, ranks in enumerate(grid.all_pipelines)
            for pair in sorted(pairs)
        }
        ends = create_channels(comm, routes, timeout) if routes else {}
        stages = {rank: stage for stage, rank in enumerate(grid.pipeline_ranks)}
        self._senders = {stages[end.other]: end for end in ends.values() if isinstance(end, Sender)}
        self._receivers = {stages[end.other]: end for end in ends.values() if isinstance(end, Receiver)}
        self._posted: dict[Action, Work] = {}

    def expect(self, transfers: Iterable[tuple[Action, int]]) -> None:
        """See :class:`Post`."""
        self._posted = {
            action: self._receivers[peer].irecv_message(str(action.counterpart)) for action, peer in transfers
        }

    def send(self, action: Action, peer: int, value: Any, tensors: list[Tensor]) -> None:
        """See :class:`Post`.  An error of an earlier send is raised here."""
        self._senders[peer].send_message(value, tensors, str(action))

    def recv(self, action: Action) -> tuple[Any, list[Tensor]]:
        """See :class:`Post`."""
        message: tuple[Any, list[Tensor]] = self._posted.pop(action).wait()
        return message

    def tell_failure(self, reason: str) -> None:
        """Let the neighbours stop, who else would wait for what will not come."""
        for sender in self._senders.values():
            try:
                sender.send_failure(reason)
            except Exception:  # noqa: S110  the connection has failed already, which they know
                pass

    def close(self) -> None:
        """End the threads and the connections, whatever is under way."""
        self._posted.clear()
        for end in (*self._senders.values(), *self._receivers.values()):
            end.abandon()

"""All ranks go on, or all raise: what is checked on each rank is compared before anybody communicates further."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional

from ..errors import GroupShardedError
from .base import Comm

__all__ = ["agree"]


def agree(
    comms: Sequence[Comm],
    label: str,
    problem: Optional[GroupShardedError],
    value: Any = None,
    difference: Optional[Callable[[int, Any, int, Any], GroupShardedError]] = None,
) -> None:
    """Return on every rank if none has a ``problem`` and all give an equal ``value``; else raise on every rank.

    Collective over ``comms``, which together connect all ranks.  ``difference(rank, value, rank, value)`` makes the
    error for two ranks whose values differ; other ranks' problems are raised with the rank's number before them.
    """
    own = comms[0].ranks[comms[0].rank]
    found = None if problem is None else (own, problem)
    for comm in comms:
        reports = comm.exchange((found, value), label)
        first = reports[0][1]
        for rank, (reported, other) in zip(comm.ranks, reports):
            if found is None and reported is not None:
                found = reported
            elif found is None and difference is not None and other != first:
                found = (own, difference(comm.ranks[0], first, rank, other))
    if found is not None:
        rank, error = found
        raise error if rank == own else type(error)(f"rank {rank}: {error}")

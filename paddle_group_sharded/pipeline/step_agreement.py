"""What all ranks agree on before a step and after it, so that one rank's mistake or failure is everybody's at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from ..comm import Comm
from ..errors import CommError, GroupShardedError, UsageError
from .batches import Batch
from .losses import Losses
from .runner import ActionFailed

_logger = logging.getLogger(__name__)

__all__ = ["Facts", "agree_after", "agree_before"]


class Facts(NamedTuple):
    """What a rank says before a step."""

    asked: int  # micro-batches
    sizes: Optional[list[int]]  # samples of each micro-batch that the data gave; None on a rank that needs no data
    options: tuple[tuple[str, Any], ...]  # (name, value), equal on every rank

    @classmethod
    def of(cls, batch: Batch, options: dict[str, Any]) -> Facts:
        """The facts of a rank with this batch."""
        has_data = batch.inputs is not None or batch.labels is not None
        return cls(batch.asked, batch.sizes if has_data else None, tuple(options.items()))


class _Failure(NamedTuple):
    """How a rank failed."""

    follows: bool  # only because another rank did
    kind: type[GroupShardedError]  # what the other ranks raise
    text: str


def agree_before(comm: Comm, label: str, problem: Optional[Exception], facts: Facts, fewer: bool) -> int:
    """The number of micro-batches of the step; or the same error on every rank.  Collective.

    ``fewer``: whether the data may give fewer than were asked for.  Raises StopIteration where it has ended.
    """
    own = comm.ranks[comm.rank]
    said = None if problem is None else _Failure(False, _kind(problem), f"{_name(problem)}{problem}")
    reports = comm.exchange((said, facts), label)
    if problem is not None:
        raise problem
    for rank, (failure, _) in zip(comm.ranks, reports):
        if failure is not None:
            raise failure.kind(f"rank {rank}: {failure.text}")
    for rank, (_, others) in zip(comm.ranks, reports):
        for (name, mine), (_, theirs) in zip(facts.options, others.options):
            if mine != theirs:
                raise UsageError(
                    f"{name} differs between ranks: rank {own} has {mine}, rank {rank} has {theirs}; give the same on "
                    f"every rank"
                )
    given = [(rank, others.sizes) for rank, (_, others) in zip(comm.ranks, reports) if others.sizes is not None]
    _check_sizes(given)
    count = len(given[0][1])
    if count == 0 or (count < facts.asked and not fewer):
        raise StopIteration(f"the data ended after {count} of {facts.asked} micro-batches, on every rank")
    return count


def agree_after(comm: Comm, label: str, failure: Optional[Exception], losses: Optional[Losses]) -> list[Any]:
    """Every rank's losses; or the first failure of any rank, on every rank.  Collective."""
    said: Optional[_Failure] = None
    if failure is not None:
        cause = failure.__cause__ if isinstance(failure, ActionFailed) else failure
        said = _Failure(isinstance(cause, CommError), _kind(cause), str(failure))
    try:
        reports = comm.exchange((said, losses), label)
    except CommError:  # a rank has ended
        if failure is None:
            raise
        raise failure.__cause__ or failure from None
    failures = [(rank, each) for rank, (each, _) in zip(comm.ranks, reports) if each is not None]
    if not failures:
        return [each for _, each in reports]
    rank, first = next((pair for pair in failures if not pair[1].follows), failures[0])
    if failure is not None and rank == comm.ranks[comm.rank]:
        _logger.error("rank %d failed: %s", rank, failure)
        raise failure.__cause__ or failure
    raise first.kind(f"rank {rank} failed: {first.text}; this rank stopped with it") from failure


def _check_sizes(given: Sequence[tuple[int, list[int]]]) -> None:
    first_rank, first = given[0]
    for rank, sizes in given[1:]:
        if len(sizes) != len(first):
            raise UsageError(
                f"the data of rank {first_rank} gave {len(first)} micro-batches, that of rank {rank} {len(sizes)}; "
                f"give the same number to the first and the last stage of every replica"
            )


def _kind(error: Optional[BaseException]) -> type[GroupShardedError]:
    """What other ranks raise for ``error``: its own type if it is of this package, as a user's may not exist there."""
    return type(error) if isinstance(error, GroupShardedError) and type(error) is not ActionFailed else CommError


def _name(error: Exception) -> str:
    return "" if isinstance(error, GroupShardedError) else f"{type(error).__name__}: "

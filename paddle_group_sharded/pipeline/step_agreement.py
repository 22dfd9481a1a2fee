"""What all ranks agree on before a step and after it, so that one rank's mistake or failure is everybody's at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from ..comm import Comm
from ..errors import CommError, GroupShardedError, UsageError
from .batches import Batch, Counted
from .losses import Losses
from .runner import ActionFailed

_logger = logging.getLogger(__name__)

__all__ = ["Facts", "agree_after", "agree_before"]


class Facts(NamedTuple):
    """What a rank says before a step."""

    asked: int  # micro-batches
    sizes: Optional[list[int]]  # samples of each micro-batch that the data gave; None on a rank that needs no data
    counted: Counted
    options: tuple[tuple[str, Any], ...]  # (name, value), equal on every rank

    @classmethod
    def of(cls, batch: Batch, options: dict[str, Any]) -> Facts:
        """The facts of a rank with this batch."""
        has_data = batch.inputs is not None or batch.labels is not None
        return cls(batch.asked, batch.sizes if has_data else None, batch.counted, tuple(options.items()))


class _Failure(NamedTuple):
    """How a rank failed."""

    follows: bool  # only because another rank did
    kind: type[GroupShardedError]  # what the other ranks raise
    text: str


def agree_before(
    comm: Comm, label: str, problem: Optional[Exception], facts: Facts, fewer: bool, pipeline: Sequence[int]
) -> list[int]:
    """Samples of each micro-batch of this rank's pipeline; or the same error on every rank.  Collective.

    ``fewer``: whether the data may give fewer micro-batches than were asked for.  ``pipeline``: ranks of this rank's
    replica, of which the surest count is taken, the last stage's before the first's, since it has the labels that a
    loss is a mean over.  Raises StopIteration where the data has ended.
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
    counts = [(rank, len(others.sizes)) for rank, (_, others) in zip(comm.ranks, reports) if others.sizes is not None]
    most = max(count for _, count in counts)
    if most == 0 or (most < facts.asked and not fewer):  # with less on some ranks than on others, too
        least = min(count for _, count in counts)
        raise StopIteration(f"the data ended after {least} of {facts.asked} micro-batches, on every rank")
    if any(others.counted for _, others in reports):  # a rank whose data has no samples knows not into how few to cut
        counted = {rank for rank, (_, others) in zip(comm.ranks, reports) if others.counted}
        fewest = min(count for rank, count in counts if rank in counted)
        counts = [(rank, count) for rank, count in counts if rank in counted or count < fewest or not fewer]
    _check_counts(counts)
    of_pipeline = [others for rank, (_, others) in zip(comm.ranks, reports) if rank in pipeline]
    best = max((each for each in reversed(of_pipeline) if each.sizes), key=lambda each: each.counted)
    return best.sizes or []


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


def _check_counts(counts: Sequence[tuple[int, int]]) -> None:
    first_rank, first = counts[0]
    for rank, count in counts[1:]:
        if count != first:
            raise UsageError(
                f"the data of rank {first_rank} gave {first} micro-batches, that of rank {rank} {count}; give the same "
                f"number to the first and the last stage of every replica"
            )


def _kind(error: Optional[BaseException]) -> type[GroupShardedError]:
    """What other ranks raise for ``error``: its own type if it is of this package, as a user's may not exist there."""
    return type(error) if isinstance(error, GroupShardedError) and type(error) is not ActionFailed else CommError


def _name(error: Exception) -> str:
    return "" if isinstance(error, GroupShardedError) else f"{type(error).__name__}: "

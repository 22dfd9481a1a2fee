"""What ranks ask for, and what happens when they do not all ask for the same: a pure function of the requests."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

__all__ = ["Kind", "Request", "Verdict", "decide", "explain"]


class Request(NamedTuple):
    """What one rank is about to do; equal on every rank unless somebody asks alone."""

    op: str
    label: str  # who asks
    numel: int = 0  # elements of the full tensor
    dtype: str = ""  # empty where this rank has no say: it only adds zeros
    detail: tuple[Any, ...] = ()  # the sizes of the segments of a reduce_scatter, the source of a broadcast, ...

    def __str__(self) -> str:
        size = f" ({self.numel} elements of {self.dtype})" if self.dtype else ""
        return f"{self.op} '{self.label}'{size}"

    def matches(self, other: Request) -> bool:
        """Whether two ranks that ask for these can run together."""
        return self == other or ("" in (self.dtype, other.dtype) and self._replace(dtype=other.dtype) == other)


class Kind(enum.Enum):
    """What a verdict lets the ranks do."""

    GO = "every rank asks for this: run it"
    SERVE = "some ranks ask for this gather: the others run it with their server, then ask again"


class Verdict(NamedTuple):
    """The decision, equal on every rank."""

    kind: Kind
    request: Request  # the operation that runs now
    offers: Sequence[Optional[bytes]] = ()  # what came with the requests, in rank order, if anything did


def decide(requests: Sequence[Request], served: Mapping[str, int]) -> Optional[Verdict]:
    """The verdict on one request per rank, or ``None`` when they do not go together.

    ``served`` maps the label of a gather that may be asked for alone to its number of elements.  Where several ranks
    ask alone, the lowest comes first: the others get their turn when all ask again.
    """
    common = requests[0]._replace(dtype=max(request.dtype for request in requests))
    if all(request.matches(common) for request in requests):
        return Verdict(Kind.GO, common)
    for request in requests:
        if request.op == "all_gather" and served.get(request.label) == request.numel:
            return Verdict(Kind.SERVE, request)
    return None


def explain(requests: Sequence[Request], ranks: Sequence[int]) -> str:
    """The message for requests that do not go together; ``ranks`` are the global ranks they came from."""
    asked = "; ".join(f"rank {rank} asks for {request}" for rank, request in zip(ranks, requests))
    if len({str(request) for request in requests}) == 1:
        asked += f"; they differ in {_difference(requests, ranks)}"
    return (
        f"expected the same operation on every rank of the group, but {asked}. Every rank must make the same calls "
        "in the same order: look for a call that only some ranks reach (under `if rank == 0:`, after an early return "
        "or an exception, in a loop of unequal length), or for a model that was not built alike"
    )


def _difference(requests: Sequence[Request], ranks: Sequence[int]) -> str:
    """The first place at which the details of two requests differ."""
    first = requests[0]
    rank, other = next((rank, request) for rank, request in zip(ranks, requests) if request != first)
    if len(first.detail) != len(other.detail):
        return f"the number of parts: {len(first.detail)} on rank {ranks[0]}, {len(other.detail)} on rank {rank}"
    index = next(index for index, (mine, its) in enumerate(zip(first.detail, other.detail)) if mine != its)
    return f"part {index}: {first.detail[index]} on rank {ranks[0]}, {other.detail[index]} on rank {rank}"

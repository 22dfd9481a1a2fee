"""How a reduce-scatter becomes all-reduces where the backend has none: a pure function of the segments' sizes.

A large segment is reduced where it lies, so a gradient is never copied.  Small segments are packed into one buffer, and
so is everything that has to be cast to be summed right, in rounds of bounded size.  Every rank sums everything and
keeps its own interval; at two ranks that moves what a ring would, and measured faster than a reduce to each owner.

    segments     |-- 0: large --|1|2|-- 3: large --|4|          own interval of rank 1 of 2:  [....)
    rounds       [      0      ]    [      3      ]  [1 2 4]    packed parts that are owned are copied out
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["IN_PLACE", "LIMIT", "SMALL", "Owned", "Part", "ReductionPlan", "Round", "plan_reduction"]

SMALL = 1 << 14  # elements up to which a copy costs less than one more message
LIMIT = 1 << 22  # elements of a packed round: bounds the memory beside the segments
IN_PLACE = -1  # instead of an offset


class Part(NamedTuple):
    """A stretch of one segment."""

    segment: int
    start: int  # counted inside the segment
    stop: int


class Round(NamedTuple):
    """One all-reduce."""

    parts: tuple[Part, ...]
    numel: int
    in_place: bool  # of the one part's own memory; otherwise the parts are packed, in order
    own_start: int = 0  # of a packed round: the interval of it that this rank keeps
    own_stop: int = 0


class Owned(NamedTuple):
    """A stretch of one segment that lies in this rank's interval."""

    segment: int
    start: int
    stop: int
    offset: int  # in the buffer of what this rank keeps of packed rounds; IN_PLACE: the segment itself holds it


class ReductionPlan(NamedTuple):
    """All rounds of one reduce-scatter, and what of their results this rank keeps."""

    rounds: tuple[Round, ...]
    owned: tuple[Owned, ...]
    kept_numel: int  # elements kept of all packed rounds together, in their order


@functools.lru_cache(maxsize=1024)
def plan_reduction(
    sizes: tuple[int, ...], own_start: int, own_stop: int, pack_all: bool, limit: int = LIMIT
) -> ReductionPlan:
    """Plan it for the rank that owns ``[own_start, own_stop)`` of the concatenated segments of ``sizes``.

    ``pack_all``: no segment can be reduced in place, as when it has to be cast.  Which rounds there are, and their
    sizes, depends on ``sizes`` and ``pack_all`` alone, so it is equal on every rank.
    """
    in_place = [size > SMALL and not pack_all for size in sizes]
    begins = [0, *itertools.accumulate(sizes)]
    packed_begins = [0, *itertools.accumulate(0 if whole else size for size, whole in zip(sizes, in_place))]

    def packed_before(position: int) -> int:
        """Elements of the packed segments that lie before ``position`` of the concatenation."""
        index = min(bisect.bisect_right(begins, position), len(sizes)) - 1
        return packed_begins[index] + (0 if in_place[index] else min(position - begins[index], sizes[index]))

    kept_start, kept_stop = (packed_before(bound) for bound in (own_start, own_stop)) if sizes else (0, 0)
    rounds = [Round((Part(index, 0, size),), size, True) for index, size in enumerate(sizes) if in_place[index]]
    done = 0
    for parts in _cut([(index, size) for index, size in enumerate(sizes) if not in_place[index]], limit):
        numel = sum(part.stop - part.start for part in parts)
        keep_from, keep_to = (min(max(bound - done, 0), numel) for bound in (kept_start, kept_stop))
        rounds.append(Round(tuple(parts), numel, False, keep_from, keep_to))
        done += numel

    owned = []
    for index, (begin, size) in enumerate(zip(begins, sizes)):
        start, stop = (min(max(bound - begin, 0), size) for bound in (own_start, own_stop))
        if start < stop:
            offset = IN_PLACE if in_place[index] else packed_begins[index] + start - kept_start
            owned.append(Owned(index, start, stop, offset))
    return ReductionPlan(tuple(rounds), tuple(owned), kept_stop - kept_start)


def _cut(segments: Sequence[tuple[int, int]], limit: int) -> Iterator[list[Part]]:
    """Stretches of the ``(index, size)`` segments, in order, in lists of ``limit`` elements and a rest."""
    parts: list[Part] = []
    room = limit
    for index, size in segments:
        start = 0
        while start < size:
            stop = min(size, start + room)
            parts.append(Part(index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield parts
                parts, room = [], limit
    if parts:
        yield parts

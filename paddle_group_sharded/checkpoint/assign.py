"""Who writes what: every rank says what it holds, and each interval is written once.  Plain values; no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import UsageError
from .manifest import Key, key_text, tiling_problem

__all__ = ["Offer", "assign"]


class Offer(NamedTuple):
    """An interval of a tensor that one rank holds."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    start: int  # first element, counted inside the whole tensor
    stop: int
    size: int  # bytes
    checksum: int = 0  # of all of its bytes, or of a few; replicas with other values have another one
    own: bool = False  # ranks are expected to hold different values


def assign(offers: Sequence[Sequence[Offer]]) -> list[list[int]]:
    """For each rank, the numbers of those of its ``offers`` that it writes; the same on every rank.

    An interval that several ranks hold goes to the one that has least to write so far; if they hold different values of
    it, that of the first one counts.  Raises :class:`UsageError`
    where ranks hold tensors of one name that differ in shape, or where nobody holds some of the elements.
    """
    holders: dict[Key, dict[tuple[int, int], list[tuple[int, int]]]] = {}
    first: dict[Key, tuple[int, Offer]] = {}
    for rank, held in enumerate(offers):
        for number, offer in enumerate(held):
            other_rank, other = first.setdefault(offer.key, (rank, offer))
            if (offer.dtype, offer.shape) != (other.dtype, other.shape):
                raise UsageError(
                    f"{key_text(offer.key)} is {other.dtype} {list(other.shape)} on rank {other_rank} and "
                    f"{offer.dtype} {list(offer.shape)} on rank {rank}; give tensors that differ different names"
                )
            holders.setdefault(offer.key, {}).setdefault((offer.start, offer.stop), []).append((rank, number))
    chosen: list[list[int]] = [[] for _ in offers]
    load = [0] * len(offers)
    choices: list[list[tuple[int, int]]] = []
    for key, intervals in holders.items():
        filled = sorted(interval for interval in intervals if interval[0] < interval[1])
        shape = list(first[key][1].shape)
        problem = tiling_problem(math.prod(shape), filled)
        if problem:
            raise UsageError(f"{key_text(key)} {shape} is not whole on the ranks together: {problem}")
        choices += [intervals[interval] for interval in filled]
    # Those without a choice first, so that the others even out; then large before small.
    choices.sort(key=lambda ranks: (len(ranks) > 1, -offers[ranks[0][0]][ranks[0][1]].size))
    for candidates in choices:
        alike = len({offers[rank][number].checksum for rank, number in candidates}) == 1
        own = any(offers[rank][number].own for rank, number in candidates)
        if alike and not own:
            rank, number = min(candidates, key=lambda candidate: (load[candidate[0]], candidate))
        else:
            rank, number = candidates[0]
        chosen[rank].append(number)
        load[rank] += offers[rank][number].size
    return [sorted(numbers) for numbers in chosen]

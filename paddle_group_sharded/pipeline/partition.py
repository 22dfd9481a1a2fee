"""The arithmetic of cutting a list of weights into contiguous parts."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import Union

__all__ = ["Number", "best_cuts", "even_sizes"]

Number = Union[int, float, Fraction]


def even_sizes(count: int, num_parts: int) -> list[int]:
    """Sizes that differ by one at most, the larger ones last: 10 in 4 parts are 2, 2, 3, 3."""
    size, larger = divmod(count, num_parts)
    return [size + (part >= num_parts - larger) for part in range(num_parts)]


def best_cuts(weights: Sequence[Number], num_parts: int) -> tuple[int, ...]:
    """Bounds ``(0, ..., len(weights))`` of the best contiguous split into ``num_parts`` parts that are not empty.

    The heaviest part is as light as any such split allows.  Among the splits that reach this, the one with the
    smallest sum of squared part weights is taken, then of squared part lengths, then the one with the longer parts
    last; so equal weights give :func:`even_sizes`.  Exact: floats are taken for the fractions that they are.

    ``weights`` are finite and not negative, and there are at least ``num_parts`` of them.
    """
    whole = _as_integers(weights)
    limit = _smallest_limit(whole, num_parts)
    sums = [0]
    for weight in whole:
        sums.append(sums[-1] + weight)
    count = len(whole)
    scale = count * count + 1  # makes one number of (squared weight, squared length), the first deciding

    # cost[stop] is that of the best split of weights[:stop] into the parts so far; cuts remembers where the last began
    cost: dict[int, int] = {0: 0}
    cuts: list[dict[int, int]] = []
    for part in range(1, num_parts + 1):
        best: dict[int, int] = {}
        cut: dict[int, int] = {}
        for stop in range(part, count - (num_parts - part) + 1):
            for start in range(stop - 1, part - 2, -1):
                weight = sums[stop] - sums[start]
                if weight > limit:
                    break
                if start not in cost:
                    continue
                total = cost[start] + weight * weight * scale + (stop - start) ** 2
                if stop not in best or total <= best[stop]:  # at equal cost the longer last part, found later, wins
                    best[stop], cut[stop] = total, start
        cost = best
        cuts.append(cut)

    bounds = [count]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return tuple(reversed(bounds))


def _as_integers(weights: Sequence[Number]) -> list[int]:
    """The weights times their common denominator."""
    exact = [Fraction(weight) for weight in weights]
    denominator = lcm(*(weight.denominator for weight in exact))
    return [int(weight * denominator) for weight in exact]


def _smallest_limit(weights: Sequence[int], num_parts: int) -> int:
    """The smallest limit such that ``num_parts`` parts can hold the weights in order, by bisection."""
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if _parts_needed(weights, middle) <= num_parts:
            high = middle
        else:
            low = middle + 1
    return low


def _parts_needed(weights: Sequence[int], limit: int) -> int:
    """Parts that filling each one up to ``limit`` takes; fewer than asked for can always be cut further."""
    parts, filled = 1, 0
    for weight in weights:
        if filled + weight > limit:
            parts, filled = parts + 1, 0
        filled += weight
    return parts

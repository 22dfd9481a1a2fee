from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_group_sharded.pipeline.partition import best_cuts, even_sizes

weights = st.lists(
    st.integers(0, 9) | st.fractions(0, 5, max_denominator=7) | st.floats(0, 1e6, allow_nan=False),
    min_size=1,
    max_size=9,
)


def every_split(count: int, num_parts: int) -> list[tuple[int, ...]]:
    return [(0, *inner, count) for inner in combinations(range(1, count), num_parts - 1)]


@given(weights, st.data())
def test_no_split_is_better(weights: list[float], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(weights)))
    exact = [Fraction(weight) for weight in weights]

    def badness(bounds: tuple[int, ...]) -> tuple[Fraction, Fraction, int]:
        parts = [exact[a:b] for a, b in zip(bounds, bounds[1:])]
        return max(map(sum, parts)), sum(sum(p) ** 2 for p in parts), sum(len(p) ** 2 for p in parts)

    bounds = best_cuts(weights, num_parts)
    assert len(bounds) == num_parts + 1
    assert badness(bounds) == min(map(badness, every_split(len(weights), num_parts)))


@given(st.integers(1, 40), st.data())
def test_equal_weights_give_even_sizes_with_the_larger_last(count: int, data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, count))
    bounds = best_cuts([3] * count, num_parts)
    sizes = [b - a for a, b in zip(bounds, bounds[1:])]
    assert sizes == even_sizes(count, num_parts) == sorted(sizes)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("count", "parts", "sizes"), [(10, 4, [2, 2, 3, 3]), (15, 2, [7, 8]), (8, 8, [1] * 8)])
def test_even_sizes(count: int, parts: int, sizes: list[int]) -> None:
    assert even_sizes(count, parts) == sizes


def test_huge_and_tiny_weights_are_exact() -> None:
    assert best_cuts([1e300, 1e-300, 1e-300, 1e300], 2) == (0, 2, 4)

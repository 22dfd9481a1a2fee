"""Buffers of a step, moment by moment, on groups small enough to count by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_group_sharded.sharding.layout import GroupLayout
from paddle_group_sharded.sharding.replay import (
    BackwardPeak,
    Kind,
    Limits,
    Moment,
    ReducedGroup,
    assumed_moments,
    gathers,
    replay,
)

BLOCK = 160 * 160  # elements of a parameter that is large enough to be reduced by itself
LIMITS = Limits(in_flight=2, idle=2)


def one_each(count: int, world_size: int = 2) -> list[ReducedGroup]:
    """Groups of one large float32 parameter."""
    return [ReducedGroup(GroupLayout.pack([(f"p{i}", (BLOCK,))], world_size), (i,), 4, True) for i in range(count)]


def in_blocks(found: BackwardPeak) -> tuple[float, float]:
    return found.total / (4 * BLOCK), found.buffers / (4 * BLOCK)


def test_moments_of_layers_that_run_once() -> None:
    moments = assumed_moments([10, 30, 60], [(0, 1), (2,)], 1000)
    assert moments == (
        Moment(Kind.GATHER, 0, 0),
        Moment(Kind.RELEASE, 0, 400),
        Moment(Kind.GATHER, 1, 400),
        Moment(Kind.NOTE, 0, 1000),
        Moment(Kind.GRAD, 2, 1000),
        Moment(Kind.RELEASE, 1, 400),
        Moment(Kind.GATHER, 0, 400),
        Moment(Kind.GRAD, 1, 400),
        Moment(Kind.GRAD, 0, 100),
        Moment(Kind.RELEASE, 0, 0),
        Moment(Kind.NOTE, 0, 0),
    )


def test_frozen_parameters_are_gathered_but_have_no_gradient() -> None:
    moments = assumed_moments([10, 0, 10], [(0,), (1,), (2,)], 0)
    assert [m.number for m in moments if m.kind is Kind.GATHER] == [0, 1, 2, 1, 0]
    assert [m.number for m in moments if m.kind is Kind.GRAD] == [2, 0]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_gradients_that_stay_until_the_step(count: int) -> None:
    moments = assumed_moments([BLOCK] * count, [], 0)
    assert in_blocks(replay(moments, (), one_each(count), [4 * BLOCK] * count, False, LIMITS)) == (count, count)


@pytest.mark.parametrize(("count", "most"), [(1, 1), (2, 2), (3, 3), (4, 3), (9, 3)])
def test_gradients_in_flight(count: int, most: int) -> None:
    """Two under reduction and the one that has just come."""
    moments = assumed_moments([BLOCK] * count, [], 0)
    assert in_blocks(replay(moments, (), one_each(count), [4 * BLOCK] * count, True, LIMITS)) == (most, most)


@pytest.mark.parametrize(("count", "most"), [(1, 2), (2, 4), (3, 5), (4, 5), (9, 5)])
def test_gathered_groups(count: int, most: int) -> None:
    """Beside those one group in use and one fetched ahead, which take turns with two buffers."""
    moments = assumed_moments([BLOCK] * count, [(i,) for i in range(count)], 0)
    found = replay(moments, [4 * BLOCK] * count, one_each(count), [4 * BLOCK] * count, True, LIMITS)
    assert in_blocks(found) == (most, most)


def test_buffers_of_other_sizes_cannot_be_used_again() -> None:
    moments = [Moment(kind, number, 0) for number in range(5) for kind in (Kind.GATHER, Kind.RELEASE)]
    sizes = [1, 2, 4, 8, 16]
    two_idle_one_used_one_ahead = 2 + 4 + 8 + 16
    assert replay(moments, sizes, (), (), True, Limits(2, idle=2)).total == two_idle_one_used_one_ahead
    assert replay(moments, sizes, (), (), True, Limits(2, idle=0)).total == 8 + 16
    assert replay(moments, [8] * 5, (), (), True, Limits(2, idle=2)).total == 16


@pytest.mark.parametrize(
    ("used", "gathered"),
    [
        ([0], [0]),
        ([0, 1, 0], [0, 1]),
        ([0, 1, 2, 1, 0], [0, 1, 2, 0]),
        ([0, 1, 0, 1], [0, 1]),
        ([0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2]),
    ],
)
def test_what_is_needed_right_after_the_next_group_is_kept(used: list[int], gathered: list[int]) -> None:
    """Each is released when the next one is needed: how one gather serves both where two buffers are enough."""
    moments = []
    for before, number in zip([None, *used], used):
        moments += [] if before is None else [Moment(Kind.RELEASE, before, 0)]
        moments.append(Moment(Kind.GATHER, number, 0))
    assert gathers(moments) == gathered
    assert replay(moments, [8] * 3, (), (), True, Limits(2, idle=0)).total == 8 * min(2, len(set(used)))


def test_what_is_gathered_twice_in_a_row_is_not_fetched_twice() -> None:
    """A head that reads the embedding's weight again: it stays until its last gradient."""
    moments = [
        Moment(Kind.GATHER, 0, 0),
        Moment(Kind.RELEASE, 0, 0),
        Moment(Kind.GATHER, 1, 0),
        Moment(Kind.RELEASE, 1, 0),
        Moment(Kind.GATHER, 0, 0),
        Moment(Kind.GATHER, 1, 0),
        Moment(Kind.RELEASE, 1, 0),
        Moment(Kind.RELEASE, 0, 0),
    ]
    assert replay(moments, [10, 3], (), (), True, LIMITS).total == 13


def test_small_neighbours_are_packed_into_a_copy() -> None:
    layout = GroupLayout.pack([("a", (24,)), ("b", (8,))], 2)  # 24 elements, a gap of 8, and 8 elements
    group = ReducedGroup(layout, (0, 1), 4, True)
    moments = assumed_moments([24, 8], [], 0)
    found = replay(moments, (), [group], [96, 32], True, LIMITS)
    assert (group.grad_bytes, group.packing_bytes) == (160, 160)
    assert found.total == 96 + 32 + 160


def test_activations_and_buffers_at_one_moment() -> None:
    """Activations are most when there is no gradient yet."""
    moments = assumed_moments([BLOCK] * 4, [], 400)
    found = replay(moments, (), one_each(4), [100] * 4, False, LIMITS)
    assert (found.total, found.buffers, found.left) == (500, 400, 0)


def test_a_group_that_backward_does_not_complete_waits() -> None:
    moments = [Moment(Kind.GRAD, 0, 0), Moment(Kind.GRAD, 2, 0)]
    groups = [ReducedGroup(GroupLayout.pack([("a", (BLOCK,)), ("b", (BLOCK,))], 2), (0, 1), 4, True)]
    found = replay(moments, (), groups, [4 * BLOCK, 0, 4 * BLOCK], True, LIMITS)
    assert in_blocks(found) == (2, 2)  # parameter 2 is in no group: nobody takes its gradient either


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(0, 1000))
def test_bounds(numels: list[int], activations: int) -> None:
    sharded = [(index,) for index in range(len(numels))]
    moments = assumed_moments(numels, sharded, activations)
    assert sum(moment.kind is Kind.GATHER for moment in moments) == 2 * len(numels) - 1
    assert len(gathers(moments)) == max(1, 2 * len(numels) - 2)
    sizes = [4 * numel for numel in numels]
    groups = [ReducedGroup(GroupLayout.pack([("p", (numel,))], 2), (i,), 4, True) for i, numel in enumerate(numels)]
    whole = replay(moments, (), groups, sizes, False, LIMITS)
    small = replay(moments, sizes, groups, sizes, True, LIMITS)
    assert sum(sizes) <= whole.total <= sum(sizes) + activations
    assert max(sizes) <= small.buffers <= 7 * max(sizes)
    assert small.total <= small.buffers + activations

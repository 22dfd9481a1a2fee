"""The plan of a reduce-scatter, checked by executing it on lists of positions."""

from __future__ import annotations

import itertools
import random

import pytest

from paddle_group_sharded.comm import reduction
from paddle_group_sharded.comm.reduction import IN_PLACE, plan_reduction


@pytest.fixture(autouse=True)
def small_is_five(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "SMALL", 5)
    plan_reduction.cache_clear()


def cases() -> list[tuple[tuple[int, ...], int, int, bool, int]]:
    rng = random.Random(0)
    return [
        (
            tuple(rng.choice([0, 1, 2, 3, 7, 9, 20]) for _ in range(rng.randint(0, 7))),
            rng.randint(0, 5),
            rng.randint(1, 4),
            rng.random() < 0.5,
            rng.choice([4, 7, 1000]),
        )
        for _ in range(2000)
    ]


def test_every_element_is_reduced_once_and_kept_by_its_owner() -> None:
    for sizes, padding, world_size, pack_all, limit in cases():
        bounds = [0, *itertools.accumulate(sizes)]
        segments = [list(range(start, stop)) for start, stop in zip(bounds, bounds[1:])]
        numel = -(-(sum(sizes) + padding) // world_size) * world_size
        share = numel // world_size
        for rank in range(world_size):
            plan = plan_reduction(sizes, rank * share, (rank + 1) * share, pack_all, limit)
            reduced, kept = [], []
            for step in plan.rounds:
                buffer = [x for part in step.parts for x in segments[part.segment][part.start : part.stop]]
                assert len(buffer) == step.numel
                assert step.in_place or step.numel <= limit
                reduced += buffer
                kept += [] if step.in_place else buffer[step.own_start : step.own_stop]
            assert sorted(reduced) == list(range(sum(sizes)))
            assert len(kept) == plan.kept_numel
            owned = []
            for segment, start, stop, offset in plan.owned:
                value = segments[segment][start:stop]
                if offset != IN_PLACE:
                    assert kept[offset : offset + stop - start] == value
                owned += value
            assert owned == list(range(sum(sizes)))[rank * share : (rank + 1) * share]


def test_rounds_are_alike_on_every_rank() -> None:
    for sizes, padding, world_size, pack_all, limit in cases()[:500]:
        share = -(-(sum(sizes) + padding) // world_size)
        plans = [plan_reduction(sizes, r * share, (r + 1) * share, pack_all, limit) for r in range(world_size)]
        assert len({tuple((s.parts, s.numel, s.in_place) for s in plan.rounds) for plan in plans}) == 1


def test_large_segments_stay_where_they_are_and_small_ones_share_a_round() -> None:
    plan = plan_reduction((100, 3, 4, 100, 2), 0, 209, False)
    assert [(step.in_place, [part.segment for part in step.parts]) for step in plan.rounds] == [
        (True, [0]),
        (True, [3]),
        (False, [1, 2, 4]),
    ]


def test_what_has_to_be_cast_is_packed_in_bounded_rounds() -> None:
    plan = plan_reduction((10, 1), 0, 11, True, limit=4)
    assert [step.parts for step in plan.rounds] == [((0, 0, 4),), ((0, 4, 8),), ((0, 8, 10), (1, 0, 1))]

"""The arguments of group_sharded_parallel: groups, replicas, buffers, buckets, what stays whole, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from unittests.harness import Ranks

WORKER = "unittests.sharding.dygraph_arguments"
LEVELS = ["os", "os_g", "p_g_os"]

GRID: list[dict[str, Any]] = [
    {"buffer_max_size": 1},
    {"buffer_max_size": 33},
    {"buffer_max_size": 2**40},
    {"segment_size": 30, "sync_comm": True},
    {"segment_size": 2**40},
    {"exclude_layer": ["Linear"], "offload": True},
    {"offload": True},
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_numbers_do_not_depend_on_them(ranks: Ranks, world_size: int) -> None:
    grid = GRID if world_size == 2 else GRID[1::2]
    for rows in ranks(world_size).run(WORKER, "differences", grid, LEVELS, timeout=150):
        for arguments, row in zip(grid, rows):
            for level, difference in row.items():
                assert difference <= (0.0 if world_size == 2 else 1e-6), (arguments, level)


@pytest.mark.parametrize("level", LEVELS)
def test_group_of_some_ranks(ranks: Ranks, level: str) -> None:
    first, other, third = ranks(3).run(WORKER, "subgroup_training", [[0, 2]], level)
    assert other is None
    assert first[0] == third[0] == 0.0
    assert first[1] == third[1]


@pytest.mark.parametrize("level", LEVELS)
def test_two_groups_at_once(ranks: Ranks, level: str) -> None:
    results = ranks(4).run(WORKER, "subgroup_training", [[0, 1], [2, 3]], level)
    assert [distance for distance, _ in results] == [0.0] * 4
    sums = [total for _, total in results]
    assert sums[0] == sums[1] != sums[2] == sums[3]


SQUARE = ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
COLUMN = ([[0], [1]], [[0, 1]])  # G8: each rank alone in its sharding group


@pytest.mark.parametrize(("world_size", "shape"), [(4, SQUARE), (2, COLUMN)], ids=["2x2", "1x2"])
def test_replicas(ranks: Ranks, world_size: int, shape: Any) -> None:
    """Averaged over both groups, clipped by the norm of the whole, branches that differ between replicas too."""
    for by_program in ranks(world_size).run(WORKER, "grid", ["bsz", "d(d)sn"], *shape, timeout=170):
        for program, by_level in by_program.items():
            for level, difference in by_level.items():
                assert difference <= 1e-6, (program, level)


def test_replicas_share_the_overflow(ranks: Ranks) -> None:
    cases = [
        {"poison": {1: (3, 0, 0, float("inf")), 3: (0, 2, 4, float("nan"))}, "way": "step", "steps": 6},
        {"poison": {2: (2, 0, 0, float("inf"))}, "way": "minimize", "steps": 6, "clip": "global"},
    ]
    cases = [{"count": 3, "size": 5, "init_loss_scaling": 64.0, **case} for case in cases]
    for rows in ranks(4).run(WORKER, "grid_scaler", *SQUARE, cases, timeout=120):
        for case, row in zip(cases, rows):
            for level in LEVELS:
                same, distance, counts = row[level]
                assert same and distance <= 1e-6, (case, level, distance)
                assert counts[-1] == (len(case["poison"]),) * 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sync_buffers(ranks: Ranks, world_size: int) -> None:
    """Each rank's running statistics are its own, or begin every forward as those of rank 0."""
    for by_sync in ranks(world_size).run(WORKER, "buffers", timeout=120):
        for sync, by_level in by_sync.items():
            for level, difference in by_level.items():
                assert difference <= (0.0 if world_size <= 2 else 1e-6), (sync, level)


@pytest.mark.parametrize(
    ("which", "arguments", "whole"),
    [
        ("none", {}, 0),
        ("class", {}, 6),
        ("id", {}, 110 + 6),
        ("both", {}, 90 + 6),
        ("", {"segment_size": 10}, 10 + 10 + 6),
        ("", {"segment_size": 9}, 6),
        ("", {"segment_size": 99}, 206 - 100),
        ("", {"segment_size": 100}, 206),
    ],
)
def test_what_stays_whole(ranks: Ranks, which: str, arguments: dict[str, Any], whole: int) -> None:
    """Elements of excluded layers and of small parameters, the limit included."""
    for found in ranks(2).run(WORKER, "whole_bytes", which, **arguments):
        assert found["whole"] == 4 * 206
        assert found["stay"] == whole
        gaps = found["kept"] - 4 * (whole + (206 - whole) // 2)  # slots and shards end at multiples of 16 elements
        assert 0 <= gaps < 4 * 16 * (6 + found["groups"])


@pytest.mark.parametrize("level", LEVELS)
def test_sparse_gradients_are_refused(ranks: Ranks, level: str) -> None:
    for layer, call in ranks(2).run(WORKER, "sparse", level):
        assert "sparse=True" in layer
        assert "sparse gradient" in call and "'weight'" in call and "sparse=False" in call


@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
def test_unequal_passes_are_an_error(ranks: Ranks, level: str) -> None:
    """H5: within seconds, on every rank, naming both ranks and both operations."""
    for message, seconds in ranks(2).run(WORKER, "unequal", level):
        assert "rank 0 asks for" in message and "rank 1 asks for" in message
        assert seconds < 20

"""GradScaler over sharded gradients: Paddle's own on averaged gradients is the reference, in every state."""

from __future__ import annotations

from typing import Any

import pytest

from unittests.harness import Ranks

WORKER = "unittests.sharding.dygraph_scaler"
INF, NAN = float("inf"), float("nan")
TOLERANCE = {1: 1e-6, 2: 1e-6, 3: 1e-6, 4: 1e-6}
GROWTH = {"init_loss_scaling": 1024.0, "incr_every_n_steps": 2, "decr_every_n_nan_or_inf": 1}


def cases(world_size: int) -> list[dict[str, Any]]:
    last = world_size - 1
    spread = {
        1: (0, 0, 0, INF),  # in the first rank's slice, from the first rank
        4: (last, 2, 4, -INF),  # in the last rank's slice
        5: (last, 0, 0, NAN),  # in another rank's slice than the one it comes from
        8: (0, 2, 4, NAN),
    }
    base = {"count": 3, "size": 5, **GROWTH}
    return [
        {"poison": {}, "way": "step", **base},
        *({"poison": spread, "way": way, **base} for way in ("step", "minimize", "unscale")),
        {"poison": spread, "way": "step", "passes": 3, **base},
        {"poison": spread, "way": "unscale", "clip": "global", **base},
        {"poison": spread, "way": "step", "clip": "norm", **base},
        # F3: ranks that own nothing, and fewer parameters than ranks
        {"poison": {2: (last, 0, 0, INF)}, "way": "step", "count": 1, "size": 1, **GROWTH},
        {"poison": {0: (0, 1, 0, NAN)}, "way": "minimize", "count": 2, "size": 1, **GROWTH},
        # the scale stays, or falls after two bad steps
        {"poison": spread, "way": "step", "count": 3, "size": 5, "use_dynamic_loss_scaling": False},
        {"poison": spread, "way": "step", **base, "decr_every_n_nan_or_inf": 2, "decr_ratio": 0.25, "incr_ratio": 4.0},
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_paddles_scaler(ranks: Ranks, world_size: int) -> None:
    """F1, F3, F8: scale, counters, weights and states after every step."""
    chosen = cases(world_size)
    if world_size != 2:
        chosen = chosen[3:5] + chosen[7:9]
    by_rank = ranks(world_size).run(WORKER, "parity", chosen, timeout=150)
    for rank, rows in enumerate(by_rank):
        for case, row in zip(chosen, rows):
            for level in ("os", "os_g", "p_g_os"):
                same, distance, counts = row[level]
                assert same, f"rank {rank}, {level}, {case}: the scale or its counters differ"
                assert distance <= 1e-6, f"rank {rank}, {level}, {case}: {distance}"
                skipped = [sum(step <= now for step in case["poison"]) for now in range(10)]
                assert counts == [(number, number) for number in skipped]


def test_the_scale_moves(ranks: Ranks) -> None:
    """The reference itself: grows every second good step, is halved by a bad one."""
    case = {"poison": {4: (0, 0, 0, INF)}, "way": "step", "count": 1, "size": 1, **GROWTH}
    row = ranks(1).run(WORKER, "parity", [case])
    assert row[0][0]["scales"] == [1024.0 * factor for factor in (1, 2, 2, 4, 2, 2, 4, 4, 8, 8)]


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_a_scaler_that_was_not_passed_is_refused(ranks: Ranks, level: str) -> None:
    for messages in ranks(2).run(WORKER, "not_passed", level):
        assert len(messages) == 2
        assert all("group_sharded_parallel(scaler=...)" in message for message in messages)


def test_an_optimizer_that_is_not_sharded_is_refused(ranks: Ranks) -> None:
    for message in ranks(2).run(WORKER, "wrong_optimizer"):
        assert "expected the optimizer that group_sharded_parallel returned, got AdamW" in message


def test_unscale_at_the_wrong_time(ranks: Ranks) -> None:
    for again, stepped, after, stepped_again in ranks(2).run(WORKER, "twice"):
        assert "unscale_() was already called" in again
        assert stepped == ""
        assert "unscale_() was already called, or step() was" in after
        assert stepped_again != ""


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_disabled(ranks: Ranks, level: str) -> None:
    for enabled, distance in ranks(2).run(WORKER, "disabled", level):
        assert not enabled
        assert distance == 0.0


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_persistent_overflow_is_counted_and_logged(ranks: Ranks, level: str) -> None:
    """F6: each skip is logged on each rank; nothing grows; the scale falls as Paddle says."""
    for lines, skipped, kept, scale in ranks(2).run(WORKER, "persistent", level, steps=12):
        assert skipped == 12
        assert [line for line in lines if "step skipped" in line and "(12 skipped so far)" in line]
        assert len([line for line in lines if "step skipped" in line]) == 12
        assert len(set(kept[2:])) == 1
        assert scale == 2.0**8


def test_a_users_subclass_stays_one(ranks: Ranks) -> None:
    for updates, is_users, restored in ranks(2).run(WORKER, "subclass"):
        assert (updates, is_users, restored) == (2, True, True)


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_half_precision_sums_do_not_overflow(ranks: Ranks, level: str) -> None:
    """F5: 40960 on each of 2 ranks: the sum overflows float16, the average does not; 1 - 40960 / 2**14 = -1.5."""
    for weight, stepped in ranks(2).run(WORKER, "half", level):
        assert (weight, stepped) == (-1.5, True)

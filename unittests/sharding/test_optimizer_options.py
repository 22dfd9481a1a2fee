"""Parameter groups, options per parameter, schedulers, states before wrapping, and what users read and write."""

from __future__ import annotations

import numpy as np
import pytest

from unittests.harness import Ranks

WORKER = "unittests.sharding.dygraph_optimizer_options"
TOLERANCE = 1e-6


def check(by_rank: list[dict[str, dict[str, float]]], limit: float) -> None:
    for differences in by_rank:
        assert differences
        for name, by_level in differences.items():
            assert all(value <= limit for value in by_level.values()), (name, by_level)


@pytest.mark.parametrize("part", [0, 1])
def test_options_two_ranks(ranks: Ranks, part: int) -> None:
    check(ranks(2).run(WORKER, "options", ("os", "p_g_os"), part, 2, timeout=150), 0.0)


@pytest.mark.parametrize("part", [0, 1])
def test_options_three_ranks(ranks: Ranks, part: int) -> None:
    check(ranks(3).run(WORKER, "options", ("os_g",), part, 2, timeout=150), TOLERANCE)


def test_every_scheduler(ranks: Ranks) -> None:
    check(ranks(2).run(WORKER, "scheduled", ("os_g",), timeout=150), 0.0)


def test_states_before_wrapping(ranks: Ranks) -> None:
    """D12: the fused variant round-trips; D13: an optimizer without states."""
    check(ranks(2).run(WORKER, "states_before_wrapping", ("os", "p_g_os"), timeout=150), 0.0)


def test_a_state_continues_at_another_level_and_number_of_ranks(ranks: Ranks) -> None:
    [(end, losses)] = ranks(1).run(WORKER, "resumed", "averaged", 0, 12, None)
    past, found = None, []
    for world_size, mode, start in ((2, "p_g_os", 0), (3, "os", 3), (1, "averaged", 6), (4, "os_g", 9)):
        past, part = ranks(world_size).run(WORKER, "resumed", mode, start, start + 3, past)[0]
        found += part
    np.testing.assert_allclose(found, losses, rtol=0, atol=TOLERANCE)
    for expected, actual in zip(end[:2], past[:2]):
        assert list(expected) == list(actual) or set(expected) == set(actual)
        for name, value in expected.items():
            assert value.dtype == actual[name].dtype
            np.testing.assert_allclose(actual[name], value, rtol=0, atol=TOLERANCE, err_msg=name)
    assert end[2] == past[2]


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_unwrap_and_wrap_again(ranks: Ranks, level: str) -> None:
    assert ranks(2).run(WORKER, "continued_after_unwrap", level) == [0.0, 0.0]


def test_what_users_read_and_write(ranks: Ranks) -> None:
    """D2: a scheduler or scaler that checks the class; D9: the parameter groups show the user's parameters."""
    for seen in ranks(2).run(WORKER, "attributes"):
        assert seen["isinstance"] and seen["inner"] and seen["groups"] and seen["list"]
        assert seen["shapes"] == [[8, 13], [13]]
        assert seen["read"] == 0.9 and seen["states"] == {} and seen["names"] == []
        assert seen["written"] == (0.5, "new", 0.25, 0.25, "new")
        assert "not_there" in seen["missing"]

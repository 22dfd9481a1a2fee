"""Whole weights, gradients and states by name; R3, R4, R5 and the rows I3, F9 of user reports."""

from __future__ import annotations

import numpy as np
import pytest

from unittests.harness import Ranks

WORKER = "unittests.sharding.dygraph_views"
LEVELS = ("os", "os_g", "p_g_os")
PLACES = [(1, "p_g_os"), (2, "os"), (2, "os_g"), (2, "p_g_os"), (3, "p_g_os")]
SLACK = 512  # bytes that Python-side scalars of a test may differ by


@pytest.mark.parametrize(("world_size", "level"), PLACES)
def test_gradients(ranks: Ranks, world_size: int, level: str) -> None:
    for seen in ranks(world_size).run(WORKER, "grads", level):
        assert seen["before"] is None
        assert seen["reading"] <= 1e-6 and seen["weights"] <= 1e-6
        assert seen["grown"] <= SLACK
        unknown, wrong_type, wrong_shape = seen["errors"]
        assert unknown.startswith("UsageError: no parameter is called 'nowhere.weight'")
        assert wrong_type.startswith("UsageError: expected a structured name or a parameter")
        assert wrong_shape == "UsageError: gradient of 'inner.weight' [8, 13]: expected shape [8, 13], got [13, 8]"


@pytest.mark.parametrize(("world_size", "level"), PLACES)
def test_states(ranks: Ranks, world_size: int, level: str) -> None:
    limit = 0.0 if world_size < 3 else 1e-6
    for seen in ranks(world_size).run(WORKER, "states", level):
        not_yet, unknown, wrong_shape = seen.pop("errors")
        assert not_yet.startswith("StateError: parameter 'unused.weight' [3, 5] has no optimizer state yet")
        assert unknown.startswith("UsageError: parameter 'out.weight' [13, 8] has no state 'moment7'")
        assert wrong_shape.startswith("UsageError: state ") and wrong_shape.endswith("got [2]")
        assert len(seen) >= 4 and all(value <= limit for value in seen.values()), seen


@pytest.mark.parametrize(("world_size", "level"), [(2, "os"), (3, "p_g_os")])
def test_f9_master_weights(ranks: Ranks, world_size: int, level: str) -> None:
    """F9: with offload, the float32 master follows its slice.  One parameter is smaller than the number of ranks."""
    for seen in ranks(world_size).run(WORKER, "masters", level):
        assert seen["names"] == ["moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc", "master_weight"]
        assert "cast_0.w_0_fp32_master_0_moment1_0" in seen["keys"] and "master_weights" in seen["keys"]
        assert seen["dtypes"] == ["paddle.float32"]
        # The first step of AdamW is the rate itself: 0.99 as float32, which neither 16-bit type holds exactly.
        np.testing.assert_allclose(seen["masters"]["cast_0.w_0"], np.full([8, 5], 0.99), rtol=0, atol=1e-6)
        np.testing.assert_allclose(seen["masters"]["cast_0.w_1"], [0.99], rtol=0, atol=1e-6)
        np.testing.assert_allclose(seen["masters"]["cast_0.w_2"], [0.99], rtol=0, atol=1e-6)
        assert (seen["weight"] == 2.0).all() and (seen["master"] == np.float32(2.001)).all()
        assert seen["single"] == 3.0
        assert (seen["still"] == np.float32(2.001)).all(), "nobody wrote to this weight: its master keeps its digits"


@pytest.mark.parametrize(("world_size", "level"), [*PLACES, (4, "p_g_os")])
def test_gathered(ranks: Ranks, world_size: int, level: str) -> None:
    for seen in ranks(world_size).run(WORKER, "gathered", level):
        error = seen.pop("error")
        assert error.startswith("UsageError: no parameter is called 'nowhere'")
        assert seen.pop("exception") == "KeyError('inside')"
        assert seen.pop("trained on") <= (0.0 if world_size < 3 else 1e-6)
        left = {name: seen.pop(name) for name in list(seen) if name.endswith("left")}
        assert {name: value for name, value in left.items() if value > SLACK} == {}
        assert seen.pop("changed") == ["inner.weight", "tied.weight", "frozen.bias"]
        assert all(seen.values()), seen


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_unwrapped_between_backward_and_step(ranks: Ranks, level: str) -> None:
    for parts in (("once",), ("once", "again")):
        for found in ranks(2).run(WORKER, "unwrapped_between_backward_and_step", level, parts):
            assert found["none alike"] and found["grads"] <= 1e-6 and found["weights"] <= 1e-6, found

"""Models of every kind against paddle.DataParallel on the same batches, at every level."""

from __future__ import annotations

import numpy as np
import pytest

from unittests.harness import Ranks
from unittests.sharding.tolerance import check

WORKER = "unittests.sharding.dygraph_models"

CASES = (
    "OddSizes Tiny FewParameters OneElement NoDimensions NoElements LargeBlocks Tied TiedLarge TiedByLayer AcrossUnits "
    "FrozenTrunk FrozenMiddle FrozenEmbedding PartOptimized Unfreezing EmptyGroup BatchNorm Float64Beside Recurrent "
    "Normed Convolutional Transformer"
).split()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_data_parallel(ranks: Ranks, world_size: int, case: str) -> None:
    if case == "NoElements" and not all(ranks(world_size).run(WORKER, "creates_empty_parameters")):
        pytest.skip("Paddle 2.6 refuses parameters without elements")
    check(ranks(world_size).run(WORKER, "parity", case), world_size)


LEVELS = ("os", "os_g", "p_g_os")


@pytest.mark.parametrize("world_size", [1, 4])
def test_selection_on_one_and_four_ranks(ranks: Ranks, world_size: int) -> None:
    for case in ("Tiny", "FewParameters", "OneElement", "NoDimensions", "TiedLarge", "FrozenMiddle", "Unfreezing"):
        check(ranks(world_size).run(WORKER, "parity", case), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_nothing_trainable(ranks: Ranks, world_size: int) -> None:
    """A2, C6"""
    for level in LEVELS:
        for result in ranks(world_size).run(WORKER, "nothing_trainable", level):
            for name, value in result["before"].items():
                np.testing.assert_array_equal(result["after"][name], value)


@pytest.mark.parametrize("level", LEVELS)
def test_bfloat16_beside_float32(ranks: Ranks, level: str) -> None:
    """B8: the float32 master follows a float32 run that rounds where it computes, up to the rounding of gradients."""
    reference = ranks(2).run(WORKER, "mixed_precision", None, steps=10)
    for expected, found in zip(reference, ranks(2).run(WORKER, "mixed_precision", level, steps=10)):
        assert found["dtypes"]["weight"] == "paddle.bfloat16" and found["dtypes"]["scale"] == "paddle.float32"
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=0.01)
        np.testing.assert_allclose(found["master"], expected["master"], atol=1e-3)
        for name, value in expected["state"].items():
            np.testing.assert_allclose(found["state"][name], value, atol=4e-3 if name == "weight" else 1e-3)
        one_digit = np.abs(found["master"]).max() * 2.0**-7  # Paddle 3 rounds, 2.6 cuts off
        assert np.abs(found["state"]["weight"] - found["master"]).max() <= one_digit


@pytest.mark.parametrize("level", LEVELS)
def test_masters_survive_a_weight_that_is_read_outside(ranks: Ranks, level: str) -> None:
    """Ten steps of 2**-12, each of which bfloat16 would round away: 1 - 10 / 4096."""
    for result in ranks(2).run(WORKER, "masters_survive_reading", level, steps=10):
        np.testing.assert_array_equal(result["master"], np.full([4, 4], 1 - 10 / 4096, "float32"))
        np.testing.assert_array_equal(result["weight"], np.full([4, 4], 0.99609375, "float32"))


def test_same_bits_in_every_run(ranks: Ranks) -> None:
    """L12: nothing depends on the order of a set; three ranks, where the order of a sum would show."""
    for case in ("TiedLarge", "FrozenMiddle"):
        for level in LEVELS:
            assert all(ranks(3).run(WORKER, "twice", case, level))

"""Passes that differ between ranks and steps, against paddle.DataParallel or averaged gradients, at every level."""

from __future__ import annotations

import numpy as np
import pytest

from unittests.harness import Ranks
from unittests.sharding.tolerance import check

WORKER = "unittests.sharding.dygraph_control_flow"

BRANCHES = "UnusedOnOneRank UnusedOnAll NeverUsed MixtureOfExperts LayerDrop".split()
SINGLE_PASS = (
    "UsedTwice Siamese InputGradient RecomputedWithoutReentrance RecomputedDataParallel ForwardWithoutBackward "
    "BackwardWithoutStep EvalBetween ErrorInForward CaughtInside"
).split()
MANY_PASSES = (
    "TwoForwardsTwoBackwards TwoBranchesTwoBackwards KeptGraph MultiTask MultiTaskSmall Recomputed RecomputedSmall "
    "RecomputedBranches RecomputedBranchesSmall"
).split()


@pytest.mark.parametrize("case", [*BRANCHES, *(f"Wide{case}" for case in BRANCHES), *SINGLE_PASS])
@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_data_parallel(ranks: Ranks, world_size: int, case: str) -> None:
    check(ranks(world_size).run(WORKER, "parity", case), world_size)


@pytest.mark.parametrize("case", MANY_PASSES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_passes_are_summed(ranks: Ranks, world_size: int, case: str) -> None:
    check(ranks(world_size).run(WORKER, "parity", case), world_size, exact=False)


@pytest.mark.parametrize("world_size", [1, 4])
def test_selection_on_one_and_four_ranks(ranks: Ranks, world_size: int) -> None:
    for case in ("WideMixtureOfExperts", "LayerDrop", "UsedTwice", "EvalBetween"):
        check(ranks(world_size).run(WORKER, "parity", case), world_size)
    for case in ("MultiTask", "RecomputedBranches"):
        check(ranks(world_size).run(WORKER, "parity", case), world_size, exact=False)


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_two_models_with_one_graph(ranks: Ranks, level: str) -> None:
    """A generator and a critic, each wrapped, stepped in turn."""
    reference = ranks(2).run(WORKER, "adversarial", None, steps=10)
    for expected, found in zip(reference, ranks(2).run(WORKER, "adversarial", level, steps=10)):
        assert found["losses"] == expected["losses"]
        for model in ("generator", "critic"):
            for name, value in expected[model].items():
                np.testing.assert_array_equal(found[model][name], value, err_msg=f"{model} {name}")

"""Passes that differ between ranks and steps, against paddle.DataParallel or averaged gradients, at every level."""

from __future__ import annotations

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
@pytest.mark.parametrize("world_size", [2])
def test_equals_data_parallel(ranks: Ranks, world_size: int, case: str) -> None:
    check(ranks(world_size).run(WORKER, "parity", case), world_size)


@pytest.mark.parametrize("case", MANY_PASSES)
@pytest.mark.parametrize("world_size", [2])
def test_passes_are_summed(ranks: Ranks, world_size: int, case: str) -> None:
    check(ranks(world_size).run(WORKER, "parity", case), world_size, exact=False)

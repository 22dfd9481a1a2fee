"""Passes that differ between ranks and steps, against paddle.DataParallel or averaged gradients, at every level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unittests.harness import Ranks
from unittests.sharding.tolerance import check

WORKER = "unittests.sharding.dygraph_control_flow"

BRANCHES = "UnusedOnOneRank UnusedOnAll NeverUsed MixtureOfExperts LayerDrop".split()
REPEATED = (
    "UsedTwice Siamese TwoForwardsTwoBackwards TwoBranchesTwoBackwards KeptGraph MultiTask MultiTaskSmall InputGradient"
).split()
RECOMPUTED = (
    "Recomputed RecomputedSmall RecomputedWithoutReentrance RecomputedDataParallel RecomputedBranches "
    "RecomputedBranchesSmall"
).split()
OTHERS = "ForwardWithoutBackward BackwardWithoutStep EvalBetween ErrorInForward CaughtInside".split()
CASES = [*BRANCHES, *(f"Wide{case}" for case in BRANCHES), *REPEATED, *RECOMPUTED, *OTHERS]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(ranks: Ranks, case: str) -> None:
    check(ranks(2).run(WORKER, "parity", case), 2)

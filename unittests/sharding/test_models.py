"""Models of every kind against paddle.DataParallel on the same batches, at every level."""

from __future__ import annotations

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
    check(ranks(world_size).run(WORKER, "parity", case), world_size)

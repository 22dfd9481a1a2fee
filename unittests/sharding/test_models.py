"""Models of every kind against paddle.DataParallel on the same batches, at every level."""

from __future__ import annotations

from typing import Any

import pytest

from unittests.harness import Ranks

WORKER = "unittests.sharding.dygraph_models"
TOLERANCE = {1: 0.0, 2: 0.0, 3: 1e-6, 4: 1e-6}  # two ranks add in one order only

CASES = (
    "OddSizes Tiny FewParameters OneElement NoDimensions NoElements LargeBlocks Tied TiedLarge TiedByLayer AcrossUnits "
    "FrozenTrunk FrozenMiddle FrozenEmbedding PartOptimized Unfreezing EmptyGroup BatchNorm Float64Beside Recurrent "
    "Normed Convolutional Transformer"
).split()


def check(results: list[Any], world_size: int) -> None:
    for rank, by_level in enumerate(results):
        for level, difference in by_level.items():
            assert max(difference) <= TOLERANCE[world_size], f"rank {rank}, {level}: {difference}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_data_parallel(ranks: Ranks, world_size: int, case: str) -> None:
    check(ranks(world_size).run(WORKER, "parity", case), world_size)

"""The log of operations, and the volumes of ring collectives."""

from __future__ import annotations

import pytest

from unittests.harness import Ranks

WORKER = "unittests.comm.dygraph_local"


def expected(world_size: int) -> list[tuple[object, ...]]:
    """What a ring moves out of each rank: passes times numel times (N-1)/N."""
    return [
        ("all_gather", "gather", 8 * world_size, "float32", 8.0 * (world_size - 1), True),
        ("reduce_scatter", "reduce", 12 * world_size, "float32", 12.0 * (world_size - 1), True),
        ("all_reduce", "sum", 10, "float64", 20 * (world_size - 1) / world_size, True),
        ("broadcast", "weights", 4, "int32", 4 * (world_size - 1) / world_size, True),
        ("exchange", "hello", 0, "", 0, True),
        ("barrier", "end", 0, "", 0, True),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_operation_is_logged_with_its_volume(ranks: Ranks, world_size: int) -> None:
    for result in ranks(world_size).run(WORKER, "recorded"):
        assert result["log"] == expected(world_size)
        assert result["after"] == [("barrier", "after", 0, "", 0, True)]


def test_native_operations_are_logged_alike(ranks: Ranks) -> None:
    for result in ranks(2).run(WORKER, "recorded", native=True):
        assert result["log"] == [record for record in expected(2) if record[0] != "reduce_scatter"]

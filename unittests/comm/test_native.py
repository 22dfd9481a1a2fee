"""The accelerators' communicator: its arguments and arithmetic only, with gloo below it."""

from __future__ import annotations

import numpy as np
import pytest

from unittests.comm.inputs import summed
from unittests.harness import Ranks

WORKER = "unittests.comm.dygraph_local"


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_calls_over_gloo(ranks: Ranks, world_size: int) -> None:
    flat = np.concatenate([summed(world_size, 6), np.zeros(5), summed(world_size, 1)])
    share = 12 // world_size
    for rank, result in enumerate(ranks(world_size).run(WORKER, "native_calls")):
        np.testing.assert_array_equal(result["full"], np.repeat(np.arange(world_size), 3))
        begins = {0: 0, 1: 6, 2: 11, 3: 11}
        position = rank * share
        for segment, start, value in result["overlaps"]:
            assert begins[segment] + start == position
            np.testing.assert_array_equal(value, flat[position : position + value.size])
            position += value.size
        assert position == (rank + 1) * share
        segment, start, value = result["whole"]
        assert (segment, start) == (0, rank * share)
        np.testing.assert_array_equal(value, summed(world_size, 12)[rank * share : (rank + 1) * share])
        assert result["zeros"] == [0]
        total, largest, source = result["values"]
        np.testing.assert_array_equal(total, np.full(2, sum(range(world_size))))
        np.testing.assert_array_equal(largest, np.full(2, world_size - 1))
        np.testing.assert_array_equal(source, np.full(2, world_size - 1))
        assert result["exchanged"] == [{"rank": each} for each in range(world_size)]

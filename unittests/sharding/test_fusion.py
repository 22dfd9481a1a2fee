"""Small neighbouring pieces are stepped as one: how many kernels run, and that nobody can tell from the numbers."""

from __future__ import annotations

import pytest

from unittests.harness import Ranks

WORKER = "unittests.sharding.dygraph_fusion"
OPTIMIZERS = "unittests.sharding.dygraph_optimizers"


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_kernels_and_results(ranks: Ranks, level: str) -> None:
    """Of 20 layers with 2 parameters each, 20 or 21 pieces lie on a rank."""
    for results in ranks(2).run(WORKER, "grid", level, timeout=120):
        assert results["AdamW alike"]["kernels"] == [1, 1, 1, 1, 1, 1]
        assert results["AdamW decays by name"]["kernels"][0] >= 10  # weights and biases alternate
        assert results["AdamW one parameter has its own rate"]["kernels"][0] in (1, 3)
        assert results["AdamW groups that end inside a run"]["kernels"][0] in (1, 2)
        unused = results["AdamW a layer is unused in steps 3 and 4"]["kernels"]
        assert unused[0] == unused[1] == 1 and max(unused) <= 3
        rows = results.get("ASGD keeps rows of states")  # Paddle 2.6 has no ASGD
        assert rows is None or rows["kernels"][0] >= 20
        for name, result in results.items():
            assert result["difference"] == 0.0, (name, result)


@pytest.mark.parametrize("name", ["Momentum", "Adagrad", "RMSProp", "AdamW", "Adamax", "RAdam"])
def test_a_neighbour_that_has_no_states_yet(ranks: Ranks, name: str) -> None:
    """Also for optimizers without a count of steps among their states."""
    pool = ranks(2)
    if name in pool.run(OPTIMIZERS, "class_names")[0]:  # Paddle 2.6 has no RAdam
        for found in pool.run(WORKER, "neighbours_without_states", name):
            assert found == {"wrapped": 0.0, "loaded": 0.0}


def test_states_are_those_of_single_parameters(ranks: Ranks) -> None:
    """Read, written and given back between steps that are shared."""
    for found in ranks(2).run(WORKER, "states"):
        assert found == {"whole": 0.0, "after set": 0.0, "after load": 0.0, "given back": 0.0}

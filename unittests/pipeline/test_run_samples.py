"""What micro-batches weigh, and when data has ended; beside one process over the whole batch."""

from __future__ import annotations

import pytest

from unittests.harness import Ranks

WORKER = "unittests.pipeline.dygraph_run_samples"
LIMIT = 1e-6


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_n1_every_sample_weighs_the_same(ranks: Ranks, world_size: int) -> None:
    """N1: without labels too, which leave the last stage nothing to count, and with labels that have no samples."""
    for seen in ranks(world_size).run(WORKER, "counting", world_size):
        assert len(seen) == 9 and all(value <= LIMIT for value in seen.values()), seen


def test_n13_iterators_of_unequal_lengths(ranks: Ranks) -> None:
    """N13: what is left over on one rank only is no mistake; a step that one rank alone could make is."""
    for six_five, five_six, six_four, six_three in ranks(2).run(WORKER, "ending", 2):
        assert six_five == five_six == "StopIteration: the data ended after 1 of 4 micro-batches, on every rank"
        assert six_four == "StopIteration: the data ended after 0 of 4 micro-batches, on every rank"
        assert six_three.startswith("UsageError: the data of rank 0 gave 4 micro-batches, that of rank 1 3; give the")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_scheduler_that_looks_at_the_loss(ranks: Ranks, world_size: int) -> None:
    for seen in ranks(world_size).run(WORKER, "plateau", world_size):
        assert len(seen["rates"]) == 12 and all(ours == theirs for theirs, ours in seen["rates"])
        assert len({ours for _, ours in seen["rates"]}) > 2 and max(seen["weights 1"], seen["weights 2"]) <= LIMIT


def test_replicas_have_no_common_loss(ranks: Ranks) -> None:
    for seen in ranks(2).run(WORKER, "plateau", 1):
        assert seen["refused"].startswith("UsageError: ReduceOnPlateau needs one number for all 2 replicas, but each")
        assert seen["runs"] == 0

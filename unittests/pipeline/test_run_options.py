"""Options of training a pipeline beside one process; rows A9 to A16 and N1 to N16 of user reports."""

from __future__ import annotations

import pytest

from unittests.harness import Ranks

WORKER = "unittests.pipeline.dygraph_run_options"
LIMIT = 1e-6


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a10_clips_and_tied_weights(ranks: Ranks, world_size: int) -> None:
    """A10, A12, A13, A15, A16 in training: copies count once in norms, stay or become equal, and may be frozen."""
    for seen in ranks(world_size).run(WORKER, "clipping", world_size, timeout=150):
        assert len(seen) == 8 and all(value <= LIMIT for value in seen.values()), seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_overflow_skips_the_step_of_all(ranks: Ranks, world_size: int) -> None:
    for seen in ranks(world_size).run(WORKER, "scaling", world_size):
        assert seen["weights"] <= LIMIT and seen["skipped"] == [1, 1, 1]
        assert len(seen["scales"]) == 18 and all(ours == plain for ours, plain in seen["scales"])
        assert sorted({ours for ours, _ in seen["scales"]}) == [1024.0, 2048.0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_n9_n10_recompute(ranks: Ranks, world_size: int) -> None:
    for seen in ranks(world_size).run(WORKER, "recomputing", world_size):
        assert seen["weights"] <= LIMIT
        assert all(losses == seen["losses"][0] for losses in seen["losses"][1:])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_train_eval_train(ranks: Ranks, world_size: int) -> None:
    for seen in ranks(world_size).run(WORKER, "modes", world_size):
        assert seen["worst"] <= LIMIT and seen["weights"] <= LIMIT and seen["runs"] == 4


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_n6_anything_crosses_a_boundary(ranks: Ranks, world_size: int) -> None:
    """N2, N4, N5, N6: dicts, masks, ids, None, numbers, no elements, skips, what nobody uses, changing shapes."""
    for seen in ranks(world_size).run(WORKER, "boundaries", world_size):
        assert seen and all(value <= LIMIT for value in seen.values()), seen


@pytest.mark.parametrize("world_size", [1, 3])
def test_n13_forms_of_data(ranks: Ranks, world_size: int) -> None:
    for rank, found in enumerate(ranks(world_size).run(WORKER, "data_forms", world_size)):
        assert len(found["seen"]) == 9 and all(value <= LIMIT for value in found["seen"].values()), found
        ended, partly, unequal, structure, few, loss, counts = found["errors"]
        assert ended == "StopIteration: the data ended after 0 of 3 micro-batches, on every rank"
        assert partly == "StopIteration: the data ended after 2 of 3 micro-batches, on every rank"
        prefix = "UsageError: " if rank == world_size - 1 else f"UsageError: rank {world_size - 1}: "
        assert structure.startswith(f"{prefix}expected data as [inputs, labels], got a dict of 'x'; write"), structure
        assert "2 samples of " in few and few.startswith("UsageError: ")
        assert "expected a loss function number 1, but the PipelineLayer has 1; pass loss_fn to PipelineLayer" in loss
        if world_size > 1:
            assert unequal.startswith("UsageError: the data of rank 0 gave 3 micro-batches, that of rank 2 2; give")
            assert counts.startswith("UsageError: the number of micro-batches differs between ranks: rank ")


@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_schedulers_and_fleet(ranks: Ranks, world_size: int) -> None:
    for seen in ranks(world_size).run(WORKER, "losses_and_schedulers", world_size):
        assert seen["losses"] <= LIMIT and seen["weights"] <= LIMIT and seen["steps"] == 2


@pytest.mark.parametrize(
    ("world_size", "num_stages", "schedule", "chunks"),
    [(2, 1, "1f1b", 1), (4, 2, "1f1b", 1), (4, 2, "zb_h1", 1), (4, 2, "interleaved", 2)],
)
def test_replicas(ranks: Ranks, world_size: int, num_stages: int, schedule: str, chunks: int) -> None:
    for seen in ranks(world_size).run(WORKER, "replicated", num_stages, schedule, chunks):
        assert seen["replicas"] == 2 and seen["losses"] <= LIMIT and seen["weights"] <= LIMIT, seen


@pytest.mark.parametrize("world_size", [1, 3])
def test_optimizers_of_every_kind(ranks: Ranks, world_size: int) -> None:
    for seen in ranks(world_size).run(WORKER, "optimizers", world_size):
        assert len(seen) == 5 and all(value <= LIMIT for value in seen.values()), seen

"""Failures of one rank that all share, refusals, and memory; rows M5 and N16 of user reports."""

from __future__ import annotations

import pytest

from unittests.harness import Ranks, run_fresh

WORKER = "unittests.pipeline.dygraph_run_failures"


@pytest.mark.parametrize(("world_size", "num_stages"), [(1, 1), (3, 3), (4, 2)])
def test_all_ranks_stop_with_the_one_that_fails(ranks: Ranks, world_size: int, num_stages: int) -> None:
    by_rank = ranks(world_size).run(WORKER, "failures", num_stages)
    for rank, seen in enumerate(by_rank):
        assert seen["prompt"] and seen["weights"] <= 1e-6
        for case, message in seen["messages"].items():
            when, _, place = case.partition(" ")
            if when == "not":
                start = "UsageError: " if rank % num_stages == num_stages - 1 else "UsageError: rank "
                assert message.startswith(start) and "expected one number from loss function 0, got a tensor" in message
                continue
            if when == "boundary":
                if num_stages == 1:
                    assert message == "" or "dict" in message or message.startswith("AttributeError")
                else:
                    assert message.startswith("UsageError: ") and "stage 0 (layers 0 to 0) returned" in message
                continue
            # Paddle makes an OSError, with the user's own in its text, of what a hook of a gradient raises.
            kind = "OSError" if when == "backward" else "KeyError"
            if rank % num_stages == int(place) and rank < num_stages:
                assert message.startswith(f"{kind}: ") and "'ends here'" in message, (rank, case, message)
            elif rank % num_stages == int(place):  # of another replica: fails alike, or hears of the first
                assert message.startswith((f"{kind}: ", "CommError: ")), (rank, case, message)
            else:
                number = f"{place}F1" if when == "forward" else f"{place}B0" if when == "backward" else f"{place}F0"
                assert message.startswith("CommError: rank ") and f"failed: {kind} in {number}: " in message, message
                assert "'ends here'" in message and message.endswith("; this rank stopped with it"), message


@pytest.mark.parametrize(("world_size", "num_stages"), [(3, 3), (2, 1)])
def test_sparse_gradients_are_refused_by_all(ranks: Ranks, world_size: int, num_stages: int) -> None:
    for rank, (tied, alone) in enumerate(ranks(world_size).run(WORKER, "sparse", num_stages)):
        other = "rank 0: " if rank == 1 else ""
        if num_stages == 3:
            assert tied.startswith(f"UsageError: {other}shared 'word' (0.weight, 2.weight) has sparse gradients"), tied
            assert alone == ""
        else:
            assert alone.startswith("UsageError: ") and "has sparse gradients, which cannot be averaged" in alone, alone


def test_an_interrupt_ends_the_wait_of_others(ranks: Ranks) -> None:
    first, second = ranks(2).run(WORKER, "interrupted")
    assert second == "interrupted"
    assert first.startswith("CommError: rank 1 has ended, or has closed its end, before it sent '1SEND_B"), first


def test_a_rank_is_killed() -> None:
    results = run_fresh(3, WORKER, "killed", expect_exit={1: -9})
    for rank in (0, 2):
        first, second, prompt = results[rank]
        assert first.startswith("CommError: ") and "rank 1" in first, first
        assert second.startswith("CommError: ") and prompt == "True", (second, prompt)


def test_m5_n15_refusals(ranks: Ranks) -> None:
    """M5, N15: the type that was given is named; so are numbers that do not fit, on every rank alike."""
    expected = [
        "UsageError: expected a PipelineLayer of paddle_group_sharded, got Linear; describe the model as a list",
        "UsageError: the optimizer has 2 parameters that are not of this rank's stages, the first is 'linear_",
        "UsageError: optimizer must be a paddle.optimizer.Optimizer, got int",
        "UsageError: optimizer is a ShardedOptimizer, which shards what it steps; a pipeline",
        "UsageError: the number of micro-batches is a whole number from 1 on; got 0",
        "UsageError: unknown schedule '2f2b'; there are gpipe, 1f1b,",
        "UsageError: the plan is for 3 ranks, 4 micro-batches and 3 virtual stages, asked for are 2 stages",
        "UsageError: the plan is for 2 ranks, 4 micro-batches and 2 virtual stages, asked for are 2 stages",
        "UsageError: 1f1b runs one chunk per rank, not 2; use 'interleaved' or 'gpipe'",
        "UsageError: the plan has virtual stages 0, 1, ... on ranks (1, 0), a PipelineLayer has them on (0, 1)",
        "ScheduleError: the plan cannot end: rank 0 waits for ever",
        "UsageError: the plan has no backward, so it cannot train; choose another schedule",
        "UsageError: this model is spread over 2 stages and cannot be called; use train_batch or eval_batch",
        "UsageError: grad_clip must be None or one of ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue, got Own",
        "UsageError: the optimizer has ",
    ]
    for messages in ranks(2).run(WORKER, "refusals"):
        assert [message[: len(start)] for message, start in zip(messages, expected)] == expected
        assert len(messages) == len(expected)


def test_one_trains_and_one_evaluates(ranks: Ranks) -> None:
    for message in ranks(2).run(WORKER, "crossed_calls"):
        assert message.startswith("CommError: expected the same operation on every rank of the group, but rank 0 asks")
        assert "exchange 'train'" in message and "exchange 'evaluate'" in message


def test_n16_memory(ranks: Ranks) -> None:
    """N16: nothing of a step is kept after it: an output is 400 kB."""
    for by_schedule in ranks(2).run(WORKER, "memory"):
        assert len(by_schedule) == 2
        for live in by_schedule.values():
            assert max(live) - min(live) < 10_000, by_schedule

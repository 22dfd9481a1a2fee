"""Ranks that are late, missing, dead, or ask for something else: everybody is told, soon, and alike."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from unittests.harness import Ranks, run_fresh

WORKER = "unittests.comm.dygraph_gate"
SMALL, LARGE = 3, 40000  # with the gate; over gloo


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_be_later_than_gloo_would_wait(ranks: Ranks, rank: int) -> None:
    by_rank = ranks(2).run(WORKER, "late", rank=rank, seconds=33, numel=LARGE)
    for result in by_rank:
        np.testing.assert_array_equal(result["value"], np.full(3, 2.0))
    if rank == 1:
        text = "waiting for rank 1 at all_reduce 'late' (40000 elements of float32) since 30 s"
        assert [result["log"] for result in by_rank] == [[text], []]


@pytest.mark.parametrize("numel", [SMALL, LARGE])
def test_waiting_is_logged_once_where_somebody_waits(ranks: Ranks, numel: int) -> None:
    for rank, result in enumerate(ranks(3).run(WORKER, "late", rank=2, seconds=2.5, numel=numel, warn_after=1.5)):
        np.testing.assert_array_equal(result["value"], np.full(3, 3.0))
        expected = f"waiting for rank 2 at all_reduce 'late' ({numel} elements of float32) since 2 s"
        assert result["log"] == ([expected] if rank != 2 else [])


def test_a_rank_may_be_late_to_the_opening(ranks: Ranks) -> None:
    assert ranks(2).run(WORKER, "late_to_open", seconds=3) == [2.0, 2.0]


def test_a_rank_that_is_absent_from_the_opening_is_named(ranks: Ranks) -> None:
    by_rank = ranks(3).run(WORKER, "absent_from_opening", limit=2)
    assert "open its communicator within 2 s, but rank 2 did not come" in by_rank[0][0]
    assert all(first for first, _ in by_rank)
    assert [second for _, second in by_rank] == ["", "", ""]


def test_after_the_limit_the_missing_rank_is_named_on_all_ranks(ranks: Ranks) -> None:
    by_rank = ranks(3).run(WORKER, "missing", rank=1, limit=3, away=4.5)
    assert len({result["first"] for result in by_rank}) == 1
    assert (
        "expected every rank at all_reduce 'too late' (3 elements of float32), but rank 1 did not come within 3 s"
        in by_rank[0]["first"]
    )
    assert all(result["second"] == result["first"] for result in by_rank)
    assert all(2.9 < by_rank[rank]["seconds"] < 4.4 for rank in (0, 2))


def test_a_missing_hub_is_named_by_the_others(ranks: Ranks) -> None:
    by_rank = ranks(3).run(WORKER, "missing", rank=0, limit=1, away=8)
    assert all("but rank 0 did not come within 1 s" in result["first"] for result in by_rank)
    assert all(result["second"] == result["first"] for result in by_rank)
    assert all(5.9 < by_rank[rank]["seconds"] < 7.9 for rank in (1, 2))


def test_who_waits_for_the_hub_keeps_waiting_once_it_is_there(ranks: Ranks) -> None:
    times = {"limit": 5, "hub_away": 3, "other_away": 6.5}
    assert ranks(3).run(WORKER, "arrives_just_in_time", **times) == [[""]] * 3


def test_differing_operations_are_shown_on_all_ranks(ranks: Ranks) -> None:
    by_rank = ranks(3).run(WORKER, "differing", queued=3)
    text = by_rank[0]["first"]
    assert "rank 0 asks for all_reduce 'loss' (4 elements of float32)" in text
    assert "rank 1 asks for broadcast 'weights' (4 elements of float32)" in text
    assert "rank 2 asks for all_gather 'save_group_sharded_model' (12 elements of float32)" in text
    for result in by_rank:
        assert {result["first"], result["again"], result["later"], *result["behind"]} == {text}
        assert result["closed"] == ""


def test_a_failed_communicator_does_not_touch_others(ranks: Ranks) -> None:
    for first, before, after in ranks(2).run(WORKER, "another_comm_survives"):
        assert "rank 0 asks for barrier 'only rank 0'; rank 1 asks for barrier 'only rank 1'" in first
        assert (before, after) == ("", "")


@pytest.mark.parametrize(("rank", "numel"), [(0, LARGE), (1, SMALL), (2, LARGE)])
def test_a_killed_rank_is_named_at_once(rank: int, numel: int) -> None:
    by_rank = run_fresh(3, WORKER, "killed", rank=rank, numel=numel, expect_exit={rank: -signal.SIGKILL})
    for other in {0, 1, 2} - {rank}:
        text, seconds = by_rank[other]
        assert text.startswith(f"rank {rank} has ended (its process exited, crashed or was killed, ")
        assert f"all_reduce 'with the dead' ({numel} elements of float32)" in text
        assert seconds < 3


def test_a_rank_that_is_killed_in_the_middle_of_an_operation_is_named() -> None:
    by_rank = run_fresh(3, WORKER, "killed_while_serving", expect_exit={2: -signal.SIGKILL})
    for text, seconds in by_rank[:2]:
        assert text.startswith("rank 2 has ended") and "all_gather 'gather'" in text
        assert seconds < 4


def test_a_rank_that_has_closed_is_named(ranks: Ranks) -> None:
    by_rank = ranks(3).run(WORKER, "ends_early")
    for text, seconds in (by_rank[0], by_rank[2]):
        assert text.startswith("rank 1 has closed its communicator while the others wait for it at barrier 'one more'")
        assert seconds < 2


def test_a_dropped_communicator_leaves_no_thread_and_no_socket(ranks: Ranks) -> None:
    assert ranks(2).run(WORKER, "dropped") == [[0, 0], [0, 0]]

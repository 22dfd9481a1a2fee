"""Point to point: values, order, threads, late and dead ends."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from unittests.comm.inputs import MOVED, values
from unittests.harness import Ranks, run_fresh

WORKER = "unittests.comm.dygraph_channel"
SHAPES = ((), (1,), (0,), (3, 0), (2, 3, 4), (300, 100))


def test_every_dtype_and_shape_travels_both_ways(ranks: Ranks) -> None:
    for rank, results in enumerate(ranks(2).run(WORKER, "every_kind")):
        results = list(results)
        for dtype in MOVED:
            for shape in SHAPES:
                array = values(1 - rank, int(np.prod(shape)), len(shape), dtype).reshape(shape)
                if dtype == "complex64":
                    array = array + 1j * (array + 1)
                got_dtype, got_shape, got = results.pop(0)
                assert (got_dtype, got_shape) == (f"paddle.{dtype}", list(shape))
                np.testing.assert_array_equal(got, array)
            assert results.pop(0) == {"rank": 1 - rank, "dtype": dtype}
        assert results == []


def test_both_may_send_first(ranks: Ranks) -> None:
    by_rank = ranks(2).run(WORKER, "duplex", count=3, numel=4_000_000)
    assert by_rank == [[12.0, 11.0, 10.0], [2.0, 1.0, 0.0]]


def test_a_sender_may_be_far_ahead(ranks: Ranks) -> None:
    by_rank = ranks(2).run(WORKER, "out_of_step", count=30)
    assert by_rank == [[float(sum(range(30)))], [float(index) for index in range(30)]]


def test_a_tensor_lives_until_it_is_sent(ranks: Ranks) -> None:
    assert ranks(2).run(WORKER, "temporary") == [float(sum(range(20)))] * 2


def test_a_strided_tensor_is_sent_in_order(ranks: Ranks) -> None:
    assert ranks(2).run(WORKER, "strided") == [[0.0, 3.0, 1.0, 4.0, 2.0, 5.0]] * 2


def test_messages_of_a_value_and_tensors_and_a_failure_after_them(ranks: Ranks) -> None:
    for rank, seen in enumerate(ranks(2).run(WORKER, "messages")):
        other = 1 - rank
        (first, tensors), second, (third, [transposed]) = seen["values"]
        assert first == {"from": other} and second == (None, []) and third == ()
        assert tensors[0].tolist() == [[other] * 3] * 2 and tensors[1].item() == (other == 0)
        assert tensors[2].shape == (0, 4) and transposed.shape == (3, 2)
        assert seen["dtypes"] == ["paddle.float32", "paddle.bool", "paddle.int8"]
        failed, again, closed = seen["errors"]
        assert failed == again == f"CommError: rank {other} has had enough"
        assert closed.endswith("has been closed")


def test_a_receiver_may_be_later_than_gloo_would_wait(ranks: Ranks) -> None:
    assert ranks(2).run(WORKER, "late", seconds=32) == [4e6, 4e6]


def test_a_message_that_does_not_come_is_named(ranks: Ranks) -> None:
    (_, closed), (first, second) = ranks(2).run(WORKER, "missing", limit=2)
    assert first.startswith("CommError: expected '2F0' from rank 0, but nothing came within 2 s")
    assert second == first
    assert closed == ""


def test_a_message_that_was_not_expected_is_named(ranks: Ranks) -> None:
    shape, dtype, label, kind, message = ranks(2).run(WORKER, "unexpected")[1]
    assert "expected the tensor '2F0' (float32 [3, 2]) from rank 0, got the tensor '2F0' (float32 [2, 3])" in shape
    assert "expected the tensor '2F0' (float64 [2, 3]) from rank 0, got the tensor '2F0' (float32 [2, 3])" in dtype
    assert "expected the tensor '2F1' (float32 [2, 3]) from rank 0, got the tensor '2F0' (float32 [2, 3])" in label
    assert "expected the value '2F0' from rank 0, got the tensor '2F0' (float32 [2, 3])" in kind
    assert "expected the message '2F0' from rank 0, got the tensor '2F0' (float32 [2, 3])" in message


def test_a_dead_end_is_named_at_once_on_both_sides_of_it() -> None:
    received, closed, again, soon = run_fresh(2, WORKER, "killed", expect_exit={1: -signal.SIGKILL})[0]
    assert "rank 1 has ended, or has closed its end, before it sent 'never' to rank 0" in received
    assert "rank 1 has ended, or has closed its end, before rank 0 could send it 'large'" in closed
    assert (again, soon) == ("", "True")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_channels_are_independent(ranks: Ranks, world_size: int) -> None:
    for rank, result in enumerate(ranks(world_size).run(WORKER, "many_routes")):
        before = (rank - 1) % world_size
        assert result["got"] == [f"ring of {before}", f"second of {before}"]
        assert result["keys"] == sorted((name, end) for name in ("ring", "second") for end in {rank, before})


def test_wrong_calls_are_refused(ranks: Ranks) -> None:
    for loop, outside, closed in ranks(2).run(WORKER, "refusals"):
        assert loop == "UsageError: channel 'loop': expected two different group ranks from 0 to 1, got 1 and 1"
        assert outside == "UsageError: channel 5: expected two different group ranks from 0 to 1, got 0 and 9"
        assert closed.startswith("CommError: the channel between ranks") and closed.endswith("has been closed")

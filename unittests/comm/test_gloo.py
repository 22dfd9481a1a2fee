"""Collectives over gloo: every dtype and size against numpy, order, isolation, serving, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unittests.comm.inputs import FLOATS, MOVED, SUMMED, summed, values
from unittests.harness import Ranks

WORKER = "unittests.comm.dygraph_gloo"
WORLD_SIZES = (2, 3, 4)
NUMELS = (0, 1, 5, 9000)  # nothing; small enough to travel with the gate; not


def expected(array: np.ndarray, dtype: str) -> np.ndarray:
    """What the worker makes of an array."""
    return array + 1j * (array + 1) if dtype == "complex64" else array


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce(ranks: Ranks, world_size: int) -> None:
    for results in ranks(world_size).run(WORKER, "all_reduced", numels=NUMELS):
        assert set(results) == {(dtype, numel) for dtype in SUMMED for numel in NUMELS}
        for (dtype, numel), (result_dtype, result) in results.items():
            assert result_dtype == f"paddle.{dtype}"
            np.testing.assert_array_equal(result, summed(world_size, numel, numel, dtype), err_msg=f"{dtype} {numel}")


def test_all_reduce_of_other_shapes_and_of_maxima(ranks: Ranks) -> None:
    for result in ranks(3).run(WORKER, "all_reduced_in_shapes"):
        assert result["scalar"].shape == () and result["scalar"] == 6
        np.testing.assert_array_equal(result["matrix"], np.full((3, 4), 6.0))
        np.testing.assert_array_equal(result["large"], np.full((200, 200), 6.0))
        assert result["nothing"].shape == (0,)
        for maximum in result["maxima"]:
            np.testing.assert_array_equal(maximum, [2, 0])
        np.testing.assert_array_equal(result["large_maximum"], np.full(40000, 2.0))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_gather(ranks: Ranks, world_size: int) -> None:
    for results in ranks(world_size).run(WORKER, "gathered", numels=NUMELS):
        assert set(results) == {(d, n, in_place) for d in MOVED for n in NUMELS for in_place in (False, True)}
        for (dtype, numel, _), result in results.items():
            parts = [expected(values(rank, numel, numel, dtype), dtype) for rank in range(world_size)]
            np.testing.assert_array_equal(result, np.concatenate(parts), err_msg=f"{dtype} {numel}")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_broadcast(ranks: Ranks, world_size: int) -> None:
    for results in ranks(world_size).run(WORKER, "broadcasted", numels=NUMELS):
        scalar = results.pop(("scalar", 1, world_size - 1))
        assert scalar.shape == () and scalar == world_size - 1
        for (dtype, numel, src), result in results.items():
            np.testing.assert_array_equal(result, expected(values(src, numel, numel, dtype), dtype))


def check_overlaps(
    results: list[Any], sizes: tuple[int, ...], numel: int, dtype: str, totals: list[np.ndarray]
) -> None:
    """Every rank's overlaps, put together, are the concatenated sums, cut where the shares meet."""
    world_size = len(results)
    bounds = np.cumsum([0, *sizes])
    flat = np.concatenate([*totals, []])
    for rank, overlaps in enumerate(results):
        position = rank * numel // world_size
        for segment, start, result_dtype, value in overlaps:
            assert bounds[segment] + start == position
            assert start + value.size <= sizes[segment]
            np.testing.assert_array_equal(value, flat[position : position + value.size])
            assert result_dtype in (f"paddle.{dtype}", "paddle.float32", "paddle.int32")
            position += value.size
        assert position == min((rank + 1) * numel // world_size, max(sum(sizes), rank * numel // world_size))
        assert len({segment for segment, *_ in overlaps}) == len(overlaps), "one overlap per segment"


SIZES = [
    (0,),
    (7,),
    (2, 0, 3),
    (20000,),
    (20000, 5, 3, 30000, 1),
    (5, 20000, 0, 9000, 9000),
]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", SUMMED)
def test_reduce_scatter(ranks: Ranks, world_size: int, dtype: str) -> None:
    plans = [(dtype, sizes, -(-(sum(sizes) + 5) // world_size) * world_size) for sizes in SIZES]
    by_rank = ranks(world_size).run(WORKER, "reduce_scattered", plans=plans)
    for index, (_, sizes, numel) in enumerate(plans):
        totals = [summed(world_size, size, segment, dtype) for segment, size in enumerate(sizes)]
        if dtype == "bool":
            totals = [np.sum([values(r, size, i, dtype) for r in range(world_size)], 0) for i, size in enumerate(sizes)]
        check_overlaps([results[index] for results in by_rank], sizes, numel, dtype, totals)


def test_reduce_scatter_of_low_precision_sums_in_float32(ranks: Ranks) -> None:
    plans = [(dtype, sizes, 30000) for dtype in ("float16", "bfloat16") for sizes in ((7,), (30000,))]
    for results in ranks(2).run(WORKER, "reduce_scattered", plans=plans):
        assert {dtype for overlaps in results for _, _, dtype, _ in overlaps} == {"paddle.float32"}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "zeros",
    [[(0, 0)], [(1, 0), (1, 1)], [(0, 0), (1, 1)], [(0, 0), (1, 0)], [(r, s) for r in (0, 1) for s in (0, 1, 2)]],
)
def test_numbers_count_as_zeros(ranks: Ranks, dtype: str, zeros: list[tuple[int, int]]) -> None:
    plans = [(dtype, (40000, 6, 20000), 60006), (dtype, (4, 6, 2), 12)]
    by_rank = ranks(2).run(WORKER, "reduce_scattered", plans=plans, zeros=zeros)
    for index, (_, sizes, numel) in enumerate(plans):
        totals = [
            sum(np.zeros(size) if (rank, s) in zeros else values(rank, size, s, dtype) for rank in (0, 1))
            for s, size in enumerate(sizes)
        ]
        check_overlaps([results[index] for results in by_rank], sizes, numel, dtype, totals)


def test_large_gradients_are_not_copied(ranks: Ranks) -> None:
    assert ranks(2).run(WORKER, "large_gradients_are_not_copied") == [True, True]


def test_operations_run_in_the_order_of_the_calls(ranks: Ranks) -> None:
    for result in ranks(2).run(WORKER, "asynchronous", count=6):
        np.testing.assert_array_equal(result["value"], np.full(30000, 2.0**6))
        np.testing.assert_array_equal(result["full"], np.full(60000, 2.0**6))


def test_autograd_records_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(WORKER, "no_autograd") == [[True] * 3] * 2


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_exchange(ranks: Ranks, world_size: int) -> None:
    by_rank = ranks(world_size).run(WORKER, "exchanged")
    small = [{"rank": rank, "name": "x" * rank} for rank in range(world_size)]
    assert by_rank == [[small, [1 << 20] * world_size]] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_users_own_collectives_do_not_interfere(ranks: Ranks, world_size: int) -> None:
    for result in ranks(world_size).run(WORKER, "with_the_users_own_collectives", steps=30):
        np.testing.assert_array_equal(result["ours"], np.ones(4))
        np.testing.assert_array_equal(result["users"], np.ones(4))


def test_communicators_are_independent(ranks: Ranks) -> None:
    by_rank = ranks(3).run(WORKER, "several_comms")
    assert [(result["first"], result["second"]) for result in by_rank] == [(9.0, 30.0)] * 3
    assert [result["subgroup"] for result in by_rank[1:]] == [(0, 2, (1, 2), 3.0), (1, 2, (1, 2), 3.0)]
    assert "expected a rank of the group [1, 2], but this is rank 0" in by_rank[0]["refused"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gathers_that_some_ranks_ask_for_are_served_by_the_others(ranks: Ranks, world_size: int) -> None:
    steps = 4
    by_rank = ranks(world_size).run(WORKER, "serving", steps=steps)

    def full(index: int) -> tuple[int, list[float]]:
        return index, [10.0 * index + rank for rank in range(world_size)]

    for rank, result in enumerate(by_rank):
        wanted: list[Any] = []
        for step in range(steps):
            wanted += [full(0)] * (rank == step % world_size) + [full(rank), ("sum", float(world_size))]
            wanted += [full(1), full(1)] * (rank == 0)
        assert result["seen"] == wanted
    logs = [result["log"] for result in by_rank]
    assert all([record[:-1] for record in log] == [record[:-1] for record in logs[0]] for log in logs)
    asked = {tuple(record[-1] for record in records) for records in zip(*logs)}
    assert all(any(flags) for flags in asked) and any(not all(flags) for flags in asked)


def test_a_gather_is_not_served_for_ever(ranks: Ranks) -> None:
    for message in ranks(2).run(WORKER, "unregistered"):
        assert "rank 0 asks for all_gather 'gather' (6 elements of float32); rank 1 asks for barrier 'other'" in message


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_random_sequences(ranks: Ranks, world_size: int, seed: int) -> None:
    count = 40
    by_rank = ranks(world_size).run(WORKER, "random_operations", seed=seed, count=count)
    rng = np.random.default_rng(seed)
    waiting: list[list[Any]] = []
    results: list[list[Any]] = []
    for index in range(count):
        numel = int(rng.choice([0, 1, 5, 1000, 20000, 70000]))
        inputs = [values(rank, numel, index) for rank in range(world_size)]
        kind = rng.integers(5)
        if kind == 0:
            waiting.append([summed(world_size, numel, index)] * world_size)
        elif kind == 1:
            waiting.append([inputs[rng.integers(world_size)]] * world_size)
        elif kind == 2:
            waiting.append([np.concatenate(inputs)] * world_size)
        elif kind == 3:
            zeros = int(rng.integers(4))
            flat = np.concatenate([np.sum(inputs, 0), np.zeros(zeros), summed(world_size, 7, index)])
            share = -(-flat.size // world_size)
            waiting.append([flat[rank * share : (rank + 1) * share] for rank in range(world_size)])
        else:
            results.append([[index * (rank + 1) for rank in range(world_size)]] * world_size)
        if rng.random() < 0.3:
            results += waiting
            waiting = []
    for position, wanted in enumerate(results + waiting):
        for rank in range(world_size):
            got = by_rank[rank][position]
            if isinstance(got, list) and got and isinstance(got[0], tuple):
                got = np.concatenate([value for _, _, value in got])
            if isinstance(got, list) and not got:
                got = np.zeros(0)
            np.testing.assert_array_equal(got, wanted[rank])


def test_wrong_arguments_are_refused_before_anything_runs(ranks: Ranks) -> None:
    for messages in ranks(2).run(WORKER, "refusals"):
        assert messages.pop("still works") == ""
        assert all(message.startswith("UsageError") for message in messages.values())
        assert "world_size (2) times the shard's elements" in messages["gather size"]
        assert "got 8 elements of int32 for a shard of 4 elements of float32" in messages["gather dtype"]
        assert "got 8 elements of float32 and int32" in messages["segments"]
        assert "a multiple of world_size (2)" in messages["numel"]
        assert "'prod'" in messages["op"]
        assert "from 0 to 1 (group rank), got 7" in messages["src"]
        assert "got shape [4, 3] with strides" in messages["strides"]
        assert "got complex64" in messages["complex"]


def test_close_finishes_what_is_under_way_and_may_be_called_twice(ranks: Ranks) -> None:
    for message in ranks(2).run(WORKER, "after_close"):
        assert message == "CommError: the communicator has been closed; barrier 'after' cannot run any more"

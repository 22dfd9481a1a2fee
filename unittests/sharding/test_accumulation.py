"""Several backward passes to a step: with and without communication, cleared in both ways, in every order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unittests.harness import Ranks

WORKER = "unittests.sharding.dygraph_accumulation"
NUMEL = 2 * 96  # slots of 48, 6, 36, 6, 18 and 3 elements at multiples of 16 end at 163; cut in two at a multiple of 16

ORDERS = [
    "bbbsz",  # G1
    "(bb)bsz",
    "b(bb)sz",
    "(b)b(b)sz",
    "(bbb)sz",
    "((b)b)bsz",  # nested
    "(b)(b)bsz",
    "()bsz",
    "(bs)bsz",  # a step inside
    "(b)zbsz",  # kept back, then cleared
    "(b)nbsz",
    "bzbsz",  # clear_grad without step
    "bnusz",
    "bzusz",  # the branch counts as zero: its moments decay
    "bszuszusz",
    "bsnusnusn",  # the branch is left alone
    "bsbsz",  # a step without clear_grad
    "bsssz",
    "s",
    "bebsefz",
    "uuszbsz",
]

DIVERGING = [
    "ddsz",
    "(d)dsz",
    "d(d)sz",
    "d(b)sz",
    "(d)zbsz",
    "dzbsz",
    "dnbsn",
    "(dd)sn",
    "dsdsz",
]

AGAIN = [  # G3: a parameter gets several gradients in one pass, or several passes follow one forward each
    "rsz",
    "rrsz",
    "(r)rsz",
    "qsz",
    "Qsz",
    "qQsz",
    "ksz",
    "(k)ksz",
]


def check(results: list[dict[str, dict[str, float]]]) -> None:
    failed = [
        f"rank {rank}, {text}, {level}: {difference}"
        for rank, by_text in enumerate(results)
        for text, by_level in by_text.items()
        for level, difference in by_level.items()
        if not difference <= 1e-6
    ]
    assert not failed, "\n".join(failed)


FEW = ["(b)bsz", "bsnusnusn", "d(d)sn", "(d)zbsz", "Qsz", "rsz"]


@pytest.mark.parametrize("programs", [ORDERS, DIVERGING, AGAIN], ids=["orders", "diverging", "again"])
def test_equals_averaged_gradients(ranks: Ranks, programs: list[str]) -> None:
    check(ranks(2).run(WORKER, "parity", programs, timeout=150))


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_numbers_of_ranks(ranks: Ranks, world_size: int) -> None:
    check(ranks(world_size).run(WORKER, "parity", FEW if world_size < 4 else FEW[2:4], timeout=150))


@pytest.mark.parametrize("arguments", [{"buffer_max_size": 1}, {"sync_comm": True}], ids=["buckets", "sync_comm"])
def test_small_buckets_and_waiting(ranks: Ranks, arguments: dict[str, Any]) -> None:
    check(ranks(2).run(WORKER, "parity", ["(d)dsz", "Qsz", "rrsz"], timeout=150, **arguments))


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sum_of_backwards_is_exact(ranks: Ranks, world_size: int, level: str) -> None:
    """G1: (g1 + g2 + g3) / n, by hand."""
    columns = np.zeros(4)
    for rank in range(world_size):
        for index in range(3):
            columns += np.random.RandomState(7 * rank + index).randint(-8, 9, [4, 4]).sum(0)
    expected = np.arange(20).reshape(4, 5) - 0.5 * columns[:, None] / world_size
    for by_way in ranks(world_size).run(WORKER, "exact_sum", level):
        for way, weight in by_way.items():
            np.testing.assert_array_equal(weight, expected, err_msg=way)


@pytest.mark.parametrize(
    ("text", "rounds"),
    [("(bb)bsz", 1), ("bb(b)sz", 3), ("(bbb)sz", 1), ("(b)b(b)sz", 2), ("bbsz", 2), ("(bb)zbsz", 1), ("rsz", 1)],
)
@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_no_sync_does_not_communicate(ranks: Ranks, level: str, text: str, rounds: int) -> None:
    """Rounds of reductions in a step; whole gradients (os) are reduced once, whatever the number of passes."""
    by_rank = ranks(2).run(WORKER, "traffic", level, text)
    assert by_rank[0] == by_rank[1]
    if level == "os":
        rounds = 1
    for before, after in by_rank[0]:
        reduced = [numel for op, _, numel in before + after if op == "reduce_scatter"]
        assert sum(reduced) == rounds * NUMEL
        assert level != "os" or not before
        if level != "p_g_os":
            assert {op for op, _, _ in before} <= {"reduce_scatter"}
            gathered = [numel for op, _, numel in after if op == "all_gather"]
            assert sum(gathered) == NUMEL


@pytest.mark.parametrize("level", ["os", "os_g"])
def test_nothing_at_all_inside_no_sync(ranks: Ranks, level: str) -> None:
    for steps in ranks(2).run(WORKER, "traffic", level, "(bbb)sz"):
        for before, _ in steps:
            assert before == []

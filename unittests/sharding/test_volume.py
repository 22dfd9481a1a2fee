"""Elements sent per rank and step, counted: the ZeRO volumes with factor (N - 1) / N, and the number of collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from unittests.harness import Ranks

WORKER = "unittests.sharding.dygraph_volume"
COUNT = 5
BLOCK = 320 * 321
PSI = COUNT * BLOCK
MOVES = ("all_gather", "reduce_scatter", "broadcast")


def logs(ranks: Ranks, world_size: int, *args: Any, **kwargs: Any) -> list[list[tuple[str, str, int, float]]]:
    """One log per step, which is the same on every rank."""
    by_rank = ranks(world_size).run(WORKER, "traffic", *args, **kwargs)
    assert all(other == by_rank[0] for other in by_rank), "the sequences differ between ranks"
    return by_rank[0]  # type: ignore[no-any-return]


def sent(log: list[tuple[str, str, int, float]]) -> float:
    return sum(elements for op, _, _, elements in log if op in MOVES)


def flags(log: list[tuple[str, str, int, float]]) -> float:
    """Whatever is not weights or gradients."""
    return sum(elements for op, _, _, elements in log if op not in MOVES)


def per_group(log: list[tuple[str, str, int, float]]) -> Counter[str]:
    return Counter(label.split(" ", 1)[1] for op, label, _, _ in log if op in MOVES)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_whole_parameters(ranks: Ranks, world_size: int) -> None:
    """os, os_g: 2 Psi (N - 1) / N, and two collectives per bucket, of which there are three."""
    for level in ("os", "os_g"):
        steps = logs(ranks, world_size, level, COUNT, buffer_max_size=2 * BLOCK)
        for number, log in enumerate(steps):
            assert sent(log) == 2 * PSI * (world_size - 1) / world_size
            assert flags(log) <= 4 * 2 * COUNT
            assert sorted(per_group(log).values()) == [2, 2, 2]
            assert len(log) == 3 * 2 + (2 if number == 0 else 1)  # the order is agreed once


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sharded_parameters(ranks: Ranks, world_size: int) -> None:
    """p_g_os: at most 3 Psi (N - 1) / N and three collectives per group.

    The last two groups need one gather only: in the first step, of which nobody knows the order, the last one.
    """
    for number, log in enumerate(logs(ranks, world_size, "p_g_os", COUNT)):
        factor = (world_size - 1) / world_size
        gathered_once = 1 if number == 0 else 2
        assert sent(log) == (3 * PSI - gathered_once * BLOCK) * factor
        assert flags(log) <= 4 * 2 * COUNT
        assert len(per_group(log)) == COUNT
        assert max(per_group(log).values()) <= 3
        assert len(log) == 3 * COUNT - gathered_once + (2 if number == 0 else 1)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_accumulation(ranks: Ranks, level: str, kept: bool) -> None:
    """k passes: (k + 1) Psi at os_g and 3k Psi at p_g_os; with no_sync() 2 Psi and (2k + 1) Psi; always 2 Psi at os."""
    passes = 3
    limit = {
        "os": 2,
        "os_g": 2 if kept else passes + 1,
        "p_g_os": 2 * passes + 1 if kept else 3 * passes,
    }[level]
    for log in logs(ranks, 2, level, COUNT, passes=passes, kept=kept):
        exact = limit * PSI / 2
        assert sent(log) <= exact
        assert level == "p_g_os" or sent(log) == exact


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_ranks_that_branch(ranks: Ranks, level: str) -> None:
    """H1: odd ranks leave a block out.  Reductions are the same; a gather that ranks ask for apart runs for each."""
    most = 2 if level != "p_g_os" else 1 + 2 * 2
    for log in logs(ranks, 2, level, COUNT, skip=2):
        assert sum(numel for op, _, numel, _ in log if op == "reduce_scatter") == PSI
        assert sent(log) <= most * PSI / 2


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_one_rank_sends_nothing(ranks: Ranks, level: str) -> None:
    assert all(sent(log) == 0 for log in logs(ranks, 1, level, COUNT))

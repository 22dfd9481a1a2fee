"""Killed with SIGKILL while saving: the newest complete checkpoint loads.  ``tools/kill_checkpoints.py`` does 200."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from unittests.harness import RankPool, Ranks

WORKER = "unittests.checkpoint.dygraph_kill"


def kill_later(pool: RankPool, folder: str, victims: list[int], delay: float) -> threading.Thread:
    """Kill ranks of a pool some time after all of them have begun to save."""

    def kill() -> None:
        while not all(os.path.exists(f"{folder}.{pid}") for pid in pool.pids):
            time.sleep(0.01)
        time.sleep(delay)
        for pid in [pool.pids[victim] for victim in victims]:
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.parametrize(("world_size", "kills"), [(1, 5), (2, 4)])
def test_killed_at_random_moments(ranks: Ranks, tmp_path: Path, world_size: int, kills: int) -> None:
    """One rank or the whole job."""
    chance = random.Random(world_size)
    folder, steps = str(tmp_path / "run"), [0]
    for number in range(kills):
        with RankPool(world_size) as pool:
            step, problem = pool.run(WORKER, "restored", folder)[0]
            assert problem == "" and step >= steps[-1]
            steps.append(step)
            whole_job = world_size == 1 or number % 2 == 0
            victims = list(range(world_size)) if whole_job else [chance.randrange(world_size)]
            killer = kill_later(pool, folder, victims, chance.uniform(0.0, 0.5))
            pool.run(WORKER, "save_until_killed", folder, 10_000, victims, expect_exit=dict.fromkeys(victims, -9))
            killer.join()
    for results in ranks(world_size).run(WORKER, "restored", folder):
        assert results[1] == "" and results[0] >= steps[-1]
    assert steps[-1] > 0


@pytest.mark.parametrize(
    ("world_size", "calls"), [(1, [(call, 0) for call in range(1, 29, 4)]), (2, [(3, 1), (5, 1), (14, 0)])]
)
def test_killed_between_any_two_changes(
    ranks: Ranks, tmp_path: Path, world_size: int, calls: list[tuple[int, int]]
) -> None:
    """Before renames, removals, syncs: at some of them here, at all of them in tools/kill_checkpoints.py."""
    for call, victim in calls:
        folder = str(tmp_path / f"run{call}")
        assert ranks(world_size).run(WORKER, "save_until_killed", folder, 3) == [3] * world_size
        ranks(world_size).run(WORKER, "die_at", folder, call, victim, expect_exit={victim: -9})
        for step, problem in ranks(world_size).run(WORKER, "restored", folder):
            assert problem == "" and 2 <= step <= 5

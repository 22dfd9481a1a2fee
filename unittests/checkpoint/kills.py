"""Kill trainers with SIGKILL while they save, and look at what a new job finds; for test_kill.py and tools/."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator

from unittests.harness import RankPool

__all__ = ["kill_at_call", "kill_at_random"]

WORKER = "unittests.checkpoint.dygraph_kill"


def kill_at_random(world_size: int, kills: int, folder: str, seed: int) -> Iterator[tuple[list[int], int, str]]:
    """After each of ``kills``, of one rank or the whole job: who was killed, the step that was found, what is wrong."""
    chance = random.Random(seed)
    for number in range(kills):
        with RankPool(world_size) as pool:
            whole_job = world_size == 1 or number % 2 == 0
            victims = list(range(world_size)) if whole_job else [chance.randrange(world_size)]
            killer = _kill_later(pool, folder, victims, chance.uniform(0.0, 0.5))
            pool.run(WORKER, "save_until_killed", folder, 10_000, victims, expect_exit=dict.fromkeys(victims, -9))
            killer.join()
            step, problem = pool.run(WORKER, "restored", folder)[0]
            yield victims, step, problem


def _kill_later(pool: RankPool, folder: str, victims: list[int], delay: float) -> threading.Thread:
    """Kill ranks of a pool some time after all of them have begun to save."""

    def kill() -> None:
        while not pool.pids or not all(os.path.exists(f"{folder}.{pid}") for pid in pool.pids):
            time.sleep(0.01)
        time.sleep(delay)
        for pid in [pool.pids[victim] for victim in victims]:
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def kill_at_call(pool: RankPool, folder: str, call: int, victim: int) -> tuple[int, str]:
    """Kill before the ``call``-th rename, removal or sync of a rank; the step that is found, and what is wrong."""
    pool.run(WORKER, "save_until_killed", folder, 3)
    pool.run(WORKER, "die_at", folder, call, victim, expect_exit={victim: -9})
    step, problem = pool.run(WORKER, "restored", folder)[0]
    if not problem and not 2 <= step <= 6:
        problem = f"step {step} was found, expected one of 2 to 6"
    return step, problem

"""Killed with SIGKILL while saving: the newest complete checkpoint loads.  ``tools/kill_checkpoints.py`` does 200.

The trainers start by ``ranks(n)`` and by ``RankPool``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from unittests.checkpoint.kills import kill_at_call, kill_at_random
from unittests.harness import Ranks


@pytest.mark.parametrize(("world_size", "kills"), [(1, 5), (2, 4)])
def test_killed_at_random_moments(tmp_path: Path, world_size: int, kills: int) -> None:
    """One rank or the whole job."""
    steps = [0]
    for victims, step, problem in kill_at_random(world_size, kills, str(tmp_path / "run"), seed=world_size):
        assert problem == "" and step >= steps[-1], victims
        steps.append(step)
    assert steps[-1] > 0 and len(steps) == kills + 1


@pytest.mark.parametrize(
    ("world_size", "calls"), [(1, [(call, 0) for call in range(1, 36, 5)]), (2, [(3, 1), (8, 1), (14, 0)])]
)
def test_killed_between_two_changes(
    ranks: Ranks, tmp_path: Path, world_size: int, calls: list[tuple[int, int]]
) -> None:
    """Before renames, removals, syncs: at some of them here, at all of them in tools/kill_checkpoints.py."""
    for call, victim in calls:
        assert kill_at_call(ranks(world_size), str(tmp_path / f"run{call}"), call, victim)[1] == "", call

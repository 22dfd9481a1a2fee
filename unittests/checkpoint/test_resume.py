"""Going on as if never stopped, and loads of a part; rows A1, A8, C8, L9, L11, R23 of the user reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from unittests.harness import Ranks

WORKER = "unittests.checkpoint.dygraph_resume"


@pytest.mark.parametrize("world_size", [1, 3])
def test_continuing_equals_never_having_stopped(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """Dropout, NumPy's and Python's random numbers, a scaler, two schedulers, statistics of each rank: to the bit."""
    if not ranks(1).run(WORKER, "is_paddle_3")[0]:
        pytest.skip("Paddle 2.6 does not tell the state of its random numbers on the CPU")
    for results in ranks(world_size).run(WORKER, "unbroken", str(tmp_path)):
        assert len(results) >= 3
        for level, (differing, same_losses) in results.items():
            assert differing == [] and same_losses, level


@pytest.mark.parametrize(("world_size", "level"), [(1, "plain"), (2, "os"), (2, "p_g_os")])
def test_parts(ranks: Ranks, tmp_path: Path, world_size: int, level: str) -> None:
    for seen in ranks(world_size).run(WORKER, "partial", str(tmp_path), level):
        adapter = ["down.weight", "down.bias", "up.weight", "up.bias"]
        assert "does not fit; missing: down.weight; missing: down.bias" in seen["strict"]
        assert all(f"missing: {name}" in seen["strict"] for name in adapter) and "CHANGED" not in seen["strict"]
        assert seen["report"] == (None, adapter, [], [])
        assert seen["base taken"] == [] and seen["adapter"] == []
        assert all(f"unexpected: {name}" in seen["other way"] for name in adapter)
        assert seen["other way report"] == ([], sorted(adapter))
        assert seen["weights only"] == []
        assert "has no optimizer state; pass optimizer=None" in seen["no states"]
        assert "unexpected: optimizer/base.weight/moment1" in seen["another rule"]
        assert "missing: optimizer/base.weight/velocity" in seen["another rule"]
        assert "base.weight: expected shape [6, 7], got [6, 5]" in seen["another shape"]
        assert "optimizer/base.bias/moment2: expected shape [7], got [5]" in seen["another shape"]
        assert seen["another shape left"] == (6, [])


@pytest.mark.parametrize(("world_size", "level"), [(1, "plain"), (2, "p_g_os")])
def test_tied_weights(ranks: Ranks, tmp_path: Path, world_size: int, level: str) -> None:
    for seen in ranks(world_size).run(WORKER, "tied", str(tmp_path), level):
        assert seen["equal"] == [True, True]
        assert seen["named"] == 1  # as an alias only


def test_random_states_belong_to_their_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(WORKER, "save_step_10", str(tmp_path))
    assert ranks(3).run(WORKER, "random_states_elsewhere", str(tmp_path)) == [[True, True]] * 3


@pytest.mark.parametrize("world_size", [1, 3])
def test_odd_tensors(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    assert ranks(world_size).run(WORKER, "odd", str(tmp_path)) == [[]] * world_size


def test_another_scheduler_is_found_before_anything_is_changed(ranks: Ranks, tmp_path: Path) -> None:
    ((said, unchanged),) = ranks(1).run(WORKER, "other_scheduler", str(tmp_path))
    assert "has the state of another scheduler than ReduceOnPlateau, which keeps cooldown_counter" in said
    assert unchanged


def test_plain_models_that_differ_between_ranks_are_not_mixed(ranks: Ranks, tmp_path: Path) -> None:
    by_rank = ranks(2).run(WORKER, "independent", str(tmp_path))
    assert [differing for differing, _ in by_rank] == [[], []]
    (said,) = by_rank[0][1]
    assert "ranks hold different values of scale and of " in said and by_rank[1][1] == []
    assert ranks(1).run(WORKER, "first_of_them", str(tmp_path)) == [[]]
    assert ranks(3).run(WORKER, "first_of_them", str(tmp_path)) == [[]] * 3

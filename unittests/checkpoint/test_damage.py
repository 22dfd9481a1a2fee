"""Nothing is lost: damaged checkpoints, failing saves, saves in the background, the manager; K3, K7, K12, L13."""

from __future__ import annotations

from pathlib import Path

import pytest

from unittests.harness import Ranks

WORKER = "unittests.checkpoint.dygraph_damage"
PLACES = [(1, "plain"), (2, "os"), (3, "p_g_os")]


@pytest.mark.parametrize(("world_size", "level"), PLACES)
def test_damage_is_told_by_every_rank_and_changes_nothing(
    ranks: Ranks, tmp_path: Path, world_size: int, level: str
) -> None:
    by_rank = ranks(world_size).run(WORKER, "damaged", str(tmp_path), level, timeout=120)
    for results in by_rank:
        assert results.pop("random states")
        assert len(results) == 9 + 6 * world_size + (world_size > 1)
        for kind, (said, words, changed) in results.items():
            assert said.startswith("CheckpointError: ") and words in said, (kind, said)
            assert changed == [], kind


@pytest.mark.parametrize(("world_size", "level"), [(1, "plain"), (2, "os_g"), (3, "p_g_os")])
def test_a_failing_save_leaves_the_one_before(ranks: Ranks, tmp_path: Path, world_size: int, level: str) -> None:
    for rank, results in enumerate(ranks(world_size).run(WORKER, "failing_saves", str(tmp_path), level)):
        files, files_before, extra = results.pop("afterwards")
        assert files == files_before and extra == {"rank": 0}
        expected = {
            "full disk": ("CheckpointError", "safetensors"),
            "full disk for the manifest": ("CheckpointError", "manifest.json"),
            "read-only": ("CheckpointError", "Permission denied"),
            "a file": ("CheckpointError", "is a file, expected a folder"),
            "below a file": ("CheckpointError", "Not a directory"),
            "not a path": ("UsageError", "path must be the path of a folder, got int"),
            "an object": ("UsageError", "extra['set'] is of type set, which a checkpoint cannot hold"),
            "another model's optimizer": ("UsageError", "optimizer"),
            "locked": ("CheckpointError", "is being written by another job (process "),
        }
        if world_size > 1:
            expected["two paths"] = ("UsageError", "rank 0 saves into 'good' and rank 1 into 'good1'")
            expected["different extra"] = ("UsageError", "extra differs between rank 0 and rank 1")
        assert set(results) == set(expected)
        for kind, (error, words) in expected.items():
            said, whole = results[kind]
            assert said.startswith(error) and words in said, (kind, rank, said)
            assert whole, kind


@pytest.mark.parametrize(("world_size", "level"), [(1, "plain"), (2, "p_g_os"), (3, "os")])
def test_saves_in_the_background(ranks: Ranks, tmp_path: Path, world_size: int, level: str) -> None:
    for seen in ranks(world_size).run(WORKER, "background", str(tmp_path), level):
        assert seen["trained on"] and seen["as saved"] == [] and seen["extra"] == 2
        assert seen["files"] == [".json", *[".safetensors"] * world_size]
        assert seen["next save"].startswith("CheckpointError") and "File too large" in seen["next save"]
        assert seen["two was not begun"] and seen["one is whole"] == 2
        assert seen["load waits"] == 4 and seen["next save waits"] and seen["three is complete"]


@pytest.mark.parametrize(("world_size", "level"), [(1, "plain"), (2, "os"), (2, "p_g_os")])
def test_memory(ranks: Ranks, tmp_path: Path, world_size: int, level: str) -> None:
    """K7: no rank holds more than its own result plus one tensor; the model has six large ones in three values each."""
    for seen in ranks(world_size).run(WORKER, "memory", str(tmp_path), level):
        for kind in ("save", "load"):
            assert seen[f"{kind} tensors"] <= 1.0 and seen[f"{kind} after"] <= 0.01, seen
            assert seen[f"{kind} arrays"] <= 1.1, seen


@pytest.mark.parametrize(("world_size", "level"), [(1, "plain"), (2, "p_g_os")])
def test_manager(ranks: Ranks, tmp_path: Path, world_size: int, level: str) -> None:
    for seen in ranks(world_size).run(WORKER, "manager", str(tmp_path / "new"), level):
        assert seen["nothing"] == (None, None, False)
        assert seen["kept"] == [3, 4]
        assert seen["order"].startswith("UsageError: ") and "step 2 comes after step 4" in seen["order"]
        assert "holds checkpoints of another run" in seen["another run"]
        assert seen["newest"] == (4, {"step": 4}, False) and seen["state"] == []
        assert seen["older"] == {"step": 3}
        assert "step-0000000001 is no folder" in seen["gone"]
        assert seen["failed"].startswith("CheckpointError: ") and seen["after the failure"] == [3, 4]
        assert seen["went back"] == ([3], {"step": "3 again"})
        assert seen["left"] == [".lock", "notes.txt", "step-0000000003"]
        assert "is being written by another job" in seen["another job"]
        assert len(seen["no step"]) == 4
        assert all(said.startswith("UsageError: step must be a number") for said in seen["no step"])
        assert len(seen["another manager"]) == 2
        assert all("is being written by this process already" in said for said in seen["another manager"])
        assert seen["still locked"] == 1  # though the second has looked at the lock, and was closed
        assert all(said.startswith("UsageError: keep must be") for said in seen["arguments"])

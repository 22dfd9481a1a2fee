"""save_group_sharded_model against plain ``paddle.save`` of the unsharded run."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from unittests.harness import Ranks, run_fresh
from unittests.harness.rank import trainer_environment

WORKER = "unittests.sharding.dygraph_save"
LEVELS = ("os", "os_g", "p_g_os")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_files_are_those_of_an_unsharded_run(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """A1, C2, J1, K2, K4, K8, K10, B4: bits, keys, name tables; frozen, tied, 0-d; buffers with their dtypes."""
    results = ranks(world_size).run(WORKER, "equal_to_unsharded", str(tmp_path), timeout=120)[0]
    assert len(results) == 24
    for name, found in results.items():
        assert found == (["model.pdmodel", "model.pdopt"] if name.endswith("folder") else []), name
    with open(tmp_path / "AdamW_p_g_os/nested/deeper/model.pdmodel", "rb") as file:
        entries = pickle.load(file)
    assert entries["embedding.weight"].tobytes() == entries["head.weight"].tobytes()
    assert entries["counts"].dtype == np.int64 and entries["doubles"].dtype == np.float64
    assert "cache" not in entries and entries["scale"].shape == () and entries["frozen.weight"].shape == (7, 7)


@pytest.mark.parametrize(("world_size", "level"), [(1, "os"), (2, "p_g_os"), (2, "os_g")])
def test_a_program_without_the_package_goes_on(ranks: Ranks, tmp_path: Path, world_size: int, level: str) -> None:
    by_rank = ranks(world_size).run(WORKER, "save_for_plain", str(tmp_path), level, 5)
    unbroken = ranks(1).run(WORKER, "one_process", 10)[0]
    program = Path(__file__).with_name("plain_paddle.py")
    result = tmp_path / "result"
    environment = trainer_environment(0, [0])
    environment.pop("PYTHONPATH")
    command = [sys.executable, str(program), str(tmp_path), "5", "10", str(result)]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=100, capture_output=True)
    with open(result, "rb") as file:
        resumed = pickle.load(file)
    assert by_rank[0] + resumed["losses"] == unbroken["losses"]
    for part in ("model", "optimizer"):
        for name, value in unbroken[part].items():
            if isinstance(value, np.ndarray):
                found = resumed[part][name]
                assert (found[1] if isinstance(found, tuple) else found).tobytes() == value.tobytes(), name


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_low_precision_with_masters(ranks: Ranks, tmp_path: Path, level: str) -> None:
    found = ranks(2).run(WORKER, "low_precision", str(tmp_path), level)[0]
    assert found == {"model": [], "optimizer": [], "masters": 2}


@pytest.mark.parametrize(("world_size", "level"), [(1, "os"), (2, "p_g_os"), (2, "os")])
def test_a_failed_save_leaves_the_earlier_one(ranks: Ranks, tmp_path: Path, world_size: int, level: str) -> None:
    """K12."""
    tmp_path.chmod(0o777)
    expected = {
        "disk full at the model": ("CheckpointError", "File too large"),
        "disk full at the optimizer": ("CheckpointError", "File too large"),
        "read-only": ("CheckpointError", "Permission denied"),
        "a file": ("UsageError", "is a file"),
        "below a file": ("CheckpointError", "Not a directory"),
        "not a path": ("UsageError", "got int"),
    }
    for rank, results in enumerate(ranks(world_size).run(WORKER, "failing_saves", str(tmp_path), level)):
        assert results.pop("afterwards") == (["model.pdmodel", "model.pdopt"], True)
        assert set(results) == set(expected)
        for kind, (error, unchanged) in results.items():
            name, words = expected[kind]
            assert error.startswith(f"{name}: ") and words in error and unchanged, (kind, error)
            if rank and name == "CheckpointError":
                assert "rank 0: cannot write" in error


@pytest.mark.parametrize("world_size", [1, 2])
def test_f4_saving_leaves_training_untouched(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    pool = ranks(world_size)
    plain = pool.run(WORKER, "weights_after", str(tmp_path), "DataParallel", False)
    for level in LEVELS:
        for expected, found in zip(plain, pool.run(WORKER, "weights_after", str(tmp_path), level, True)):
            for name, value in expected.items():
                assert found[name].tobytes() == value.tobytes(), (level, name)


def test_memory_of_a_save(tmp_path: Path) -> None:
    """K7: one group on ranks that do not write, the host copy and one group on the one that does, nothing after."""
    writer, other = run_fresh(2, WORKER, "memory_of_a_save", str(tmp_path))
    for found in (writer, other):
        assert abs(found["after"]) < 0.02
    assert other["most"] < 2.1 and other["arrays"] < 0.5
    assert writer["most"] + writer["arrays"] < 16 + 3.2  # two moments of eight groups


@pytest.mark.parametrize(("level", "other"), [("os", "p_g_os"), ("p_g_os", "os_g")])
@pytest.mark.parametrize("kind", ["mixed precision", "replicas", "four ranks"])
def test_resumed_from_a_save(ranks: Ranks, tmp_path: Path, kind: str, level: str, other: str) -> None:
    """Two ranks with Paddle's mixed precision wrappers, a grid of 2 x 2, and one group of 4: bits, on every rank."""
    grid = {"rows": [[0, 1], [2, 3]], "columns": [[0, 2], [1, 3]]}
    rows = grid if kind == "replicas" else {"rows": [], "columns": []}
    mixed = kind == "mixed precision"
    pool = ranks(2 if mixed else 4)
    for found in pool.run(WORKER, "resumed_from_a_save", str(tmp_path), level, other, mixed, **rows, timeout=120):
        assert found == {"model file": [], "optimizer file": [], "weights": [], "states": []}

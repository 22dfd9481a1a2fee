"""load_group_sharded_model: any source into any level and number of ranks, and every kind of damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unittests.harness import Ranks

WORKER = "unittests.sharding.dygraph_load"
LEVELS = ("os", "os_g", "p_g_os")


@pytest.mark.parametrize("optimizer", ["AdamW", "Momentum", "Lamb"])
def test_resumed_at_any_level_and_world_size(ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    """L1, L4, L6, L11, R1, R2: the same batches on every rank, so that all of it equals one process."""
    expected = ranks(1).run(WORKER, "make_sources", str(tmp_path), optimizer)[0]
    for world_size in (1, 2, 3, 4) if optimizer == "AdamW" else (2, 3):
        for results in ranks(world_size).run(WORKER, "resumed", str(tmp_path), optimizer, expected, timeout=120):
            assert len(results) == 14
            exact = world_size <= 2 and optimizer != "Lamb"
            far = {key: distance for key, distance in results.items() if not distance <= (0.0 if exact else 1e-6)}
            assert far == {}, world_size


def test_b6_stopped_at_step_10_and_resumed(ranks: Ranks, tmp_path: Path) -> None:
    for world_size in (2, 3):
        for results in ranks(world_size).run(WORKER, "stop_and_go", str(tmp_path)):
            for level in LEVELS:
                assert results[f"{level} resumed"] == 0.0  # the unbroken run of the same level, to the bit
                assert results[level] <= (0.0 if world_size == 2 else 1e-6)  # DataParallel


@pytest.mark.parametrize("world_size", [1, 2])
def test_masters_under_both_names(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    for results in ranks(world_size).run(WORKER, "masters", str(tmp_path)):
        assert len(results) == 12 and set(map(tuple, results.values())) == {()}, results


def test_c8_adapters(ranks: Ranks, tmp_path: Path) -> None:
    for results in ranks(2).run(WORKER, "adapters", str(tmp_path)):
        assert len(results) == 9 and all(results.values()), results


def _check(by_rank: list[dict[str, Any]], damaged: int = -1) -> None:
    for rank, results in enumerate(by_rank):
        for kind, (message, words, unchanged) in results.items():
            assert message.startswith("CheckpointError: ") and words in message, (kind, message)
            assert unchanged, f"{kind} has changed something"
            if damaged not in (-1, rank):
                assert f"rank {damaged}: " in message, (kind, message)


@pytest.mark.parametrize(("world_size", "level"), [(1, "plain"), (2, "os"), (2, "p_g_os"), (3, "os_g")])
def test_bad_files_change_nothing(ranks: Ranks, tmp_path: Path, world_size: int, level: str) -> None:
    by_rank = ranks(world_size).run(WORKER, "errors", str(tmp_path), level, timeout=120)
    assert len(by_rank[0]) == 23
    _check(by_rank)


@pytest.mark.parametrize("damaged", [0, 1])
def test_l13_a_file_that_only_one_rank_finds_bad(ranks: Ranks, tmp_path: Path, damaged: int) -> None:
    kinds = ["no folder", "model cut", "optimizer cut", "missing entry", "wrong state shape", "flipped bit"]
    by_rank = ranks(2).run(WORKER, "errors", str(tmp_path), "p_g_os", damaged, kinds)
    assert len(by_rank[0]) == len(kinds)
    _check(by_rank, damaged)


def test_ranks_that_read_different_files(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2).run(WORKER, "different_files", str(tmp_path)):
        assert "rank 0 and rank 1 read different files" in message


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_k1_k2_k3_k10_state_dict_is_never_empty(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    for results in ranks(world_size).run(WORKER, "plain_state_dicts", str(tmp_path)):
        assert [name for name, right in results.items() if not right] == []

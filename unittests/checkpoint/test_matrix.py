"""Any to any: saved at every level on 1 to 4 ranks, loaded at every level on 1 to 4 ranks; rows L1, L4, L6, L8, R1."""

from __future__ import annotations

from pathlib import Path

import pytest

from unittests.harness import Ranks

WORKER = "unittests.checkpoint.dygraph_matrix"


def _check(results: dict[str, tuple[list[str], float]], kind: str) -> None:
    for way, (wrong, far) in results.items():
        assert wrong == [], way
        source, target = way.split(" -> ")
        assert far <= (0.0 if source == target else 1e-6), (kind, way)


def test_every_level_and_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    sources: list[str] = []
    for world_size in (1, 2, 3, 4):
        sources = ranks(world_size).run(WORKER, "save_all", str(tmp_path), "AdamW", timeout=120)[0]
    assert len(sources) == 14
    for world_size in (1, 2, 3, 4):
        for results in ranks(world_size).run(WORKER, "load_all", str(tmp_path), "AdamW", sources, timeout=200):
            assert len(results) == 14 * (4 if world_size < 3 else 3)
            _check(results, "AdamW")
    for source in ("plain-1", "os-2", "p_g_os-2"):  # bit-equal to one process at two ranks
        assert ranks(1).run(WORKER, "plain_reference", str(tmp_path), "AdamW", source) == [[]]


@pytest.mark.parametrize("kind", ["Lamb", "Momentum", "SGD", "half", "half Lamb"])
def test_optimizers(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Whole tensors at their owners, no states, one state, fp32 masters."""
    sources = ranks(2).run(WORKER, "save_all", str(tmp_path), kind)[0]
    for world_size in (1, 2, 3):
        for results in ranks(world_size).run(WORKER, "load_all", str(tmp_path), kind, sources, timeout=120):
            _check(results, kind)


def test_replicas_write_once_and_share_the_work(ranks: Ranks, tmp_path: Path) -> None:
    for level in ("os", "p_g_os"):
        for seen in ranks(4).run(WORKER, "replicated", str(tmp_path), level):
            assert seen["differing"] == []
            assert sum(seen["written"]) == seen["elements"]
            assert len(seen["written"]) == 4 and max(seen["written"]) < 0.35 * seen["elements"]
        assert ranks(1).run(WORKER, "plain_reference", str(tmp_path), "AdamW", level) == [[]]


@pytest.mark.parametrize("rule", ["", " Lamb"])
def test_masters_are_weights_and_weights_masters(ranks: Ranks, tmp_path: Path, rule: str) -> None:
    for results in ranks(2).run(WORKER, "precisions", str(tmp_path), rule, timeout=120):
        assert len(results) == 2 * (3 * 2 + 2 + 2 * 3 + 2)
        for way, wrong in results.items():
            assert wrong == [], way

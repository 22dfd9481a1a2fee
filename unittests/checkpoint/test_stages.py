"""Any number of stages, chunks and replicas to any other, and to and from models without stages; row A9."""

from __future__ import annotations

from pathlib import Path

from unittests.harness import Ranks

WORKER = "unittests.checkpoint.dygraph_stages"


def test_stages_chunks_and_replicas(ranks: Ranks, tmp_path: Path) -> None:
    sources: list[str] = []
    for world_size in (1, 2, 3, 4):
        sources += ranks(world_size).run(WORKER, "save_all", str(tmp_path))[0]
    assert len(sources) == 10
    for world_size in (1, 2, 3, 4):
        for results in ranks(world_size).run(WORKER, "load_all", str(tmp_path), sources, timeout=120):
            assert len(results) >= len(sources)
            for way, (differing, far) in results.items():
                assert differing == [], way
                source, target = way.split(" -> ")
                assert far <= (0.0 if source == target else 1e-6), way

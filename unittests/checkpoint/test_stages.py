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


def test_an_optimizer_on_some_ranks_only(ranks: Ranks, tmp_path: Path) -> None:
    for seen in ranks(2).run(WORKER, "one_sided", str(tmp_path)):
        assert not seen.pop("folder")
        for place, (said, differing) in seen.items():
            assert differing == [], place
            assert len(said) == 3
            for every in said:
                assert every.startswith("rank 0 gives no optimizer, but has parameters to train, and rank 1"), place


def test_random_numbers_go_on_whatever_part_of_the_pipeline_is_given(ranks: Ranks, tmp_path: Path) -> None:
    for seen in ranks(2).run(WORKER, "bare_stage", str(tmp_path)):
        assert len(seen) == 6
        for way, (losses, again, step) in seen.items():
            assert losses[0] != losses[1] and again == losses and step == 4, way

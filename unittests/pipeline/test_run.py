"""Every schedule beside one process: losses, weights, dropout, activations that are kept."""

from __future__ import annotations

import pytest

from unittests.harness import Ranks

WORKER = "unittests.pipeline.dygraph_run"
STEPS = 10

# (schedule, chunks, micro-batches): fewer than stages, equal, more, and numbers that neither stages nor samples divide
RUNS = {
    1: [("1f1b", 1, 1), ("gpipe", 1, 4), ("zb_h1", 1, 3), ("interleaved", 3, 2), ("file", 1, 2)],
    2: [
        ("1f1b", 1, 1),
        ("1f1b", 1, 8),
        ("gpipe", 1, 3),
        ("zb_h1", 1, 1),
        ("zb_h1", 1, 5),
        ("interleaved", 2, 4),
        ("interleaved", 3, 3),
        ("gpipe", 2, 4),
        ("file", 1, 4),
        ("plan", 1, 3),
    ],
    3: [("1f1b", 1, 7), ("zb_h1", 1, 4), ("interleaved", 2, 2), ("gpipe", 1, 2)],
    4: [("1f1b", 1, 8), ("zb_h1", 1, 6), ("interleaved", 3, 5)],
}


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parity(ranks: Ranks, world_size: int, dropout: float) -> None:
    runs = RUNS[world_size] if dropout == 0.0 else RUNS[world_size][:6:2]
    for rank, seen in enumerate(ranks(world_size).run(WORKER, "parity", world_size, runs, dropout, STEPS, timeout=150)):
        report = seen.pop("report")
        assert "bubble planned" in report and len(report.splitlines()) == world_size + 2
        assert len(seen) == len(runs)
        for name, found in seen.items():
            assert found["losses"] <= 1e-6 and found["weights"] <= 1e-6, (rank, name, found)
            assert found["live"] == found["planned"], (rank, name, found)

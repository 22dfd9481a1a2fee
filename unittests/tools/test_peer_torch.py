"""PyTorch's side of the benchmarks as it is started, in a subprocess: that it runs, not what it takes."""

from __future__ import annotations

import argparse
import importlib.util

import bench_pipeline
import bench_sharding
import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch: pip install torch")


def test_ddp_and_fsdp2_take_turns() -> None:
    found = bench_sharding.measured("compute", argparse.Namespace(ranks=2, steps=1, turns=1), "torch")
    assert found["parameters"] == 12_741_632, "as many as Paddle's model of this work has"
    lengths = {way: [len(turn) for turn in turns] for way, turns in found["seconds"].items()}
    assert lengths == {"DDP": [1], "FSDP2": [1]}
    assert bench_sharding.peer_row(found)["ratio"] > 0


def test_every_schedule_has_its_like() -> None:
    rows = bench_pipeline.run(16, 2, list(bench_pipeline.SCHEDULES), "torch")
    assert [row["schedule"] for row in rows] == [
        "Schedule1F1B",
        "ScheduleInterleavedZeroBubble",
        "ScheduleGPipe",
        "ScheduleInterleaved1F1B",
    ]
    assert all(row["library"].startswith("torch ") and len(row["seconds"]["one process"]) == 2 for row in rows)
    assert [row["chunks"] for row in rows] == list(bench_pipeline.SCHEDULES.values())

"""The arithmetic of the benchmarks, from measurements that are made up; the measuring itself is not timed here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import bench_checkpoint
import bench_levels
import bench_pipeline
import bench_scaling
import bench_sharding
import pytest


def found() -> dict[str, Any]:
    """Two turns of three steps: DataParallel takes 100 ms, then 200 ms; os takes 80 % of it, and 90 %."""
    quarter = [[0.25 * total] * 4 for total in (0.1, 0.2, 0.08, 0.18, 0.04)]
    return {
        "parameters": 1000,
        "phases": {"none": [quarter[:1] * 3, quarter[1:2] * 3], "os": [quarter[2:3] * 3, quarter[3:4] * 3],
                   "bare": [quarter[4:] * 3] * 2},
        "parts": {name: {"all": 0.08, "communication": 0.03, "waiting": 0.02, "copies": 0.01, "optimizer": 0.005}
                  for name in ("none", "os")},
        "all_reduce": 0.01,
        "all_gather": 0.004,
    }  # fmt: skip


def test_rows_of_the_sharding_benchmark() -> None:
    plain, sharded = bench_sharding.rows_of(found(), ranks=2)
    assert (plain["ratio"], plain["total_ms"]) == (1.0, pytest.approx(150))
    assert (sharded["ratio_min"], sharded["ratio"], sharded["ratio_max"]) == pytest.approx((0.8, 0.85, 0.9))
    assert plain["floor_ms"] == pytest.approx(40 + 10)  # the bare step and an all-reduce
    assert sharded["floor_ms"] == pytest.approx(30 + 5 + 10 + 4)  # half of the optimizer's 10 ms, and an all-gather
    assert sharded["over_floor"] == pytest.approx(130 / 49 - 1)
    assert sharded["other_ms"] == pytest.approx(80 - 20 - 20 - 10 - 5)  # 20: forward and backward of the bare model
    text = bench_sharding.markdown([plain, sharded])
    assert "| `os` | 130.0 ms | 0.85 (0.80 to 0.90) | 49.0 | +165 %" in text


def test_the_row_of_a_peer() -> None:
    seconds = {"DDP": [[0.1, 0.1, 0.9], [0.2, 0.2, 0.2], [0.4, 0.4, 0.4]],
               "FSDP2": [[0.15] * 3, [0.2] * 3, [0.5] * 3]}  # fmt: skip
    row = bench_sharding.peer_row({"torch": "2.9.1", "parameters": 72000, "seconds": seconds})
    assert (row["ddp_ms"], row["fsdp2_ms"]) == pytest.approx((200, 200))
    assert (row["ratio_min"], row["ratio"], row["ratio_max"]) == pytest.approx((1.0, 1.25, 1.5))
    assert bench_sharding.peer_markdown(row).splitlines()[::2] == [
        "| torch 2.9.1 | DDP | FSDP2 | FSDP2 / DDP (min to max) |",
        "| 72,000 parameters | 200.0 ms | 200.0 ms | 1.25 (1.00 to 1.50) |",
    ]


@pytest.mark.parametrize(
    "bench, more, message",
    [
        (bench_sharding, [], "pip install torch"),
        (bench_sharding, ["--profile", "os"], "leave out --peer"),
        (bench_pipeline, [], "pip install torch"),
    ],
)
def test_a_peer_that_cannot_be_timed_is_refused_before_anything_runs(
    bench: Any, more: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # what find_spec() takes for not installed
    monkeypatch.setattr(sys, "argv", [bench.__name__, "--peer", "torch", *more])
    for launcher in ("launch", "launch_torch"):
        monkeypatch.setattr(bench, launcher, lambda *_, **__: pytest.fail("something was launched"))
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_rows_of_the_levels() -> None:
    memory = {"none": {"parameters": 1e6, "states": 20e6, "peak": 21e6},
              "p_g_os": {"parameters": 1e6, "states": 4e6, "peak": 5e6},
              bench_levels.OFFLOAD: {"parameters": 1e6, "states": 5e6, "peak": 6e6}}  # fmt: skip
    times = {"none": [0.2, 0.1, 0.3], "p_g_os": [0.1, 0.1, 0.4], bench_levels.OFFLOAD: [0.3, 0.3, 0.3]}
    rows = bench_levels.summarize(times, memory, {"none": 22_000_000, "p_g_os": 5_500_000}, ranks=4)
    assert [row["ratio"] for row in rows] == pytest.approx([1.0, 0.5, 1.5])
    assert bench_levels.markdown(rows).splitlines()[2:] == [
        "| `paddle.DataParallel` | 4 | 200 ms | 1.00 | 20.0 MB | 16.0 MB (16) | 21.0 MB | 22.0 MB |",
        "| `p_g_os` | 4 | 100 ms | 0.50 | 4.0 MB | 4.0 MB (16/N) | 5.0 MB | 5.5 MB |",
        "| `p_g_os` with offload | 4 | 300 ms | 1.50 | 5.0 MB | 4.0 MB (16/N) | 6.0 MB | 5.5 MB |",
    ]
    untimed = bench_levels.summarize({}, memory, {"none": 22_000_000, "p_g_os": 5_500_000}, ranks=4)
    assert "| `p_g_os` | 4 | - | - | 4.0 MB |" in bench_levels.markdown(untimed)


def test_lines_of_the_scaling_benchmark() -> None:
    intercept, slope, straight = bench_scaling.fitted([100, 200, 400], [0.03, 0.05, 0.09])
    assert (intercept, slope, straight) == pytest.approx((0.01, 0.0002, 1.0))
    by_kind = {
        "layers": [0.01 + 1e-4 * count for count in bench_scaling.LAYERS],
        "parameters": [0.01 + 5e-9 * bench_scaling.parameters(width) for width in bench_scaling.WIDTHS],
        "collectives": [3, 3, 3, 3],
        "live": [10, 10, 10, 10],
    }
    text = bench_scaling.table({"os": by_kind})
    assert "| `os` | 100 µs | 1.0000 | 5.00 ms | 1.0000 | 3, 3, 3, 3 | 10, 10, 10, 10 |" in text


def test_the_picture_of_the_scaling_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    by_kind = {"layers": [1.0, 2.0, 4.0, 8.0], "parameters": [1.0, 2.0, 3.0, 4.0]}
    bench_scaling.draw({"os": by_kind, "os_g": by_kind}, str(tmp_path / "lines.svg"))
    text = (tmp_path / "lines.svg").read_text(encoding="utf-8")
    assert text.count('id="axes_') == 2 and text.count('id="line2d_') > 8


def test_ratios_of_the_checkpoint_benchmark() -> None:
    seconds = {"save": [2.0, 1.0, 4.0], "library save": [1.0] * 3, "load": [0.5] * 3, "library load": [1.0] * 3}
    text = bench_checkpoint.table({"bytes": 300e6, "seconds": seconds})
    assert "| save | 150 MB/s | 300 MB/s | 0.50 |" in text and "| load | 600 MB/s | 300 MB/s | 2.00 |" in text

from __future__ import annotations

import pytest
from bench_pipeline import WARMUP, markdown, rows_of, turns


def test_rows_compare_each_turn_with_the_ideal() -> None:
    facts = {"planned_bubble": 1 / 9, "measured_bubble": 0.125, "live": [2.0, 1.0], "planned_live": [2.0, 1.0]}
    found = {
        "seconds": {
            "one process": [1.6, 3.2, 1.6],
            "stages alone": [0.96, 1.6, 0.8],
            "1f1b": [0.9, 1.8, 1.0],
            "zb_h1": [0.8, 1.6, 0.8],
        },
        "facts": {"1f1b": facts, "zb_h1": facts},
    }
    first, second = rows_of(256, found)  # 2 stages, 8 micro-batches: 9/16 of the time of one process
    assert first["one_process_ms"] == pytest.approx(1600) and first["ideal_ms"] == pytest.approx(900)
    assert first["step_ms"] == pytest.approx(1000)
    assert first["efficiency"] == pytest.approx(1.0), "the median of 100 %, 100 % and 90 %"
    assert first["efficiency_at_best"] == pytest.approx(1.0), "1.6 s and 0.9 s"
    assert first["floor_ms"] == pytest.approx(1080), "a stage alone and one more micro-batch of eight: 960 x 9/8"
    assert first["of_floor"] == pytest.approx(1.0), "the median of 120 %, 100 % and 90 %"
    assert second["efficiency"] == pytest.approx(9 / 8)
    assert markdown([first]).splitlines()[-1] == (
        "| 256 | `1f1b` | 1600 ms | 900 ms | 1080 ms | 1000 ms | 100.0 % | 100.0 % | 100.0 % | 11.1 % | 12.5 % | 2, 1 |"
    )


def test_a_peer_is_compared_with_its_own_ideal() -> None:
    found = {
        "torch": "2.9.1",
        "seconds": {"one process": [0.8], "stages alone": [0.4], "Schedule1F1B": [0.6]},
        "facts": {"Schedule1F1B": {"chunks": 1}},
    }
    (row,) = rows_of(256, found)
    assert (row["library"], row["schedule"]) == ("torch 2.9.1", "Schedule1F1B")
    assert row["ideal_ms"] == pytest.approx(450) and row["efficiency"] == pytest.approx(0.75)
    assert markdown([row]).splitlines()[-1] == (
        "| 256 | `Schedule1F1B`, torch 2.9.1 | 800 ms | 450 ms | 450 ms | 600 ms | 75.0 % | 75.0 % | 75.0 % "
        "| - | - | - |"
    )


def test_jobs_take_turns_between_barriers() -> None:
    done: list[str] = []
    jobs = {name: lambda name=name: done.append(f"run {name}") for name in ("a", "b")}
    assert [name for name, _ in turns(jobs, 2, done.append)] == ["a", "b", "a", "b"], "the warm-up is not timed"
    assert done == ["a", "run a", "a", "b", "run b", "b"] * (WARMUP + 2)

"""Closed forms and table of the papers: GPipe 1811.06965, interleaving 2104.04473, zero bubble 2401.10241."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from paddle_group_sharded.errors import UsageError
from paddle_group_sharded.pipeline.action import Kind, Plan
from paddle_group_sharded.pipeline.lowering import add_grad_reduce, add_transfers
from paddle_group_sharded.pipeline.schedules import (
    SCHEDULES,
    forward_only,
    gpipe,
    interleaved,
    make_plan,
    one_f_one_b,
    read_plan,
    zb_h1,
)
from paddle_group_sharded.pipeline.simulate import Costs, timeline

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
MICRO_BATCHES = range(1, 33)

every_p = pytest.mark.parametrize("p", range(2, 9))
several_chunks = pytest.mark.parametrize("v", range(2, 5))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("forward_only_3x4", forward_only(3, 4)),
        ("gpipe_3x4", gpipe(3, 4)),
        ("1f1b_3x4", one_f_one_b(3, 4)),
        ("zb_h1_3x4", zb_h1(3, 4)),
        ("interleaved_3x4x2", interleaved(3, 4, 2)),
        ("interleaved_2x5x2", interleaved(2, 5, 2)),
    ],
)
def test_golden_plans(name: str, plan: Plan) -> None:
    assert read_plan(GOLDEN / f"{name}.txt") == plan
    lowered = GOLDEN / f"{name}_lowered.txt"
    if lowered.exists():
        assert read_plan(lowered) == add_grad_reduce(add_transfers(plan))


# p, m: bubble in percent of GPipe = 1F1B, interleaved with 2 and 4 chunks, ZB-H1; peak of GPipe, 1F1B, 2 and 4 chunks
TABLE = """
2  4   20.00 11.11  5.88  7.69    4 2  2.5 2.25
4  4   42.86 27.27 15.79 20.00    4 4  4   4
4  8   27.27 15.79  8.57 11.11    8 4  5.5 4.75
4 16   15.79  8.57  4.48  5.88   16 4  5.5 4.75
4 32    8.57  4.48  2.29  3.03   32 4  5.5 4.75
8 16   30.43 17.95  9.86 12.73   16 8 11.5 9.75
8 32   17.95  9.86  5.19  6.80   32 8 11.5 9.75
8 64    9.86  5.19  2.66  3.52   64 8 11.5 9.75
"""


@pytest.mark.parametrize(
    "row", [line.split() for line in TABLE.strip().splitlines()], ids=lambda row: f"p{row[0]}-m{row[1]}"
)
def test_published_table(row: list[str]) -> None:
    p, m = int(row[0]), int(row[1])
    plans = [gpipe(p, m), one_f_one_b(p, m), interleaved(p, m, 2), interleaved(p, m, 4), zb_h1(p, m)]
    times = [timeline(plan) for plan in plans]
    bubbles = [f"{100 * float(time.bubble_fraction):.2f}" for time in times]
    assert bubbles == [row[2], row[2], row[3], row[4], row[5]]
    assert [time.peak_live(0) for time in times] == [*map(Fraction, row[6:]), min(p, m)]


@every_p
def test_gpipe(p: int) -> None:
    for m in MICRO_BATCHES:
        time = timeline(gpipe(p, m))
        assert time.bubble_fraction == Fraction(p - 1, m + p - 1)
        assert [time.peak_live(rank) for rank in range(p)] == [m] * p


@every_p
def test_1f1b(p: int) -> None:
    for m in MICRO_BATCHES:
        time = timeline(one_f_one_b(p, m))
        assert time.bubble_fraction == Fraction(p - 1, m + p - 1)
        assert [time.peak_live(rank) for rank in range(p)] == [min(p - rank, m) for rank in range(p)]


@every_p
def test_zb_h1(p: int) -> None:
    for m in MICRO_BATCHES:
        time = timeline(zb_h1(p, m))
        assert time.duration == (3 * m + p - 1 if m >= p else 2 * (m + p - 1) + 1)
        assert time.bubble_fraction == 1 - Fraction(3 * m) / time.duration
        assert [time.peak_live(rank) for rank in range(p)] == [min(p, m)] * p


@every_p
@several_chunks
def test_interleaved(p: int, v: int) -> None:
    for m in MICRO_BATCHES:
        time = timeline(interleaved(p, m, v))
        if m >= p:
            assert time.bubble_fraction == Fraction(p - 1, v * m + p - 1)
        else:  # too little work for all ranks
            assert time.bubble_fraction == 1 - Fraction(v * m, v * p + m - 1)
        group = -(-m // max(1, m // p))  # the larger ones of as many groups as have p members
        assert time.peak_live(0) == min(m, Fraction((v - 1) * group + 2 * p - 1, v))
        assert max(time.peak_live(rank) for rank in range(p)) == time.peak_live(0)
        if m % p == 0:
            assert time.peak_live(0) == min(m, p + Fraction(p - 1, v))


@every_p
@several_chunks
def test_gpipe_with_chunks(p: int, v: int) -> None:
    for m in (1, 2, 3, 5, 8, 13, 32):
        time = timeline(gpipe(p, m, v))
        assert time.bubble_fraction == (
            Fraction(p - 1, v * m + p - 1) if m >= p else 1 - Fraction(v * m, v * p + m - 1)
        )
        assert [time.peak_live(rank) for rank in range(p)] == [m] * p


@every_p
@pytest.mark.parametrize(("f", "i", "w"), [(2, 2, 1), (3, 2, 1), (5, 3, 0), (3, 3, 3), (2, 3, 2), (4, 5, 1)])
def test_bubbles_for_other_costs(p: int, f: int, i: int, w: int) -> None:
    costs, m = Costs(f, i, w), 2 * p + 1
    bubble = {
        schedule: timeline(schedule(p, m, 1), costs).duration - m * (f + i + w)
        for schedule in (gpipe, one_f_one_b, zb_h1)
    }
    assert bubble == {gpipe: (p - 1) * (f + i + w), one_f_one_b: (p - 1) * (f + i + w), zb_h1: (p - 1) * (f + i - w)}
    chunks = timeline(interleaved(p, m, 3), Costs.per_rank(3, f, i, w))
    assert chunks.duration - m * (f + i + w) == Fraction((p - 1) * (f + i + w), 3)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("m", [1, 4])
def test_one_stage_has_no_bubble(name: str, m: int) -> None:
    time = timeline(SCHEDULES[name](1, m, 1))
    assert time.bubble_fraction == 0
    assert time.peak_live(0) == (m if name == "gpipe" else 1)


@pytest.mark.parametrize("p", range(1, 9))
def test_interleaved_with_one_chunk_is_1f1b(p: int) -> None:
    assert all(interleaved(p, m, 1) == one_f_one_b(p, m) for m in range(1, 20))


@pytest.mark.parametrize("plan", [gpipe(3, 5, 2), one_f_one_b(4, 6), interleaved(3, 7, 3), zb_h1(4, 9)])
def test_gradients_are_summed_in_the_order_of_micro_batches(plan: Plan) -> None:
    for stage in range(plan.num_virtual_stages):
        row = plan.actions[plan.stage_to_rank[stage]]
        for kind in (Kind.B, Kind.I, Kind.W):
            batches = [a.micro_batch for a in row if a.stage == stage and a.kind is kind]
            assert batches == sorted(batches)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("gpipe", gpipe),
        ("F-then-B", gpipe),
        ("FThenB", gpipe),
        ("1F1B", one_f_one_b),
        ("VPP", interleaved),
        ("zb_h1", zb_h1),
        ("ZB-H1", zb_h1),
        ("forward only", forward_only),
    ],
)
def test_schedules_are_found_by_name(name: str, schedule: object) -> None:
    assert make_plan(name, 3, 4) == schedule(3, 4)  # type: ignore[operator]


def test_the_default_follows_the_chunks() -> None:
    assert make_plan(None, 2, 4) == one_f_one_b(2, 4)
    assert make_plan(None, 2, 4, 2) == interleaved(2, 4, 2)


def test_a_plan_may_be_ready_made_or_a_function_or_a_file(tmp_path: Path) -> None:
    plan = zb_h1(2, 3)
    (tmp_path / "plan.txt").write_text(str(plan))
    (tmp_path / "plan.csv").write_text(plan.to_csv())
    assert make_plan(plan, 2, 3) == plan
    assert make_plan(lambda stages, batches, chunks: zb_h1(stages, batches), 2, 3) == plan
    assert make_plan(str(tmp_path / "plan.txt"), 2, 3) == make_plan(tmp_path / "plan.csv", 2, 3) == plan


def test_a_plan_of_other_sizes_is_refused_with_both() -> None:
    with pytest.raises(
        UsageError, match="2 ranks, 3 micro-batches and 2 virtual stages.* 2 stages with 1 chunks .* 4 micro"
    ):
        make_plan(zb_h1(2, 3), 2, 4)


def test_unknown_names_are_answered_with_the_known() -> None:
    with pytest.raises(UsageError, match="'dualpipe'; there are gpipe, 1f1b, interleaved, zb_h1, forward_only"):
        make_plan("dualpipe", 2, 4)
    with pytest.raises(UsageError, match="got int"):
        make_plan(3, 2, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_schedules_of_one_chunk_say_so(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} runs one chunk per rank, not 2; use 'interleaved'"):
        make_plan(name, 2, 4, 2)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (2, -1), (2.0, 4), (2, True)])
def test_sizes_are_whole_numbers_from_one_on(name: str, sizes: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="whole number from 1 on; got"):
        make_plan(name, *sizes)

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_group_sharded.__main__ import main
from paddle_group_sharded.pipeline.action import Plan
from paddle_group_sharded.pipeline.lowering import add_grad_reduce, add_transfers
from paddle_group_sharded.pipeline.schedules import interleaved, one_f_one_b, zb_h1
from paddle_group_sharded.pipeline.simulate import Costs, timeline
from paddle_group_sharded.pipeline.timeline import Timeline


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    def call(line: str, status: int = 0) -> str:
        assert main(line.split()) == status
        out = capsys.readouterr()
        return (out.err if status else out.out).rstrip("\n")

    return call


def test_schedule_prints_the_grid_with_bubble_and_activations(run) -> None:  # type: ignore[no-untyped-def]
    assert run("schedule 1f1b --stages 2 --micro-batches 3").splitlines() == [
        "rank 0 | 0F0 0F1  .   .  0B0 --- 0F2 0B1 ---  .  0B2 ---",
        "rank 1 |  .  1F0 1B0 --- 1F1 1B1 --- 1F2 1B2 ---  .   .",
        "duration 12, bubble 25.00 % of all ranks' time",
        "live activations, at most, by rank, in micro-batches: 2 1",
    ]


def test_schedule_compares_all_without_a_name(run) -> None:  # type: ignore[no-untyped-def]
    rows = [line.split() for line in run("schedule --stages 4 --micro-batches 8 --chunks 2").splitlines()[1:]]
    assert rows == [
        ["gpipe", "1", "33", "27.27", "%", "8", "8", "8", "8"],
        ["1f1b", "1", "33", "27.27", "%", "4", "3", "2", "1"],
        ["interleaved", "2", "28.5", "15.79", "%", "5.5", "4.5", "3.5", "2.5"],
        ["zb_h1", "1", "27", "11.11", "%", "4", "4", "4", "4"],
    ]


def test_costs_may_differ_by_stage_and_be_fractions(run) -> None:  # type: ignore[no-untyped-def]
    out = run(
        "schedule zb_h1 --stages 2 --micro-batches 3 --forward 1,1/3 --input-grad 0.5 --transfer 2 --format timeline"
    )
    expected = timeline(zb_h1(2, 3), Costs([1, 1 / 3], 0.5, 1, 2))
    assert [s.stop for s in Timeline.from_csv(out).spans] == pytest.approx([s.stop for s in expected.spans])


def test_plans_are_printed_written_and_read(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    sizes = "--stages 2 --micro-batches 3 --chunks 2"
    lowered = add_grad_reduce(add_transfers(interleaved(2, 3, 2)))
    assert Plan.parse(run(f"schedule vpp {sizes} --format text --lower")) == lowered
    assert Plan.from_csv(run(f"schedule vpp {sizes} --format csv")) == interleaved(2, 3, 2)
    for name in ("plan.txt", "plan.csv"):
        run(f"schedule vpp {sizes} --output {tmp_path / name}")
        assert run(f"schedule {tmp_path / name} {sizes}") == run(f"schedule interleaved {sizes}")


def test_pictures_and_measured_timelines(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "run.csv").write_text(timeline(one_f_one_b(2, 3), Costs(1, 1, 1, 1)).to_csv())
    out = run(f"schedule 1f1b --stages 2 --micro-batches 3 --measured {tmp_path}/run.csv --output {tmp_path}/plan.svg")
    assert out.splitlines()[-1].split() == ["all", "25.00", "%", "43.75", "%"]
    picture = (tmp_path / "plan.svg").read_text()
    assert "bubble plan 25.00 %, run 43.75 %" in picture
    assert "1f1b, 2 stages, 3 micro-batches" in picture


def test_segment(run) -> None:  # type: ignore[no-untyped-def]
    assert run("segment --weights 9 1 1 1 2.5 --stages 2") == (
        "segment with method: weights; bounds: [0, 1, 5]\n"
        "          layers        weight\n"
        "stage 0  0-0 (1)    9 (62.1 %)\n"
        "stage 1  1-4 (4)  5.5 (37.9 %)\n"
        "balance (max/mean): layers 1.60, weight 1.24"
    )
    assert "bounds: [0, 7, 15]" in run("segment --layers 15 --stages 2")
    assert "bounds: [0, 1, 2, 3, 5]" in run("segment --layers 5 --stages 2 --chunks 2")
    assert "bounds: [0, 2, 5]" in run("segment --classes Emb Block Norm Block Head --stages 2 --method layer:block")
    better = run("segment --weights 9 1 1 1 --stages 2 --bounds 0 2")
    assert better.splitlines()[-1] == "better bounds by weight: [0, 1, 4] (largest stage 9 instead of 10)"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("schedule dualpipe --stages 2 --micro-batches 3", "error: unknown schedule 'dualpipe'"),
        (
            "schedule 1f1b --stages 2 --micro-batches 3 --forward 1,2,3",
            "error: forward lists 3 costs, but the plan has 2",
        ),
        ("schedule --stages 2 --micro-batches 3 --output plan.svg", "error: --output and --measured need the name"),
        ("segment --weights 1 2 --stages 3", "error: 2 layers cannot fill 3 stages"),
        ("schedule 1f1b --stages 2 --micro-batches 3 --output plan.gif", "error: pictures are written to names"),
    ],
)
def test_mistakes_are_answered_in_a_line(run, line: str, message: str) -> None:  # type: ignore[no-untyped-def]
    assert run(line, status=2).startswith(message)


def test_words_that_are_no_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("segment --weights 1 two --stages 2".split())
    assert "'two' is not a number" in capsys.readouterr().err

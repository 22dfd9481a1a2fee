from __future__ import annotations

from fractions import Fraction

from hypothesis import given

from paddle_group_sharded.pipeline.action import Plan
from paddle_group_sharded.pipeline.lowering import add_grad_reduce, add_transfers
from paddle_group_sharded.pipeline.render import grid, side_by_side, summary
from paddle_group_sharded.pipeline.schedules import gpipe, interleaved, one_f_one_b
from paddle_group_sharded.pipeline.simulate import Costs, timeline
from unittests.pipeline.cases import scheduled_plans


def test_grid_of_gpipe() -> None:
    assert grid(gpipe(2, 2)) == (
        "rank 0 | 0F0 0F1  .   .   .  0B0 --- 0B1 ---\nrank 1 |  .  1F0 1F1 1B0 --- 1B1 ---  .   ."
    )


def test_transfers_and_reductions_take_no_column() -> None:
    assert grid(add_grad_reduce(add_transfers(gpipe(2, 2)))) == grid(gpipe(2, 2))


def test_a_column_is_what_divides_all_times() -> None:
    plan = Plan.parse("rank 0: 0F0 0B0")
    assert grid(plan, Costs(Fraction(3, 2), 1, 0)) == "rank 0 | 0F0 --- --- 0B0 ---"
    assert grid(timeline(plan, Costs(0.75, 0.5, 0.0))) == "rank 0 | 0F0 --- --- 0B0 ---"


def test_a_column_of_measured_times_is_the_shortest_action() -> None:
    plan = Plan.parse("rank 0: 0F0 0B0\nrank 1: 1F0 1B0")
    assert grid(timeline(plan, Costs(0.1, 0.3, 0.01))) == (
        "rank 0 | 0F0  .   .   .   .  0B0 --- ---\nrank 1 |  .  1F0 1B0 --- ---  .   .   ."
    )


@given(scheduled_plans())
def test_every_action_stands_once_in_the_grid_and_idle_columns_are_the_bubble(plan: Plan) -> None:
    lines = grid(plan).splitlines()
    time = timeline(plan)
    for rank, line in enumerate(lines):
        cells = line.partition("|")[2].split()
        assert [c for c in cells if c != "." and set(c) != {"-"}] == [str(a) for a in plan.actions[rank]]
        assert Fraction(cells.count("."), len(cells)) == time.bubble(rank)
        assert len(cells) == time.duration


def test_ranks_and_names_are_aligned() -> None:
    lines = grid(interleaved(11, 3)).splitlines()
    assert len({line.index("|") for line in lines}) == 1
    assert lines[0].startswith("rank  0 | 0F0  0F1  0F2   .    .")
    assert "10F0 10B0 ---- 10F1" in lines[10]


def test_summary() -> None:
    assert summary(timeline(one_f_one_b(2, 3))) == (
        "duration 12, bubble 25.00 % of all ranks' time\nlive activations, at most, by rank, in micro-batches: 2 1"
    )


def test_planned_beside_measured() -> None:
    planned = timeline(one_f_one_b(2, 3))
    measured = timeline(one_f_one_b(2, 3), Costs([0.1, 0.1], [0.1, 0.2], [0.1, 0.1]))
    assert side_by_side(planned, measured).splitlines() == [
        "rank     bubble planned  measured     most live planned  measured",
        "   0            25.00 %   40.00 %                     2         2",
        "   1            25.00 %   20.00 %                     1         1",
        " all            25.00 %   30.00 %",
    ]

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_group_sharded.errors import UsageError
from paddle_group_sharded.pipeline.action import Action, Plan
from paddle_group_sharded.pipeline.schedules import one_f_one_b
from paddle_group_sharded.pipeline.simulate import Costs, timeline
from paddle_group_sharded.pipeline.timeline import Span, Timeline
from unittests.pipeline.cases import runnable_plans


def spans(*rows: str) -> tuple[Span, ...]:
    """Spans of ``action start stop`` words, one text per rank."""
    return tuple(
        Span(rank, Action.parse(words[i]), float(words[i + 1]), float(words[i + 2]))
        for rank, words in enumerate(row.split() for row in rows)
        for i in range(0, len(words), 3)
    )


MEASURED = Timeline(spans("0F0 10 11 0SEND_F0 11 12 0RECV_B0 12 15 0B0 15 17", "1RECV_F0 9 12 1F0 12 13 1B0 13 15"))


def test_transfers_are_no_work() -> None:
    assert (MEASURED.num_ranks, MEASURED.start, MEASURED.stop, MEASURED.duration, MEASURED.busy) == (2, 10, 17, 7, 6)
    assert MEASURED.bubble(0) == MEASURED.bubble(1) == pytest.approx(4 / 7)
    assert MEASURED.bubble_fraction == pytest.approx(4 / 7)


def test_bubbles_of_ranks_average_to_that_of_all() -> None:
    time = timeline(one_f_one_b(3, 4), Costs([1, 2, 3], 1, [2, 1, 1]))
    assert sum(time.bubble(rank) for rank in range(3)) / 3 == time.bubble_fraction
    assert isinstance(time.bubble_fraction, Fraction)


def test_live_activations_step_by_step() -> None:
    time = timeline(Plan.parse("rank 0: 0F0 1F0 0F1 1B0 0B0 1F1 1B1 0B1"), Costs(weight_grad=0))
    half = Fraction(1, 2)
    assert time.live(0) == (
        (0, half),
        (1, 2 * half),
        (2, 3 * half),
        (4, 2 * half),
        (5, half),
        (5, 2 * half),
        (7, half),
        (8, 0),
    )
    assert time.peak_live(0) == Fraction(3, 2)


def test_a_split_backward_frees_activations_with_the_weight_gradient() -> None:
    time = timeline(Plan.parse("rank 0: 0F0 0I0 0F1 0I1 0W1 0W0"))
    assert time.live(0) == ((0, 1), (2, 2), (5, 1), (6, 0))


def test_an_evaluation_keeps_one_micro_batch() -> None:
    assert timeline(Plan.parse("rank 0: 0F0 0F1 0F2")).peak_live(0) == 1


@given(runnable_plans())
def test_peaks_depend_on_the_order_alone(plan: Plan) -> None:
    peaks = [
        [timeline(plan, costs).peak_live(rank) for rank in range(plan.num_ranks)] for costs in (Costs(), Costs(0, 0, 0))
    ]
    assert peaks[0] == peaks[1]


number = st.integers(0, 9) | st.fractions(0, 9) | st.floats(0, 9, allow_nan=False)


@given(runnable_plans(), number, number, number)
def test_csv_keeps_every_time_exactly(plan: Plan, forward: float, backward: float, transfer: float) -> None:
    time = timeline(plan, Costs(forward, backward, transfer=transfer))
    back = Timeline.from_csv(time.to_csv())
    assert back == time
    assert [type(a.stop) for a in back.spans] == [type(b.stop) for b in time.spans] or Fraction in map(
        type, [forward, backward, transfer]
    )


def test_scaling_keeps_the_bubble() -> None:
    time = timeline(one_f_one_b(2, 3))
    assert time.scaled(Fraction(1, 7)).duration == Fraction(12, 7)
    assert time.scaled(Fraction(1, 7)).bubble_fraction == time.bubble_fraction


def test_wrong_timelines_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one span"):
        Timeline(())
    with pytest.raises(UsageError, match="0F0 of rank 0 starts at 2.0, but stops at 1.0"):
        Timeline(spans("0F0 2 1"))
    with pytest.raises(UsageError, match="starts with rank,action,start,stop; got a,b"):
        Timeline.from_csv("a,b\n1,2\n")

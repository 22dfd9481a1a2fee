from __future__ import annotations

from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_group_sharded.errors import UsageError
from paddle_group_sharded.pipeline.action import Action, Plan
from paddle_group_sharded.pipeline.lowering import add_grad_reduce, add_transfers
from paddle_group_sharded.pipeline.schedules import one_f_one_b
from paddle_group_sharded.pipeline.simulate import Costs, ScheduleError, check, timeline
from unittests.pipeline.cases import dependencies, is_split, runnable_plans, scheduled_plans, shuffled_plans


def predecessors(plan: Plan) -> dict[Action, list[Action]]:
    """Of each compute: the one before it on its rank, and all that it depends on."""
    split = is_split(plan)
    found = {}
    for row in plan.actions:
        for before, action in zip((None, *row), row):
            found[action] = list(dependencies(action, plan.num_virtual_stages, split))
            if before is not None:
                found[action].append(before)
    return found


def has_cycle(edges: dict[Action, list[Action]]) -> bool:
    left = dict(edges)
    while left:
        free = [action for action, before in left.items() if not any(b in left for b in before)]
        if not free:
            return True
        for action in free:
            del left[action]
    return False


@given(runnable_plans() | scheduled_plans())
def test_what_can_run_is_accepted(plan: Plan) -> None:
    check(plan)
    check(add_transfers(plan))
    check(add_grad_reduce(add_transfers(plan)))


@given(shuffled_plans())
def test_a_plan_is_refused_exactly_if_its_dependencies_run_in_a_circle(plan: Plan) -> None:
    if has_cycle(predecessors(plan)):
        with pytest.raises(ScheduleError):
            check(plan)
    else:
        check(plan)


cost = st.integers(0, 5) | st.fractions(0, 3, max_denominator=4)


@given(runnable_plans() | scheduled_plans(), st.data())
def test_times_are_those_of_the_longest_path(plan: Plan, data: st.DataObject) -> None:
    per_stage = st.lists(cost, min_size=plan.num_virtual_stages, max_size=plan.num_virtual_stages)
    costs = Costs(data.draw(per_stage), data.draw(cost), data.draw(per_stage), data.draw(cost))
    before = predecessors(plan)

    @cache
    def stop(action: Action) -> Fraction:
        def ready(source: Action) -> Fraction:
            crosses = plan.stage_to_rank[source.stage] != plan.stage_to_rank[action.stage]
            return stop(source) + (costs.transfer if crosses else 0)

        letters = {"F": [costs.forward], "B": [costs.input_grad, costs.weight_grad]}
        letters |= {"I": [costs.input_grad], "W": [costs.weight_grad]}
        own = [c[action.stage] if isinstance(c, list) else c for c in letters[action.kind.value]]
        return max(map(ready, before[action]), default=Fraction(0)) + sum(own)

    spans = timeline(plan, costs).spans
    assert {span.action: span.stop for span in spans} == {action: stop(action) for action in before}
    assert all(plan.stage_to_rank[span.action.stage] == span.rank for span in spans)


@given(scheduled_plans(), cost)
def test_lowering_does_not_change_the_times(plan: Plan, transfer: Fraction) -> None:
    costs = Costs(transfer=transfer)
    lowered = add_grad_reduce(add_transfers(plan)) if plan.has_backward else add_transfers(plan)
    spans = timeline(lowered, costs).spans
    assert [s for s in spans if s.action.kind.is_compute] == list(timeline(plan, costs).spans)
    assert len(spans) == sum(map(len, lowered.actions))


def refusal(text: str) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(Plan.parse(text))
    return str(caught.value)


def test_a_deadlock_is_shown_with_who_waits_for_whom() -> None:
    assert refusal("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1") == (
        "the plan cannot end: rank 0 waits for ever\n"
        "  rank 0: 0F0 0SEND_F0 >>0RECV_B0<< 0B0 0F1 0SEND_F1 0RECV_B1 0B1\n"
        "          waits for 1SEND_B0 of rank 1, which itself waits at 1RECV_F1\n"
        "  rank 1: 1RECV_F0 1F0 >>1RECV_F1<< 1F1 1B0 1SEND_B0 1B1 1SEND_B1\n"
        "          waits for 0SEND_F1 of rank 0, which itself waits at 0RECV_B0"
    )


def test_groups_of_micro_batches_that_are_smaller_than_the_stages_deadlock() -> None:
    # the usual interleaved order of 7 micro-batches over 5 ranks with 2 chunks, the last group having only 2
    groups = (range(5), range(5, 7))
    forwards = [(chunk, batch) for group in groups for chunk in range(2) for batch in group]
    rows = []
    for rank in range(5):
        ahead = min(5 + 2 * (4 - rank), len(forwards))
        row = [f"{chunk * 5 + rank}F{batch}" for chunk, batch in forwards[:ahead]]
        for step, (chunk, batch) in enumerate(forwards):
            row += [f"{c * 5 + rank}F{m}" for c, m in forwards[ahead + step : ahead + step + 1]]
            row.append(f"{(1 - chunk) * 5 + rank}B{batch}")
        rows.append(f"rank {rank}: {' '.join(row)}")
    assert "waits for ever" in refusal("\n".join(rows))


def test_long_rows_are_shown_around_the_step_only() -> None:
    first = " ".join([f"0F{m}" for m in range(30)] + [f"0B{m}" for m in range(30)])
    last = " ".join([f"1B{m}" if m == 20 else f"1F{m} 1B{m}" for m in range(30)]) + " 1F20"
    assert refusal(f"rank 0: {first}\nrank 1: {last}").splitlines()[2:] == [
        "  rank 1: ... 1B18 1SEND_B18 1RECV_F19 1F19 1B19 1SEND_B19 >>1B20<< "
        "1SEND_B20 1RECV_F20 1RECV_F21 1F21 1B21 1SEND_B21 ...",
        "          needs 1F20 before it",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: 0F0 0B0 0F1", "expected 0F1 0B1 or 0F1 0I1 0W1 for stage 0 and micro-batch 1; got 0F1"),
        ("rank 0: 0F0 0I0 0W0 0B0", "got 0F0 0B0 0I0 0W0"),
        ("rank 0: 0F0 0I0", "expected 0F0 0B0 or 0F0 0I0 0W0 .* got 0F0 0I0"),
        ("rank 0: 0F0 0B0 0F0", "0F0 stands 2 times"),
        ("rank 0: 0B0 0F0", "0B0 of rank 0 comes too early(.|\n)*>>0B0<< 0F0\n +needs 0F0 before it"),
        ("rank 0: 0F0 0W0 0I0", "0W0 of rank 0 comes too early(.|\n)*needs 0I0"),
        ("rank 0: 0F0 1F0 0B0 1B0", "0B0 of rank 0 comes too early(.|\n)*needs 1B0"),
        ("rank 0: 0F0 0REDUCE 0B0", "0REDUCE of rank 0 comes too early(.|\n)*needs 0B0"),
        (
            "rank 0: 0F0 0SEND_F0 0I0 0W0\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0",
            "0I0 of rank 0 .*early(.|\n)*needs 0RECV_B0",
        ),
        ("rank 0: 0F0 0SEND_F0\nrank 1: 1F0", "1F0 of rank 1 comes too early(.|\n)*needs 1RECV_F0"),
        ("rank 0: 0F0 0SEND_F0 0F1 0SEND_F1\nrank 1: 1RECV_F0 1F0 1F1", "1F1 of rank 1 comes too early"),
        ("rank 0: 0F0\nrank 1: 1RECV_F0 1F0", "waits for 0SEND_F0, which rank 0 does not have; add it there"),
        ("rank 0: 0SEND_F0 0F0\nrank 1: 1RECV_F0 1F0", "0SEND_F0 of rank 0 comes too early(.|\n)*needs 0F0"),
        (
            "rank 0: 0F0 0F1 0SEND_F1 0SEND_F0\nrank 1: 1RECV_F0 1F0 1RECV_F1 1F1",
            "1RECV_F0 of rank 1 is not the next message(.|\n)*finds 0SEND_F1 at the head of the channel from rank 0",
        ),
        ("rank 0: 0F0 0SEND_F0 0SEND_B0", "0SEND_F0 has nobody at its other end"),
        ("rank 0: 0RECV_B0 0F0", "0RECV_B0 has nobody at its other end"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(Plan.parse(text))


def test_timeline_refuses_what_check_refuses() -> None:
    with pytest.raises(ScheduleError, match="comes too early"):
        timeline(Plan.parse("rank 0: 0B0 0F0"))


def test_a_schedule_error_is_a_usage_error() -> None:
    assert issubclass(ScheduleError, UsageError)


def test_costs_fit_the_plan() -> None:
    with pytest.raises(UsageError, match="forward lists 3 costs, but the plan has 2 virtual stages"):
        timeline(one_f_one_b(2, 2), Costs(forward=[1, 2, 3]))


def test_costs_of_a_rank_are_shared_by_its_chunks() -> None:
    costs = Costs.per_rank(4, 1, [1, 2, 3, 4], 2, transfer=1)
    assert costs == Costs(Fraction(1, 4), [1, 2, 3, 4], Fraction(1, 2), 1)


def test_a_slow_stage_sets_the_pace() -> None:
    # at least the slow stage's own work, and one micro-batch's way there and back: a closed form for one slow stage
    time = timeline(one_f_one_b(3, 8), Costs([1, 4, 1], [1, 4, 1], [1, 4, 1]))
    assert time.duration == 8 * 12 + 1 + 2


def test_times_of_floats_are_floats() -> None:
    assert isinstance(timeline(one_f_one_b(2, 2), Costs(0.5, 0.5, 0.5)).bubble_fraction, float)

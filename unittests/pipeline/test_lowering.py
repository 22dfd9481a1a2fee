from __future__ import annotations

import re

import pytest
from hypothesis import given

from paddle_group_sharded.errors import UsageError
from paddle_group_sharded.pipeline.action import Action, Kind, Plan
from paddle_group_sharded.pipeline.lowering import add_grad_reduce, add_transfers
from paddle_group_sharded.pipeline.schedules import one_f_one_b
from unittests.pipeline.cases import dependencies, is_split, runnable_plans, scheduled_plans


def without(plan: Plan, *patterns: str) -> str:
    """A plan's text without the actions that match."""
    return re.sub(r" ?\d+(" + "|".join(patterns) + r")\d*", "", str(plan)).replace(":", ": ").replace(":  ", ": ")


def test_two_stages_by_hand() -> None:
    plan = add_grad_reduce(add_transfers(one_f_one_b(2, 2)))
    assert str(plan) == (
        "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE\n"
        "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE"
    )


def test_stages_of_one_rank_hand_over_without_a_transfer() -> None:
    plan = Plan.parse("rank 0: 0F0 1F0 1B0 0B0")
    assert add_transfers(plan) == plan


def test_what_was_sent_first_is_received_first_even_if_it_is_needed_later() -> None:
    plan = add_transfers(Plan.parse("rank 0: 0F0 0F1\nrank 1: 1F1 1F0"))
    assert str(plan).splitlines()[1] == "rank 1: 1RECV_F0 1RECV_F1 1F1 1F0"


@given(scheduled_plans() | runnable_plans())
def test_transfers_are_those_that_cross_ranks_and_all_else_stays(plan: Plan) -> None:
    lowered = add_transfers(plan)
    assert without(lowered, "SEND_F", "SEND_B", "RECV_F", "RECV_B") == str(plan)
    holder, split = plan.stage_to_rank, is_split(plan)
    crossing = {
        (source, action)
        for row in plan.actions
        for action in row
        for source in dependencies(action, plan.num_virtual_stages, split)
        if holder[source.stage] != holder[action.stage]
    }
    sends = [a for row in lowered.actions for a in row if a.kind.is_send]
    receives = [a for row in lowered.actions for a in row if a.kind.is_recv]
    assert len(sends) == len(receives) == len(crossing)
    assert {a.counterpart for a in sends} == set(receives)


@given(scheduled_plans() | runnable_plans())
def test_both_ends_of_a_channel_have_the_same_order(plan: Plan) -> None:
    lowered = add_transfers(plan)
    for source in range(plan.num_ranks):
        for target in range(plan.num_ranks):
            sent = [a for a in lowered.actions[source] if a.kind.is_send and lowered.peer(a) == target]
            received = [a for a in lowered.actions[target] if a.kind.is_recv and lowered.peer(a) == source]
            assert [a.counterpart for a in sent] == received


@given(scheduled_plans())
def test_each_stage_is_reduced_once_after_its_last_gradient(plan: Plan) -> None:
    lowered = add_grad_reduce(plan)
    assert without(lowered, "REDUCE") == str(plan)
    for row in lowered.actions:
        for stage in {action.stage for action in row}:
            of_stage = [action for action in row if action.stage == stage]
            reduces = [action for action in of_stage if action.kind is Kind.REDUCE]
            assert reduces == ([Action(stage, Kind.REDUCE, None)] if plan.has_backward else [])
            assert not reduces or of_stage[-1] is reduces[0]


def test_the_passes_may_come_in_either_order() -> None:
    plan = one_f_one_b(3, 4)
    assert add_grad_reduce(add_transfers(plan)) == add_transfers(add_grad_reduce(plan))


def test_a_pass_is_not_applied_twice() -> None:
    plan = add_grad_reduce(add_transfers(one_f_one_b(2, 2)))
    with pytest.raises(UsageError, match="transfers already"):
        add_transfers(plan)
    with pytest.raises(UsageError, match="reduces gradients already"):
        add_grad_reduce(plan)

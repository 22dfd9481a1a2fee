from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_group_sharded.errors import UsageError
from paddle_group_sharded.pipeline.action import Action, Kind, Plan, round_robin
from paddle_group_sharded.pipeline.lowering import add_grad_reduce, add_transfers
from unittests.pipeline.cases import runnable_plans, scheduled_plans

with_micro_batch = st.sampled_from([kind for kind in Kind if kind is not Kind.REDUCE])


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(2, Kind.F, 0), "2F0"),
        (Action(0, Kind.B, 13), "0B13"),
        (Action(11, Kind.I, 2), "11I2"),
        (Action(1, Kind.SEND_F, 0), "1SEND_F0"),
        (Action(1, Kind.RECV_B, 3), "1RECV_B3"),
        (Action(2, Kind.REDUCE, None), "2REDUCE"),
    ],
)
def test_action_has_a_text_form(action: Action, text: str) -> None:
    assert str(action) == repr(action) == text
    assert Action.parse(f" {text} ") == action


@given(st.builds(Action, st.integers(0, 999), with_micro_batch, st.integers(0, 999)))
def test_parse_inverts_str(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2REDUCE0", "2f0", "-1F0", "2F0F1", "2SEND0"])
def test_other_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="such as 2F0"):
        Action.parse(text)


def test_kinds_are_compute_or_transfer_or_reduce() -> None:
    assert [k.value for k in Kind if k.is_compute] == ["F", "B", "I", "W"]
    assert [k.value for k in Kind if k.is_send] == ["SEND_F", "SEND_B"]
    assert [k.value for k in Kind if k.is_recv] == ["RECV_F", "RECV_B"]


@pytest.mark.parametrize(("send", "recv"), [("1SEND_F4", "2RECV_F4"), ("2SEND_B4", "1RECV_B4")])
def test_the_ends_of_a_transfer_name_each_other(send: str, recv: str) -> None:
    assert Action.parse(send).counterpart == Action.parse(recv)
    assert Action.parse(recv).counterpart == Action.parse(send)


def test_a_compute_has_no_counterpart() -> None:
    with pytest.raises(UsageError, match="2F0"):
        _ = Action(2, Kind.F, 0).counterpart


def test_chunks_are_dealt_in_turns() -> None:
    assert round_robin(3, 2) == (0, 1, 2, 0, 1, 2)


@given(scheduled_plans() | runnable_plans(), st.booleans())
def test_plans_survive_text_and_csv(plan: Plan, lower: bool) -> None:
    if lower:
        plan = add_grad_reduce(add_transfers(plan))
    assert Plan.parse(str(plan)) == plan
    assert Plan.from_csv(plan.to_csv()) == plan


def test_text_may_have_comments_and_ranks_in_any_order() -> None:
    plan = Plan.parse("# two stages\n\nrank 1: 1F0 1B0  # the last\nrank 0: 0F0 0B0\n")
    assert str(plan) == "rank 0: 0F0 0B0\nrank 1: 1F0 1B0"
    assert (plan.num_ranks, plan.num_virtual_stages, plan.num_micro_batches) == (2, 2, 1)


def test_csv_may_be_padded_to_a_grid() -> None:
    assert str(Plan.from_csv("0F0,,,0B0\n,1F0,1B0,\n")) == "rank 0: 0F0 0B0\nrank 1: 1F0 1B0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: 0F0\nrank 0: 1F0", "line 2.*once per rank"),
        ("0F0 0B0", "line 1.*rank <n>"),
        ("rank 0: 0F0\nrank 2: 1F0", r"ranks.*without gaps; got \[0, 2\]"),
        ("rank 0: 0F0 2F0", r"stages.*got \[0, 2\]"),
        ("rank 0: 0F0 0F2", r"micro-batches.*got \[0, 2\]"),
        ("rank 0: 0F0\nrank 1: 0F1", "0F1 stands on rank 1, but stage 0 is held by rank 0"),
        ("rank 0: 0F0\nrank 1:", "rank 1 of the plan has no actions"),
        ("", "without gaps"),
    ],
)
def test_malformed_plans_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Action(0, Kind.F, 1), "micro-batches go from 0 to 0"),
        (Action(1, Kind.F, 0), "stages go from 0 to 0"),
        (Action(0, Kind.F, None), "REDUCE"),
        (Action(0, Kind.REDUCE, 0), "REDUCE"),
    ],
)
def test_a_plan_checks_its_actions(action: Action, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Plan(((Action(0, Kind.F, 0), action),), (0,), 1)


def test_a_plan_has_work_for_all_that_it_announces() -> None:
    with pytest.raises(UsageError, match="2 stages and 1 micro-batches"):
        Plan(((Action(0, Kind.F, 0),),), (0, 0), 1)


def test_peer_is_none_where_nothing_is_transferred() -> None:
    v_shaped = Plan.parse("rank 0: 0F0 3F0\nrank 1: 1F0 2F0")
    peers = {
        text: v_shaped.peer(Action.parse(text)) for text in ("0SEND_F0", "1SEND_F0", "3SEND_F0", "0RECV_F0", "2SEND_F0")
    }
    assert peers == {"0SEND_F0": 1, "1SEND_F0": None, "3SEND_F0": None, "0RECV_F0": None, "2SEND_F0": 0}
    assert v_shaped.stages_of(0) == (0, 3)

"""Passes from a plan to a plan with more said: what is sent and received, and when gradients are reduced."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from types import MappingProxyType
from typing import Optional

from ..errors import UsageError
from .action import Action, Kind, Plan

__all__ = ["add_transfers", "add_grad_reduce"]

_SENDS = MappingProxyType({Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B})
_RECEIVES = MappingProxyType({Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B})


def add_transfers(plan: Plan) -> Plan:
    """Add the sends and receives that a plan of compute actions implies.

    A send follows the compute that makes the message.  A receive stands right before the compute that needs the
    message.  All messages from one rank to another, activations and gradients alike, pass one first-in first-out
    channel, so whatever was sent earlier on it is received earlier too, even if it is needed later.  That adds no
    waiting: a message cannot arrive before those sent ahead of it.
    """
    if plan.has_transfers:
        raise UsageError("the plan has transfers already; give add_transfers a plan of compute actions only")
    channels: dict[tuple[int, int], deque[Action]] = defaultdict(deque)  # receives, in the order of the sends
    for rank, row in enumerate(plan.actions):
        for send in filter(None, (_send_after(plan, action) for action in row)):
            channels[rank, _peer(plan, send)].append(send.counterpart)
    return replace(plan, actions=tuple(_with_transfers(plan, rank, channels) for rank in range(plan.num_ranks)))


def _with_transfers(plan: Plan, rank: int, channels: dict[tuple[int, int], deque[Action]]) -> tuple[Action, ...]:
    lowered: list[Action] = []
    received: set[Action] = set()
    for action in plan.actions[rank]:
        need = _recv_before(plan, action)
        if need is not None:
            channel = channels[_peer(plan, need), rank]
            while need not in received and channel:  # an empty channel is a plan without the send; check() says so
                lowered.append(channel.popleft())
                received.add(lowered[-1])
        lowered.append(action)
        send = _send_after(plan, action)
        if send is not None:
            lowered.append(send)
    return tuple(lowered)


def add_grad_reduce(plan: Plan) -> Plan:
    """Add ``REDUCE`` where the sum of a stage's gradients over replicas may begin.

    That is after the stage's last weight gradient; and after its last send, for which another rank waits.
    """
    if any(action.kind is Kind.REDUCE for row in plan.actions for action in row):
        raise UsageError("the plan reduces gradients already; give add_grad_reduce a plan without REDUCE")
    ends = (Kind.B, Kind.W, Kind.SEND_B)
    rows = []
    for row in plan.actions:
        last = {action.stage: index for index, action in enumerate(row) if action.kind in ends}
        lowered: list[Action] = []
        for index, action in enumerate(row):
            lowered.append(action)
            if last.get(action.stage) == index:
                lowered.append(Action(action.stage, Kind.REDUCE, None))
        rows.append(tuple(lowered))
    return replace(plan, actions=tuple(rows))


def _send_after(plan: Plan, action: Action) -> Optional[Action]:
    """What is sent once ``action`` has run, if anything."""
    return _if_crossing(plan, action, _SENDS.get(action.kind))


def _recv_before(plan: Plan, action: Action) -> Optional[Action]:
    """What has to be received before ``action`` can run, if anything."""
    return _if_crossing(plan, action, _RECEIVES.get(action.kind))


def _if_crossing(plan: Plan, action: Action, kind: Optional[Kind]) -> Optional[Action]:
    if kind is None:
        return None
    transfer = Action(action.stage, kind, action.micro_batch)
    return None if plan.peer(transfer) is None else transfer


def _peer(plan: Plan, transfer: Action) -> int:
    rank = plan.peer(transfer)
    if rank is None:
        raise UsageError(f"{transfer} crosses no rank boundary")
    return rank

"""Run a plan without processes: prove that it cannot deadlock, and predict when everything happens.

The model is that of the runner.  Ranks take their actions in order.  Each ordered pair of ranks has one first-in
first-out channel.  A send puts its message there and goes on; a receive waits for the message at the channel's head.
In such a network no choice and no timing can change what anyone receives, so one execution that reaches the end
proves that every execution does.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Optional, Union

from ..errors import UsageError
from .action import Action, Kind, Plan
from .lowering import add_transfers
from .timeline import Number, Span, Timeline

__all__ = ["Costs", "ScheduleError", "check", "timeline"]

Cost = Union[Number, Sequence[Number]]


class ScheduleError(UsageError):
    """A plan that cannot run; the message shows every rank's actions with the step marked and what it waits for."""


@dataclass(frozen=True)
class Costs:
    """Time of one micro-batch in one virtual stage: one number for all stages, or one number per virtual stage.

    A whole backward costs ``input_grad + weight_grad``.  Whole numbers and fractions give exact timelines.
    """

    forward: Cost = 1
    input_grad: Cost = 1
    weight_grad: Cost = 1
    transfer: Number = 0  # from the send until the message can be received; the sender goes on meanwhile

    @classmethod
    def per_rank(
        cls, num_chunks: int, forward: Cost = 1, input_grad: Cost = 1, weight_grad: Cost = 1, transfer: Number = 0
    ) -> Costs:
        """Costs whose single numbers are of a whole rank, and are dealt out to its chunks in equal parts."""
        share = Fraction(1, num_chunks)
        f, i, w = (cost if isinstance(cost, Sequence) else cost * share for cost in (forward, input_grad, weight_grad))
        return cls(f, i, w, transfer)

    def check_fits(self, plan: Plan) -> None:
        """Raise :class:`UsageError` if costs are listed for another number of virtual stages than the plan has."""
        for name in ("forward", "input_grad", "weight_grad"):
            cost = getattr(self, name)
            if isinstance(cost, Sequence) and len(cost) != plan.num_virtual_stages:
                raise UsageError(
                    f"{name} lists {len(cost)} costs, but the plan has {plan.num_virtual_stages} virtual stages; give "
                    f"one cost for each, or a single number"
                )

    def of(self, action: Action) -> Number:
        """Time that ``action`` keeps its rank busy; nothing for transfers and reductions."""
        if action.kind is Kind.B:
            return self._at(self.input_grad, action) + self._at(self.weight_grad, action)
        if not action.kind.is_compute:
            return 0
        by_kind = {Kind.F: self.forward, Kind.I: self.input_grad, Kind.W: self.weight_grad}
        return self._at(by_kind[action.kind], action)

    @staticmethod
    def _at(cost: Cost, action: Action) -> Number:
        return cost[action.stage] if isinstance(cost, Sequence) else cost


def check(plan: Plan) -> None:
    """Prove that ``plan`` runs to its end and computes every micro-batch once, or raise :class:`ScheduleError`.

    Proved are: every forward stands once and, unless the plan only evaluates, every backward once, whole or split;
    each action finds what it needs; both ends of each channel agree on the order of messages; nobody waits for ever.
    So no message is left over either, since each has one compute that needs it.  A plan without transfers is
    checked as :func:`.lowering.add_transfers` completes it.
    """
    _Machine(plan, Costs()).run()


def timeline(plan: Plan, costs: Optional[Costs] = None) -> Timeline:
    """Predict when each action runs.  Raises :class:`ScheduleError` where :func:`check` does.

    Transfers are spans of the timeline if the plan has them; their times count either way.
    """
    costs = costs or Costs()
    costs.check_fits(plan)
    spans = _Machine(plan, costs).run()
    planned = {action for row in plan.actions for action in row}
    return Timeline(tuple(span for span in spans if span.action in planned))


class _Machine:
    """One execution of a plan: a program counter and a clock per rank, a queue per ordered pair of ranks."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan = plan if plan.has_transfers else add_transfers(plan)
        self.costs = costs
        self.position = [0] * plan.num_ranks
        self.clock: list[Number] = [0] * plan.num_ranks
        self.channels: dict[tuple[int, int], deque[tuple[Action, Number]]] = defaultdict(deque)
        self.present = Counter(action for row in self.plan.actions for action in row)
        self.done: set[Action] = set()
        self.spans: list[Span] = []

    def run(self) -> list[Span]:
        """Execute to the end; the spans come in an order in which they could have run one by one."""
        self._check_complete()
        while any([self._advance(rank) for rank in range(self.plan.num_ranks)]):
            pass
        waiting = [rank for rank, row in enumerate(self.plan.actions) if self.position[rank] < len(row)]
        if waiting:
            notes = {rank: self._what_it_waits_for(rank) for rank in waiting}
            raise self._error(f"the plan cannot end: rank {waiting[0]} waits for ever", notes)
        return self.spans

    def _advance(self, rank: int) -> bool:
        """Run ``rank`` until it has to wait or ends; whether it moved."""
        row, before = self.plan.actions[rank], self.position[rank]
        while self.position[rank] < len(row) and self._take(rank, row[self.position[rank]]):
            self.position[rank] += 1
        return self.position[rank] > before

    def _take(self, rank: int, action: Action) -> bool:
        """Run one action, or return False where it has to wait."""
        for need in self._needs(action):
            if need not in self.done:
                raise self._error(f"{action} of rank {rank} comes too early", {rank: f"needs {need} before it"})
        start = self.clock[rank]
        stop = start + self.costs.of(action)
        if action.kind.is_recv:
            source = self._peer(action)
            queue = self.channels[source, rank]
            if not queue:
                return False
            send, arrival = queue.popleft()
            if send != action.counterpart:
                note = f"finds {send} at the head of the channel from rank {source}"
                raise self._error(f"{action} of rank {rank} is not the next message", {rank: note})
            stop = max(start, arrival)
        elif action.kind.is_send:
            self.channels[rank, self._peer(action)].append((action, stop + self.costs.transfer))
        self.clock[rank] = stop
        self.done.add(action)
        self.spans.append(Span(rank, action, start, stop))
        return True

    def _needs(self, action: Action) -> list[Action]:
        """What the same rank must have done before ``action``."""
        stage, kind, batch = action
        if kind is Kind.F:
            return self._needs_tensor(Action(stage, Kind.RECV_F, batch), stage - 1, Kind.F)
        if kind in (Kind.B, Kind.I):
            recv, later = Action(stage, Kind.RECV_B, batch), self._backward(stage + 1, batch)
            return [Action(stage, Kind.F, batch), *self._needs_tensor(recv, stage + 1, later)]
        if kind is Kind.W:
            return [Action(stage, Kind.I, batch)]
        if kind is Kind.SEND_F:
            return [Action(stage, Kind.F, batch)]
        if kind is Kind.SEND_B:
            return [Action(stage, self._backward(stage, batch), batch)]
        if kind is Kind.REDUCE:
            return [a for a in self.present if a.stage == stage and a.kind in (Kind.B, Kind.W)]
        return []

    def _needs_tensor(self, recv: Action, neighbour: int, kind: Kind) -> list[Action]:
        if self.plan.peer(recv) is not None:
            return [recv]
        if 0 <= neighbour < self.plan.num_virtual_stages:  # a stage of the same rank hands it over
            return [Action(neighbour, kind, recv.micro_batch)]
        return []

    def _backward(self, stage: int, batch: Optional[int]) -> Kind:
        """Which action makes the gradient of the stage's input."""
        return Kind.I if Action(stage, Kind.I, batch) in self.present else Kind.B

    def _peer(self, transfer: Action) -> int:
        rank = self.plan.peer(transfer)
        if rank is None:
            raise ScheduleError(f"{transfer} has nobody at its other end; remove it from the plan")
        return rank

    def _check_complete(self) -> None:
        twice = [action for action, count in self.present.items() if count > 1]
        if twice:
            raise ScheduleError(f"each action stands once in a plan; {twice[0]} stands {self.present[twice[0]]} times")
        have: dict[tuple[int, Optional[int]], set[Kind]] = defaultdict(set)
        for action in self.present:
            if action.kind.is_compute:
                have[action.stage, action.micro_batch].add(action.kind)
        allowed = [{Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}] if self.plan.has_backward else [{Kind.F}]
        for place in product(range(self.plan.num_virtual_stages), range(self.plan.num_micro_batches)):
            if have[place] not in allowed:
                raise ScheduleError(_incomplete(*place, have[place], allowed))

    def _what_it_waits_for(self, rank: int) -> str:
        action = self.plan.actions[rank][self.position[rank]]
        send, source = action.counterpart, self._peer(action)
        if send not in self.present:
            return f"waits for {send}, which rank {source} does not have; add it there"
        at = self.plan.actions[source][self.position[source]]
        return f"waits for {send} of rank {source}, which itself waits at {at}"

    def _error(self, headline: str, notes: Mapping[int, str]) -> ScheduleError:
        lines = [headline]
        for rank, row in enumerate(self.plan.actions):
            lines.append(f"  rank {rank}: {_window(row, self.position[rank])}")
            if rank in notes:
                lines.append(f"          {notes[rank]}")
        return ScheduleError("\n".join(lines))


def _incomplete(stage: int, batch: int, have: set[Kind], allowed: list[set[Kind]]) -> str:
    def names(kinds: set[Kind]) -> str:
        return " ".join(str(Action(stage, kind, batch)) for kind in Kind if kind in kinds) or "nothing"

    return f"expected {' or '.join(map(names, allowed))} for stage {stage} and micro-batch {batch}; got {names(have)}"


def _window(row: Sequence[Action], position: int, reach: int = 6) -> str:
    """The actions around ``position``, which is marked."""
    first, last = max(0, position - reach), min(len(row), position + reach + 1)
    words = [f">>{row[i]}<<" if i == position else str(row[i]) for i in range(first, last)]
    return " ".join(["..."] * (first > 0) + words + ["..."] * (last < len(row)) + ["(end)"] * (position == len(row)))

"""When gradients are reduced: in rounds, one per backward pass, in one order that all ranks share.

A round is open from the first group that is ready to the last one that is issued.  A group is ready when Paddle has
accumulated the gradient of each of its parameters; it is issued as soon as all groups before it in the order are.  What
a backward pass did not reach (unused, branching) is settled with zeros at the next fixed point: the next forward of the
model, a step, or clear_grad.  So every rank issues the same list, whatever its data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ..comm.base import Comm, Work
from .group import ParamGroup
from .param import ShardedParam

__all__ = ["GradReducer"]

MAX_IN_FLIGHT = 2  # reductions whose full gradients may be alive at once


class GradReducer:
    """Issues the reductions of one model."""

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        comm: Comm,
        dp_comm: Comm,
        on_complete: Callable[[ParamGroup], None],
    ) -> None:
        """Reduce over ``comm``, then average over ``dp_comm`` too; ``on_complete`` is told of each finished group."""
        self.enabled = True  # False inside no_sync()
        self.synchronous = False  # wait for each reduction where it is issued
        self._order = list(reversed(groups))  # backward meets the last layers first, until it is known better
        self._comm = comm
        self._dp_comm = dp_comm
        self._on_complete = on_complete
        self._ready: dict[ParamGroup, set[int]] = {}
        self._expected: dict[ParamGroup, int] = {}
        self._issued: set[ParamGroup] = set()
        self._in_flight: deque[tuple[Work, ParamGroup]] = deque()
        self._unreplicated: dict[ParamGroup, None] = {}  # reduced, but not yet averaged over dp_comm
        self._rounds = 0  # issued since the last finish()
        self._observed: list[ParamGroup] = []  # in which order the first backward completed them
        self._order_agreed = False

    @property
    def round_open(self) -> bool:
        """Whether some gradients of a backward pass wait for others."""
        return bool(self._ready or self._issued)

    def mark_ready(self, param: ShardedParam) -> None:
        """The gradient of ``param`` has been accumulated in this backward pass."""
        group = param.group
        if group not in self._expected:
            self._expected[group] = sum(member.expects_grad for member in group.params)
        ready = self._ready.setdefault(group, set())
        ready.add(param.index)
        if len(ready) < self._expected[group]:
            return
        self._on_complete(group)
        if not self.enabled:
            self._ready.pop(group)
            return
        if not self._order_agreed and group not in self._observed:
            self._observed.append(group)
        self._advance()

    def _complete(self, group: ParamGroup) -> bool:
        return len(self._ready.get(group, ())) == self._expected.get(group, -1)

    def _advance(self) -> None:
        """Issue what is ready and next in the order."""
        waiting = [group for group in self._order if group not in self._issued and group.expects_grad]
        for group in waiting:
            if not self._complete(group):
                return
            self._issue(group)
        self._end_round()

    def _issue(self, group: ParamGroup) -> None:
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            self._absorb_oldest()
        self._in_flight.append((group.reduce(), group))
        self._issued.add(group)
        self._ready.pop(group, None)
        if self.synchronous:
            self._absorb_oldest()

    def _absorb_oldest(self) -> None:
        work, group = self._in_flight.popleft()
        overlaps = work.wait()
        group.absorb(overlaps, 1.0 / self._comm.world_size)
        self._unreplicated[group] = None

    def _end_round(self) -> None:
        self._issued.clear()
        self._ready.clear()
        self._expected.clear()
        self._rounds += 1

    def settle(self) -> None:
        """Close the round: issue every group that is left, with zeros for what was not reached.  Collective."""
        for group in self._order:
            if group not in self._issued and group.expects_grad:
                self._issue(group)
        self._end_round()

    def finish(self, unsynchronized: bool) -> None:
        """Make every gradient final.  Collective.

        A round is added where none was issued since the last call, or where ``unsynchronized`` says that local
        gradients were kept back; every rank gives the same value.
        """
        if self.round_open or self._rounds == 0 or unsynchronized:
            self.settle()
        while self._in_flight:
            self._absorb_oldest()
        if self._dp_comm.world_size > 1:
            self._average_over_replicas()
        self._agree_order()

    def _average_over_replicas(self) -> None:
        """The replicas' sums become one average; averaging what is averaged already changes nothing."""
        for group in self._order:
            if group not in self._unreplicated:
                continue
            grads = group.grad_storage
            works = [self._dp_comm.all_reduce(grad, f"average {group.name}") for grad in grads]
            for work, grad in zip(works, grads):
                work.wait()
                grad.scale_(1.0 / self._dp_comm.world_size)
        self._unreplicated.clear()

    def _agree_order(self) -> None:
        """After the first step's backward, take rank 0's order of completion as everyone's."""
        if self._order_agreed:
            return
        rank0: list[str] = self._comm.exchange([group.name for group in self._observed], "order of reductions")[0]
        position = {name: index for index, name in enumerate(rank0)}
        self._order.sort(key=lambda group: position.get(group.name, len(position)))
        self._order_agreed = True
        self._observed.clear()

    def next_step(self) -> None:
        """The step has used the gradients."""
        self._rounds = 0

    def abandon(self) -> None:
        """Forget what is under way, because the gradients are dropped.  Collective where a round is open."""
        if self.round_open:
            self.settle()
        while self._in_flight:
            self._in_flight.popleft()[0].wait()
        self._unreplicated.clear()
        self._rounds = 0

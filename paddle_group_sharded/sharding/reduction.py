"""When gradients are reduced: in rounds, one per backward pass, in one order that all ranks share.

A round is open from the first group that is ready to the last one that is issued.  A group is ready when Paddle has
accumulated the gradient of each of its parameters; it is issued as soon as all groups before it in the order are.  What
a backward pass did not reach (unused, branching) is settled with zeros at the next fixed point: the next forward of the
model, no_sync(), a step, or clear_grad.  So every rank issues the same list, whatever its data.

A pass marks each parameter at most once, so the largest number of marks since the last fixed point is the number of
passes, and of rounds that every rank owes.  (A layer that recompute runs twice counts as two passes, everywhere.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ..comm.base import Comm, Work
from ..paddle_compat import has_grad
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
        on_round_end: Callable[[], None],
    ) -> None:
        """Reduce over ``comm``, then average over ``dp_comm`` too; ``on_complete`` is told of each finished group."""
        self.enabled = True  # False inside no_sync()
        self.kept_back = False  # no_sync() has left gradients that no round has reduced yet
        self.synchronous = False  # wait for each reduction where it is issued
        self._groups = list(groups)
        self._order = list(reversed(groups))  # backward meets the last layers first, until it is known better
        self._comm = comm
        self._dp_comm = dp_comm
        self._on_complete = on_complete
        self._on_round_end = on_round_end
        self._ready: dict[ParamGroup, set[int]] = {}
        self._kept: dict[ParamGroup, set[int]] = {}  # the same inside no_sync(), where nothing is issued
        self._marks: dict[ShardedParam, int] = {}  # since the last fixed point
        self._passes = 0  # the largest of them
        self._closed = 0  # rounds since the last fixed point
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
        return self._passes > self._closed

    def mark_ready(self, param: ShardedParam) -> None:
        """The gradient of ``param`` has been accumulated in this backward pass."""
        group = param.group
        if group not in self._expected:
            self._expected[group] = sum(member.expects_grad for member in group.params)
        ready = (self._ready if self.enabled else self._kept).setdefault(group, set())
        ready.add(param.index)
        if self.enabled:
            self._marks[param] = self._marks.get(param, 0) + 1
            self._passes = max(self._passes, self._marks[param])
        if len(ready) < self._expected[group]:
            return
        self._on_complete(group)
        if not self.enabled:
            self._kept.pop(group)
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
        if waiting:
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
        while self._in_flight:  # no full gradient outlives its backward pass
            self._absorb_oldest()
        self._issued.clear()
        self._rounds += 1
        self._closed += 1
        self.kept_back = False
        self._on_round_end()
        if self._ready:  # of groups that another pass has reached already
            self._advance()

    def _settle_round(self) -> None:
        for group in self._order:
            if group not in self._issued and group.expects_grad:
                self._issue(group)
        self._end_round()

    def settle(self) -> None:
        """A fixed point: close the rounds of all passes so far, with zeros for what was not reached.  Collective."""
        while self.round_open:
            self._settle_round()
        self._ready.clear()
        self._kept.clear()
        self._marks.clear()
        self._expected.clear()
        self._passes = self._closed = 0

    def finish(self) -> None:
        """Make every gradient final.  Collective.

        A round is added where none was issued since the last step, and for gradients that were kept local.
        """
        self.settle()
        if self._rounds == 0 or self.kept_back or not self.enabled or self._holds_local_grads():
            self._settle_round()
            self.settle()
        if self._dp_comm.world_size > 1:
            self._average_over_replicas()
        self._agree_order()

    def _holds_local_grads(self) -> bool:
        """Whether a backward pass has left gradients that no round has taken; where gradients are whole, each does."""
        return any(
            has_grad(param.tensor) for group in self._groups for param in group.params if param.expects_grad
        )

    def _average_over_replicas(self) -> None:
        """The replicas' sums become one average; averaging what is averaged already changes nothing."""
        for group in self._groups:  # the order of completion may differ between replicas
            if group not in self._unreplicated:
                continue
            grads = group.grad_storage
            for grad in grads:
                grad.scale_(1.0 / self._dp_comm.world_size)  # before the sum, which may overflow in float16
            works = [self._dp_comm.all_reduce(grad, f"average {group.name}") for grad in grads]
            for work in works:
                work.wait()
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
        self.settle()
        self._unreplicated.clear()
        self.kept_back = False
        self._rounds = 0

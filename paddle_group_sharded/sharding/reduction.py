"""When gradients are reduced: in one order that all ranks share.

Between two fixed points (a forward of the model, no_sync(), a step, clear_grad) each group is issued at most once.  It
is ready when Paddle has accumulated the gradient of each of its parameters, and is issued as soon as all groups before
it in the order are.  What the backward passes did not reach (unused, branching) is settled with zeros at the next fixed
point, so every rank issues the same list, whatever its data.

Gradients that come later (a second backward pass, a layer that recompute runs twice) stay with the parameters, as
inside no_sync(), for the next time that their group is issued.  Before a step the ranks agree on what is left, since
how often a layer was used may differ between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ..comm.base import Comm, Work
from ..paddle_compat import with_grad
from .group import ParamGroup
from .param import ShardedParam

__all__ = ["GradReducer"]

MAX_IN_FLIGHT = 2  # reductions whose full gradients may be alive at once


class GradReducer:
    """Issues the reductions of one model."""

    def __init__(
        self, groups: Sequence[ParamGroup], comm: Comm, dp_comm: Comm, on_round_end: Callable[[], None]
    ) -> None:
        """Reduce over ``comm``, then average over ``dp_comm`` too."""
        self.enabled = True  # False inside no_sync()
        self.synchronous = False  # wait for each reduction where it is issued
        self._groups = list(groups)
        self._order = list(reversed(groups))  # backward meets the last layers first, until it is known better
        self._comm = comm
        self._dp_comm = dp_comm
        self._on_round_end = on_round_end
        self._open = False  # a gradient has come since the last fixed point
        self._missing: dict[ParamGroup, set[int]] = {}  # slots whose gradient this round has not brought yet
        self._issued: set[ParamGroup] = set()  # since the last fixed point
        self._position = 0  # in the order: what is before it has been issued, or has nothing to reduce
        self._in_flight: deque[tuple[Work, ParamGroup]] = deque()
        self._unreplicated: dict[ParamGroup, None] = {}  # reduced, but not yet averaged over dp_comm
        self._rounds = 0  # since the last step
        self._observed: list[ParamGroup] = []  # in which order the first backward completed them
        self._order_agreed = False

    def mark_ready(self, param: ShardedParam) -> None:
        """The gradient of ``param`` has been accumulated in this backward pass."""
        if not self.enabled:
            return
        self._open = True
        group = param.group
        missing = self._missing.get(group)
        if missing is None:
            if group in self._issued:
                return
            missing = self._missing[group] = {member.index for member in group.params if member.expects_grad}
        missing.discard(param.index)
        if not missing:
            if not self._order_agreed and group not in self._observed:
                self._observed.append(group)
            self._advance()

    def _complete(self, group: ParamGroup) -> bool:
        missing = self._missing.get(group)
        return missing is not None and not missing

    def _advance(self) -> None:
        """Issue what is ready and next in the order."""
        while self._position < len(self._order):
            group = self._order[self._position]
            if group not in self._issued and group.expects_grad:
                if not self._complete(group):
                    return
                self._issue(group)
            self._position += 1
        self._end_round()

    def _forget_issued(self) -> None:
        self._issued.clear()
        self._position = 0

    def _waiting(self) -> list[ParamGroup]:
        return [group for group in self._order if group not in self._issued and group.expects_grad]

    def _issue(self, group: ParamGroup) -> None:
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            self._absorb_oldest()
        self._in_flight.append((group.gradients.reduce(), group))
        self._issued.add(group)
        self._missing.pop(group, None)
        if self.synchronous:
            self._absorb_oldest()

    def _absorb_oldest(self) -> None:
        work, group = self._in_flight.popleft()
        overlaps = work.wait()
        group.gradients.absorb(overlaps, 1.0 / self._comm.world_size)
        self._unreplicated[group] = None

    def _end_round(self) -> None:
        while self._in_flight:  # no full gradient outlives its backward pass
            self._absorb_oldest()
        self._rounds += 1
        self._on_round_end()

    def _issue_all(self, groups: Sequence[ParamGroup]) -> None:
        for group in groups:
            self._issue(group)
        self._end_round()

    def settle(self) -> None:
        """A fixed point: issue what the passes so far have not, with zeros for what they did not reach.  Collective."""
        waiting = self._waiting() if self._open else []
        if waiting:
            self._issue_all(waiting)
        self._open = False
        self._forget_issued()
        self._missing.clear()

    def finish(self) -> None:
        """Reduce every gradient that ranks in step with each other can have, at least once since the last step.

        Collective.  :meth:`reduce_left` makes them final.
        """
        self.settle()
        if self._rounds == 0:
            self._issue_all(self._waiting())
            self._forget_issued()
        self._average_over_replicas()
        self._agree_order()

    @property
    def left(self) -> list[int]:
        """The groups, by number, of gradients that this rank still holds by itself."""
        return [
            number
            for number, group in enumerate(self._groups)
            if any(group.params[index].numel and group.params[index].expects_grad for index in with_grad(group.tensors))
        ]

    def reduce_left(self) -> None:
        """Reduce what any rank has :attr:`left`.  Collective."""
        numbers = self.left
        for comm in (self._comm, self._dp_comm):
            numbers = sorted(set().union(*comm.exchange(numbers, "gradients left to reduce")))
        if numbers:
            self._issue_all([self._groups[number] for number in numbers])
            self._forget_issued()
            self._average_over_replicas()

    def _average_over_replicas(self) -> None:
        """The replicas' sums become one average; averaging what is averaged already changes nothing."""
        if self._dp_comm.world_size == 1:
            self._unreplicated.clear()
        for group in self._groups:  # the order of completion may differ between replicas
            if group not in self._unreplicated:
                continue
            grads = group.gradients.storage
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
        self._rounds = 0

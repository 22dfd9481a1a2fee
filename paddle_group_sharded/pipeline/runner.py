"""The interpreter of plans: a table from :class:`~.action.Kind` to a method, and one loop.

A runner does what the plan says and nothing else, so that what was simulated is what runs.  Each action's start and end
are noted; between ranks they are comparable because all ranks leave the exchange before a step at the same time.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ..errors import GroupShardedError
from .action import Action, Kind, Plan
from .boundary import pack, pack_grads, unpack_grads
from .mail import Post
from .stage import Parcel, Stage
from .timeline import Span

__all__ = ["ActionFailed", "Job", "Runner"]

Tensor = Any
Key = tuple[int, Optional[int]]  # (virtual stage, micro-batch)


class ActionFailed(GroupShardedError):
    """An action raised; ``__cause__`` is what it raised."""

    def __init__(self, action: Action, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__} in {action}: {cause}")
        self.action = action


@dataclass
class Job:
    """What one run of a plan works on, and what comes out of it."""

    inputs: Optional[Sequence[Any]] = None  # of the first stage, by micro-batch
    loss_of: Optional[Callable[[int, Any], Tensor]] = None  # of the last stage: (micro-batch, output) -> loss
    outputs: list[Any] = field(default_factory=list)  # of the last stage, when nothing is differentiated


class Runner:
    """Runs one rank's row of a plan."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: Mapping[int, Stage],
        post: Post,
        reduce: Callable[[int], None],
    ) -> None:
        """``plan`` says what is sent and received; ``reduce`` begins the sum of a virtual stage's gradients."""
        self._plan = plan
        self._rank = rank
        self._row = plan.actions[rank]
        self._stages = stages
        self._post = post
        self._reduce = reduce
        self._methods: Mapping[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward if plan.has_backward else self._infer,
            Kind.B: self._backward,
            Kind.I: self._backward_inputs,
            Kind.W: self._backward_weights,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._recv_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._recv_backward,
            Kind.REDUCE: self._begin_reduce,
        }
        peers = {action: plan.peer(action) for action in self._row if action.kind.is_send or action.kind.is_recv}
        self._peers: dict[Action, int] = {action: peer for action, peer in peers.items() if peer is not None}
        self._incoming = [(action, peer) for action, peer in self._peers.items() if action.kind.is_recv]
        self._last = plan.num_virtual_stages - 1
        self._job = Job()
        self._values: dict[Key, Parcel] = {}  # what a stage will work on, or what it has made
        self._grads: dict[Key, Sequence[Optional[Tensor]]] = {}  # the same of gradients
        self._times = array("d")
        self.most_live = 0  # activations kept at a time in the last run, counted in micro-batches of one chunk

    def has(self, kind: Kind) -> bool:
        """Whether this rank has actions of ``kind``."""
        return any(action.kind is kind for action in self._row)

    def run(self, job: Job) -> None:
        """Run the row.  Raises :class:`ActionFailed`, with nothing of the step left behind but gradients of weights."""
        self._job = job
        self._times = times = array("d")
        self.most_live = 0
        clock, methods = time.perf_counter, self._methods
        self._post.expect(self._incoming)
        started = clock()
        action = self._row[0]
        try:
            for action in self._row:
                times.append(clock() - started)
                methods[action.kind](action)
                times.append(clock() - started)
        except Exception as error:
            raise ActionFailed(action, error) from error
        finally:
            self._job = Job()
            self._values.clear()
            self._grads.clear()

    def spans(self) -> list[Span]:
        """When each action of the last run ran, in seconds since it began."""
        starts, stops = self._times[::2], self._times[1::2]
        return [Span(self._rank, *each) for each in zip(self._row, starts, stops)]

    # ------------------------------------------------------------------------------------------------------- compute

    def _forward(self, action: Action) -> None:
        stage, batch = self._stages[action.stage], _number(action)
        incoming = self._take_value(action)
        if action.stage == self._last:
            loss_of = self._job.loss_of
            if loss_of is None:
                raise GroupShardedError("the last stage has no loss to start from")
            stage.forward_loss(batch, incoming, lambda output: loss_of(batch, output))
        else:
            self._hand_on(action, stage.forward(batch, incoming))
        self.most_live = max(self.most_live, sum(each.live for each in self._stages.values()))

    def _infer(self, action: Action) -> None:
        stage, batch = self._stages[action.stage], _number(action)
        output = stage.infer(batch, self._take_value(action))
        if action.stage != self._last:
            self._hand_on(action, Parcel(*pack(output, stage.name)))
        elif self._job.loss_of is not None:
            self._job.loss_of(batch, output)
        else:
            self._job.outputs.append(output)

    def _backward(self, action: Action) -> None:
        stage = self._stages[action.stage]
        self._hand_back(action, stage.backward(_number(action), self._take_grads(action)))

    def _backward_inputs(self, action: Action) -> None:
        stage = self._stages[action.stage]
        self._hand_back(action, stage.backward_inputs(_number(action), self._take_grads(action)))

    def _backward_weights(self, action: Action) -> None:
        self._stages[action.stage].backward_weights(_number(action))

    def _begin_reduce(self, action: Action) -> None:
        self._reduce(action.stage)

    # ----------------------------------------------------------------------------------------------- between stages

    def _take_value(self, action: Action) -> Parcel:
        if action.stage == 0:
            inputs = self._job.inputs
            return Parcel(*pack(None if inputs is None else inputs[_number(action)], "the data"))
        return self._values.pop((action.stage - 1, action.micro_batch))

    def _hand_on(self, action: Action, made: Parcel) -> None:
        """Keep an output until it is sent; a stage of the same rank takes it as it would a message."""
        if self._plan.stage_to_rank[action.stage + 1] == self._rank:
            made = Parcel(made.structure, [tensor.detach() for tensor in made.tensors])
        self._values[action.stage, action.micro_batch] = made

    def _take_grads(self, action: Action) -> Sequence[Optional[Tensor]]:
        return () if action.stage == self._last else self._grads.pop((action.stage, action.micro_batch))

    def _hand_back(self, action: Action, grads: Sequence[Optional[Tensor]]) -> None:
        if action.stage > 0:
            self._grads[action.stage - 1, action.micro_batch] = grads

    def _send_forward(self, action: Action) -> None:
        made = self._values.pop((action.stage, action.micro_batch))  # from here on the channel's alone
        self._post.send(action, self._peers[action], made.structure, made.tensors)

    def _recv_forward(self, action: Action) -> None:
        structure, tensors = self._post.recv(action)
        self._values[action.stage - 1, action.micro_batch] = Parcel(structure, tensors)

    def _send_backward(self, action: Action) -> None:
        grads = self._grads.pop((action.stage - 1, action.micro_batch))
        self._post.send(action, self._peers[action], *pack_grads(grads))

    def _recv_backward(self, action: Action) -> None:
        present, tensors = self._post.recv(action)
        self._grads[action.stage, action.micro_batch] = unpack_grads(present, tensors)


def _number(action: Action) -> int:
    if action.micro_batch is None:
        raise GroupShardedError(f"{action} has no micro-batch")
    return action.micro_batch

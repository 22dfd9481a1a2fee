"""One virtual stage: runs the forward and the backward of micro-batches, and keeps what lies between the two.

Autograd graphs of stages are not connected.  What enters a stage passes an *entrance*, an autograd node that notes the
gradient; on what leaves it stands an *anchor*, one that holds the graph, but not the memory, of an output:

    received -> entrance -> layers -> output -> sent, then freed
                                        |
                                     anchor                backward(): put in the received gradient, start from here
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import paddle
from paddle.autograd import PyLayer

from .boundary import needs_grad, pack, slots_with_grad, unpack
from .weight_grad import Pending, WeightGrads

__all__ = ["Parcel", "Stage"]

Tensor = Any
Layers = Callable[[int, Any], Any]  # (micro-batch, input) -> output


class _Entrance:
    """Where a received tensor enters, and where its gradient comes out."""

    def __init__(self, received: Tensor) -> None:
        self.received: Optional[Tensor] = received  # until it has entered
        self.grad: Optional[Tensor] = None  # after the backward, if one arose


class _Entry(PyLayer):  # type: ignore[misc]
    """Gives the layers what was received: not as a leaf, which Paddle would not let a layer overwrite."""

    @staticmethod
    def forward(ctx: Any, entrance: _Entrance, asks: Tensor) -> Tensor:
        ctx.entrance = entrance
        received, entrance.received = entrance.received, None
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        ctx.entrance.grad = grad


class _Anchor(PyLayer):  # type: ignore[misc]
    """From an output to a number nobody reads; its backward gives the output the gradient that was put in."""

    @staticmethod
    def forward(ctx: Any, received: list[Tensor], output: Tensor) -> Tensor:
        ctx.received = received
        return paddle.zeros([1])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        return ctx.received.pop()


class _End:
    """Where the backward of one output starts."""

    def __init__(self, output: Tensor) -> None:
        self._received: list[Tensor] = []
        # A leaf, such as a weight that a layer returns, has no graph to hold.
        self._leaf = output if output.is_leaf else None
        self._anchor = None if output.is_leaf else _Anchor.apply(self._received, output)

    def root(self, grad: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        """What ``paddle.autograd.backward`` starts from, and the gradient there."""
        if self._leaf is not None:
            return self._leaf, grad
        self._received.append(grad)
        return self._anchor, None


@dataclass
class _Kept:
    """What a forward leaves for its backward."""

    entrances: list[_Entrance]  # of the inputs that a gradient goes back for
    ends: list[_End] = field(default_factory=list)  # of the outputs that a gradient comes back for
    loss: Optional[Tensor] = None  # of the last stage, which starts from it


@dataclass
class Parcel:
    """What crosses into a stage or out of it: what :func:`.boundary.pack` returns."""

    structure: Any
    tensors: list[Tensor]


class Stage:
    """One virtual stage on the rank that holds it."""

    def __init__(self, run: Layers, name: str, weight_grads: Optional[WeightGrads] = None) -> None:
        """``run`` calls the layers; ``name`` says which in messages; ``weight_grads`` where backwards are split."""
        self._run = run
        self.name = name
        self._weight_grads = weight_grads
        self._kept: dict[int, _Kept] = {}  # by micro-batch
        self._pending: dict[int, Pending] = {}
        self._asks = paddle.zeros([1])  # needs a gradient, so that what enters does
        self._asks.stop_gradient = False

    @property
    def live(self) -> int:
        """Micro-batches whose activations are kept: from the start of F to the end of B, or of W."""
        return len(self._kept.keys() | self._pending.keys())

    def reset(self) -> None:
        """Forget everything, such as what a step left that did not come to its end."""
        self._kept.clear()
        self._pending.clear()

    def forward(self, micro_batch: int, incoming: Parcel) -> Parcel:
        """Run the layers on what came, and keep what the backward needs."""
        kept, value = self._enter(micro_batch, incoming)
        structure, tensors = pack(self._run(micro_batch, value), self.name)
        kept.ends = [_End(tensor) for tensor in tensors if needs_grad(tensor)]
        return Parcel(structure, tensors)

    def forward_loss(self, micro_batch: int, incoming: Parcel, loss_of: Callable[[Any], Tensor]) -> None:
        """:meth:`forward` of the last stage; ``loss_of`` makes of the output what is differentiated."""
        kept, value = self._enter(micro_batch, incoming)
        kept.loss = loss_of(self._run(micro_batch, value))

    def infer(self, micro_batch: int, incoming: Parcel) -> Any:
        """Run the layers and keep nothing; the output as it is."""
        return self._run(micro_batch, unpack(incoming.structure, incoming.tensors))

    def backward(self, micro_batch: int, grads: Sequence[Optional[Tensor]]) -> list[Optional[Tensor]]:
        """The whole backward.

        ``grads`` are the gradients of those outputs that need one, in order; returns those of such inputs.
        """
        result = self._differentiate(micro_batch, grads)
        del self._kept[micro_batch]
        return result

    def backward_inputs(self, micro_batch: int, grads: Sequence[Optional[Tensor]]) -> list[Optional[Tensor]]:
        """The first half of a split backward: :meth:`backward`, with weight gradients put off where possible."""
        if self._weight_grads is None:
            self._pending[micro_batch] = Pending()
        else:
            with self._weight_grads.deferred() as pending:
                self._pending[micro_batch] = pending
                return self.backward(micro_batch, grads)
        return self.backward(micro_batch, grads)

    def backward_weights(self, micro_batch: int) -> None:
        """The second half: what the first has put off."""
        self._pending.pop(micro_batch).compute()

    def _enter(self, micro_batch: int, incoming: Parcel) -> tuple[_Kept, Any]:
        """What is kept of a forward, and the value that the layers get."""
        needing = slots_with_grad(incoming.structure)
        kept = self._kept[micro_batch] = _Kept([])
        tensors = list(incoming.tensors)
        for index in needing:
            entrance = _Entrance(tensors[index].detach())
            kept.entrances.append(entrance)
            tensors[index] = _Entry.apply(entrance, self._asks)
        return kept, unpack(incoming.structure, tensors)

    def _differentiate(self, micro_batch: int, grads: Sequence[Optional[Tensor]]) -> list[Optional[Tensor]]:
        kept = self._kept[micro_batch]
        if kept.loss is not None:
            roots = [] if kept.loss.stop_gradient else [(kept.loss, None)]
        else:
            roots = [end.root(grad) for end, grad in zip(kept.ends, grads) if grad is not None]
        if roots:
            tensors, starts = zip(*roots)
            paddle.autograd.backward(list(tensors), list(starts))
        return [entrance.grad for entrance in kept.entrances]

"""What has to be known of a model and its optimizer to forecast a step; bytes and elements, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import GroupLayout
from .replay import Moment

__all__ = ["GroupFacts", "ParamFacts", "StepFacts"]


@dataclass(frozen=True)
class ParamFacts:
    """What counts of a parameter."""

    numel: int
    itemsize: int  # bytes of an element
    grad_itemsize: int  # of its gradient
    trainable: bool
    optimized: bool  # the optimizer has it
    state_bytes: int = 0  # of the states that it has in the whole, a float32 master included
    scalar_bytes: int = 0  # of states whose size is the same for a piece of it
    has_master: bool = False
    reached: bool = True  # backward passes come to it; the others give it no gradient, and so no states

    @property
    def expects_grad(self) -> bool:
        """Whether its gradient is reduced."""
        return self.trainable and self.optimized

    @property
    def grad_bytes(self) -> int:
        """Of the whole gradient, if it is reduced."""
        return self.numel * self.grad_itemsize if self.expects_grad and self.reached else 0

    @property
    def loose_bytes(self) -> int:
        """Of a gradient that nobody reduces, steps or clears."""
        return self.numel * self.grad_itemsize if self.trainable and self.reached and not self.optimized else 0


@dataclass(frozen=True)
class GroupFacts:
    """A group of the engine."""

    members: tuple[int, ...]  # numbers of its parameters, in the order of the slots
    layout: GroupLayout
    sharded: bool


@dataclass(frozen=True)
class StepFacts:
    """What a step does that does not follow from parameters and groups."""

    moments: tuple[Moment, ...]
    workspace: int = 0  # bytes that kernels need in backward for a moment
    other_bytes: int = 0  # of the model's buffers
    num_flags: int = 0  # parameters of the optimizer
    num_norms: int = 0  # of them, those whose norms clipping needs
    clips: bool = False  # gradients are copied when they are clipped
    steps_whole: bool = False  # the optimizer needs whole parameters
    joins_neighbours: bool = False  # small neighbouring pieces are stepped as one

"""How many bytes of transient buffers one training step holds: the engine's rules, replayed over a list of moments.

A moment is what a forward and backward pass does, in order: gather a group, release it, finish a gradient.  What passes
keep for backward (activations) does not depend on the level and stands beside each moment, so one list serves every
level and any number of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from .layout import GroupLayout

__all__ = ["BackwardPeak", "Kind", "Limits", "Moment", "ReducedGroup", "assumed_moments", "gathers", "replay"]


class Kind(Enum):
    """What happens at a moment."""

    GATHER = "gather"  # group ``number`` of the sharded ones becomes whole, or was kept
    RELEASE = "release"
    GRAD = "grad"  # the gradient of parameter ``number`` is there
    NOTE = "note"  # nothing but the activations


class Moment(NamedTuple):
    """One event of a forward and backward pass."""

    kind: Kind
    number: int  # of the group or the parameter
    activations: int  # bytes that live beside parameters and gradients


class Limits(NamedTuple):
    """What the engine allows itself."""

    in_flight: int  # reductions whose full gradients may be alive at once
    idle: int  # buffers kept for the next gather


class ReducedGroup(NamedTuple):
    """A group as its reduction sees it."""

    layout: GroupLayout
    members: tuple[int, ...]  # numbers of its parameters, in the order of the slots
    itemsize: int  # bytes of an element of a gradient
    expects_grad: bool

    @property
    def grad_bytes(self) -> int:
        """Of the whole gradients, as they are reduced."""
        return self.itemsize * sum(run.numel for run in self.layout.runs)

    @property
    def packing_bytes(self) -> int:
        """Of the largest copy that packing small neighbours makes."""
        return self.itemsize * max((run.numel for run in self.layout.runs if len(run.slots) > 1), default=0)


class BackwardPeak(NamedTuple):
    """The most bytes at any moment."""

    total: int  # of activations and buffers at one moment
    buffers: int  # whole buffers and whole gradients, without activations
    left: int  # activations at the end


def assumed_moments(numels: Sequence[int], sharded: Sequence[tuple[int, ...]], activations: int) -> tuple[Moment, ...]:
    """The moments of a model whose layers run once, in registration order, and of which nothing else is known.

    ``numels``: of each trainable parameter, 0 for others; ``sharded``: the members of each sharded group.
    ``activations``, in bytes, grow in forward and shrink in backward as the parameters go by.
    """
    group_of = {param: number for number, members in enumerate(sharded) for param in members}
    total = sum(numels) or 1
    moments: list[Moment] = []
    current = -1

    def meet(param: int, seen: int) -> None:
        nonlocal current
        group = group_of.get(param, current)
        if group != current:
            kept = activations * seen // total
            if current >= 0:
                moments.append(Moment(Kind.RELEASE, current, kept))
            moments.append(Moment(Kind.GATHER, group, kept))
            current = group

    seen = 0
    for param, numel in enumerate(numels):
        meet(param, seen)
        seen += numel
    moments.append(Moment(Kind.NOTE, 0, activations))
    for param, numel in reversed(list(enumerate(numels))):
        meet(param, seen)
        if numel:
            moments.append(Moment(Kind.GRAD, param, activations * seen // total))
        seen -= numel
    if current >= 0:
        moments.append(Moment(Kind.RELEASE, current, 0))
    moments.append(Moment(Kind.NOTE, 0, 0))
    return tuple(moments)


def gathers(moments: Sequence[Moment]) -> list[int]:
    """The groups that are really gathered in a step that is not the first, in order."""
    order = [moment.number for moment in moments if moment.kind is Kind.GATHER]
    kept, found, position = set(), [], 0
    for kind, number, _ in moments:
        if kind is Kind.RELEASE and _is_kept(order, position, number):
            kept.add(number)
        elif kind is Kind.GATHER:
            if number not in kept:
                found.append(number)
            kept.discard(number)
            position += 1
    return found


def _is_kept(order: Sequence[int], position: int, number: int) -> bool:
    """Whether group ``number`` stays instead of being released before gather ``position``: it is needed next."""
    return list(order[position + 1 : position + 2]) == [number]


def replay(
    moments: Sequence[Moment],
    sharded_bytes: Sequence[int],
    reduced: Sequence[ReducedGroup],
    grad_bytes: Sequence[int],
    shard_grads: bool,
    limits: Limits,
) -> BackwardPeak:
    """The most that buffers hold in one forward and backward pass of a step that is not the first.

    Args:
        moments: as they happen.
        sharded_bytes: of the full buffer of each sharded group; empty where gathers and releases do not happen.
        reduced: the groups that are reduced.
        grad_bytes: of the gradient of each parameter as Paddle makes it.
        shard_grads: gradients are reduced in backward; otherwise they stay until the step.
        limits: of the engine.
    """
    buffers = _Buffers(moments, sharded_bytes, limits)
    grads = _Gradients(reduced, grad_bytes, shard_grads, limits)
    total = most = left = 0
    for kind, number, activations in moments:
        if kind is Kind.GATHER:
            buffers.gather(number)
        elif kind is Kind.RELEASE:
            buffers.release(number)
        elif kind is Kind.GRAD:
            grads.arrive(number)
        now = buffers.live + grads.live
        total, most = max(total, activations + now), max(most, now)
        if kind is Kind.GRAD:
            now = buffers.live + grads.reduce_ready()
            total, most = max(total, activations + now), max(most, now)
        left = activations
    return BackwardPeak(total, most, left)


class _Buffers:
    """Full buffers of sharded groups: one in use, the next kept or fetched ahead, and some idle ones."""

    def __init__(self, moments: Sequence[Moment], sharded_bytes: Sequence[int], limits: Limits) -> None:
        self._order = [moment.number for moment in moments if moment.kind is Kind.GATHER]
        self._bytes = sharded_bytes
        self._limits = limits
        self._position = 0
        self._lent: set[int] = set()
        self._idle: list[int] = []  # bytes of each
        self.live = 0

    def gather(self, group: int) -> None:
        if not self._bytes:
            return
        self._take(group)
        self._position += 1
        if self._position < len(self._order):
            self._take(self._order[self._position])

    def release(self, group: int) -> None:
        if group in self._lent and not _is_kept(self._order, self._position, group):
            self._lent.remove(group)
            self._idle.append(self._bytes[group])
            while len(self._idle) > self._limits.idle:
                self.live -= self._idle.pop(0)

    def _take(self, group: int) -> None:
        if group in self._lent:
            return
        self._lent.add(group)
        size = self._bytes[group]
        if size in self._idle:
            self._idle.remove(size)
        else:
            self.live += size


class _Gradients:
    """Whole gradients: of a group that is not complete yet, and of reductions under way."""

    def __init__(
        self, reduced: Sequence[ReducedGroup], grad_bytes: Sequence[int], shard_grads: bool, limits: Limits
    ) -> None:
        self._groups = reduced
        self._bytes = grad_bytes
        self._shard_grads = shard_grads
        self._limits = limits
        self._group_of = {
            param: number for number, group in enumerate(reduced) if group.expects_grad for param in group.members
        }
        self._missing = [set(group.members) for group in reduced]
        self._ready: list[int] = []
        self._in_flight: deque[int] = deque()  # bytes of each
        self.live = 0

    def arrive(self, param: int) -> None:
        self.live += self._bytes[param]
        group = self._group_of.get(param)
        if self._shard_grads and group is not None:
            missing = self._missing[group]
            missing.discard(param)
            if not missing:
                self._ready.append(group)

    def reduce_ready(self) -> int:
        """Begin the reductions that can; returns the most bytes meanwhile."""
        most = self.live
        while self._ready:
            group = self._groups[self._ready.pop()]
            if len(self._in_flight) >= self._limits.in_flight:
                self.live -= self._in_flight.popleft()
            most = max(most, self.live + group.packing_bytes)
            arrived = sum(self._bytes[param] for param in group.members)
            self.live += group.grad_bytes - arrived
            self._in_flight.append(group.grad_bytes)
        return most

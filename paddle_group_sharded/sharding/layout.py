"""Where each parameter lies in a group's full buffer, and which part of it each rank owns.

Integers only.  An example: parameters ``a`` of 5 elements and ``b`` of 4 on 2 ranks, padded to 10::

    element   0 1 2 3 4   5 6 7 8   9
    full      a a a a a | b b b b | padding
    rank      0 0 0 0 0   1 1 1 1   1
    pieces    rank 0: a[0:5]        rank 1: b[0:4]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Optional

__all__ = ["GroupLayout", "ParamSlot", "Piece"]


@dataclass(frozen=True)
class ParamSlot:
    """The interval of one parameter in its group's full buffer."""

    name: str  # structured name
    shape: tuple[int, ...]
    start: int  # first element in the full buffer
    stop: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.stop - self.start


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that one rank owns; never empty."""

    index: int  # of the slot in its layout
    start: int  # first element, counted inside the parameter
    stop: int
    shard_start: int  # where it begins in the rank's shard

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return self.stop - self.start


@dataclass(frozen=True)
class GroupLayout:
    """The slots of one group, one after the other, cut evenly over ``world_size`` ranks."""

    slots: tuple[ParamSlot, ...]
    world_size: int

    @classmethod
    def pack(cls, params: Iterable[tuple[str, tuple[int, ...]]], world_size: int) -> GroupLayout:
        """Lay out ``(name, shape)`` pairs in the given order, with no gap between them."""
        slots, start = [], 0
        for name, shape in params:
            stop = start + reduce(mul, shape, 1)
            slots.append(ParamSlot(name, tuple(shape), start, stop))
            start = stop
        return cls(tuple(slots), world_size)

    def __post_init__(self) -> None:
        """Refuse a layout with gaps or overlaps: a wrong one cannot exist."""
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        expected = 0
        for slot in self.slots:
            if slot.start != expected or slot.numel != reduce(mul, slot.shape, 1):
                raise ValueError(f"slot {slot} does not follow element {expected} or does not hold its shape")
            expected = slot.stop

    @property
    def param_numel(self) -> int:
        """Elements of all parameters, without padding."""
        return self.slots[-1].stop if self.slots else 0

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return -(-self.param_numel // self.world_size)

    @property
    def numel(self) -> int:
        """Elements of the full buffer, with at most ``world_size - 1`` of padding."""
        return self.shard_numel * self.world_size

    def shard_bounds(self, rank: int) -> tuple[int, int]:
        """The interval of the full buffer that ``rank`` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def piece(self, index: int, rank: int) -> Optional[Piece]:
        """The part of slot ``index`` that ``rank`` owns, or None."""
        low, high = self.shard_bounds(rank)
        slot = self.slots[index]
        start, stop = max(low, slot.start), min(high, slot.stop)
        if start >= stop:
            return None
        return Piece(index, start - slot.start, stop - slot.start, start - low)

    def owned(self, rank: int) -> tuple[Piece, ...]:
        """The pieces of ``rank``, in the order of its shard."""
        pieces = (self.piece(index, rank) for index in range(len(self.slots)))
        return tuple(piece for piece in pieces if piece is not None)

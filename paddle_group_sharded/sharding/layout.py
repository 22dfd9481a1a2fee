"""Where each parameter lies in a group's full buffer, and which part of it each rank owns.

Integers only.  An example: parameters ``a`` of 40 elements and ``b`` of 20 on 2 ranks::

    element   0 ... 39   40 ... 47   48 ... 67   68 ... 95
    full      a          gap         b           padding
    rank      0 ...                  1 ...
    pieces    rank 0: a[0:40]        rank 1: b[0:20]

Slots begin, and shards end, at multiples of :data:`ALIGN` elements.  Kernels work on whole vectors and round the rest
of a tensor differently: only a cut between vectors leaves every element's result as it is on the whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import mul
from typing import Optional, Union

from ..comm.reduction import SMALL

__all__ = ["ALIGN", "RUN_LIMIT", "GroupLayout", "ParamSlot", "Piece", "Run"]

ALIGN = 16  # elements; 64 bytes of float32, the widest vectors and the cache lines of today's processors
RUN_LIMIT = 2**20  # elements of a packed stretch: bounds the memory beside the gradients


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
class Run:
    """A stretch of the full buffer whose gradients are reduced as one tensor: one large slot, or small neighbours."""

    slots: range
    start: int  # first element in the full buffer
    stop: int  # the gaps between its slots belong to it, the one behind its last slot does not

    @property
    def numel(self) -> int:
        """Elements, with the gaps inside."""
        return self.stop - self.start


def _aligned(position: int) -> int:
    return -(-position // ALIGN) * ALIGN


@dataclass(frozen=True)
class GroupLayout:
    """The slots of one group, one after the other, cut evenly over ``world_size`` ranks."""

    slots: tuple[ParamSlot, ...]
    world_size: int

    @classmethod
    def pack(cls, params: Iterable[tuple[str, tuple[int, ...]]], world_size: int) -> GroupLayout:
        """Lay out ``(name, shape)`` pairs in the given order, with gaps of less than :data:`ALIGN` elements."""
        slots, stop = [], 0
        for name, shape in params:
            start = _aligned(stop)
            stop = start + reduce(mul, shape, 1)
            slots.append(ParamSlot(name, tuple(shape), start, stop))
        return cls(tuple(slots), world_size)

    def __post_init__(self) -> None:
        """Refuse a layout with wide gaps or overlaps: a wrong one cannot exist."""
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        expected = 0
        for slot in self.slots:
            if slot.start != _aligned(expected) or slot.numel != reduce(mul, slot.shape, 1):
                raise ValueError(f"slot {slot} does not follow element {expected} or does not hold its shape")
            expected = slot.stop

    @cached_property
    def param_numel(self) -> int:
        """Elements of all parameters, without gaps and padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, a multiple of :data:`ALIGN`."""
        end = self.slots[-1].stop if self.slots else 0
        return _aligned(-(-end // self.world_size))

    @cached_property
    def numel(self) -> int:
        """Elements of the full buffer, with gaps and padding."""
        return self.shard_numel * self.world_size

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The intervals of the full buffer that belong to no parameter."""
        bounds = [0, *(bound for slot in self.slots for bound in (slot.start, slot.stop)), self.numel]
        return tuple((start, stop) for start, stop in zip(bounds[::2], bounds[1::2]) if start < stop)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The slots with elements, in order: each large one alone, small neighbours together."""
        runs: list[Run] = []
        before = 0  # elements of the slot before
        for index, slot in enumerate(self.slots):
            if not slot.numel:
                continue
            joins = bool(runs) and max(slot.numel, before) <= SMALL and slot.stop - runs[-1].start <= RUN_LIMIT
            if joins:
                runs[-1] = Run(range(runs[-1].slots.start, index + 1), runs[-1].start, slot.stop)
            else:
                runs.append(Run(range(index, index + 1), slot.start, slot.stop))
            before = slot.numel
        return tuple(runs)

    @cached_property
    def stretches(self) -> tuple[Union[Run, int], ...]:
        """The runs in order, and the number of elements wherever there is a gap before one."""
        found: list[Union[Run, int]] = []
        end = 0
        for run in self.runs:
            if run.start > end:
                found.append(run.start - end)
            found.append(run)
            end = run.stop
        return tuple(found)

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

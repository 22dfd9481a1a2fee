"""The four collectives on CPU tensors, with the gaps of gloo closed.

* no reduce-scatter: all-reduces, planned in :mod:`.reduction`;
* 16-bit floats are summed wrong or slowly, int16 and bool not at all: they are summed in a wider dtype;
* dtypes that gloo does not know are moved as bytes;
* a tensor without elements raises or ends the process: nothing is moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from ..paddle_compat import GlooGroup, flat_view, host_view, tensor_over
from .base import Overlap, Segment
from .dtypes import MOVED, SUMMED_AS, Array, dtype_name, host_widened, numel_of, overwrite, widened
from .reduction import IN_PLACE, LIMIT, Part, Round, plan_reduction

__all__ = ["GlooTransport"]

Tensor = Any


class GlooTransport:
    """Blocking collectives over one gloo group; every rank must call alike."""

    def __init__(self, group: GlooGroup, rank: int, world_size: int) -> None:
        """``rank``: in the group."""
        self._group = group
        self._rank = rank
        self._world_size = world_size

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        """See :meth:`.base.Comm.all_gather`."""
        if numel_of(full):
            self._group.all_gather(_movable(full), _movable(shard))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """See :meth:`.base.Comm.broadcast`."""
        if numel_of(tensor):
            self._group.broadcast(_movable(tensor), src)

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """See :meth:`.base.Comm.all_reduce`."""
        numel = numel_of(tensor)
        if not numel:
            return
        if dtype_name(tensor) not in SUMMED_AS:
            self._group.all_reduce(tensor, op)
            return
        for start in range(0, numel, LIMIT):
            part = flat_view(tensor, start, min(start + LIMIT, numel))
            summed = host_widened(part)
            self._group.all_reduce(tensor_over(summed), op)
            overwrite(part, summed)

    def reduce_scatter(
        self, segments: Sequence[Segment], sizes: tuple[int, ...], numel: int, dtype: str
    ) -> list[Overlap]:
        """See :meth:`.base.Comm.reduce_scatter`; ``dtype``: of the tensors, wherever there are any, or empty."""
        share = numel // self._world_size
        plan = plan_reduction(sizes, self._rank * share, (self._rank + 1) * share, dtype in SUMMED_AS)
        reduced: dict[int, Tensor] = {}  # what was reduced in place, by segment
        kept: list[Array] = []  # of the packed rounds
        for step in plan.rounds if dtype else ():  # no dtype: zero on every rank
            buffer = _filled(step, segments, dtype)
            self._group.all_reduce(buffer, "sum")
            if step.in_place:
                reduced[step.parts[0].segment] = buffer
            elif step.own_start < step.own_stop:
                kept.append(host_view(buffer)[step.own_start : step.own_stop].copy())
        packed = [place for place in plan.owned if place.offset != IN_PLACE]
        sums = _split(kept, [stop - start for _, start, stop, _ in packed]) if kept else []
        values = {place.segment: value for place, value in zip(packed, sums)}
        for segment, start, stop, _ in plan.owned:
            if segment in reduced:
                values[segment] = flat_view(reduced[segment], start, stop)
                if isinstance(segments[segment], int):
                    values[segment] = values[segment].clone()  # lets go of a buffer that nobody else holds
            elif segment not in values:
                values[segment] = paddle.zeros([stop - start], dtype="float32")
        return [Overlap(segment, start, values[segment]) for segment, start, _, _ in plan.owned]


def _movable(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes, as gloo can move them."""
    return tensor if dtype_name(tensor) in MOVED else tensor_over(host_view(tensor).view(np.uint8))


def _filled(step: Round, segments: Sequence[Segment], dtype: str) -> Tensor:
    """The buffer of a round: the memory of its segment, or a new one packed and widened from its parts."""
    if step.in_place:
        segment = segments[step.parts[0].segment]
        return paddle.zeros([segment], dtype=dtype) if isinstance(segment, int) else segment
    return tensor_over(np.concatenate([_packed(part, segments[part.segment], dtype) for part in step.parts]))


def _packed(part: Part, segment: Segment, dtype: str) -> Array:
    """One part, in the dtype in which it is summed."""
    numel = part.stop - part.start
    if isinstance(segment, int):
        return np.zeros(numel, widened(dtype))
    return host_widened(segment if numel == numel_of(segment) else flat_view(segment, part.start, part.stop))


def _split(arrays: Sequence[Array], numels: Sequence[int]) -> list[Tensor]:
    """The concatenation of ``arrays`` as tensors of ``numels`` elements."""
    tensor = tensor_over(np.concatenate(arrays))
    return list(paddle.split(tensor, numels)) if len(numels) > 1 else [tensor]

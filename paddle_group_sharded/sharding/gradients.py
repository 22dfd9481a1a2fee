"""The gradients of a group's parameters: taken from Paddle, reduced, kept for this rank's pieces.

===================================  ============================================================================
where the reduced gradients are      until when
===================================  ============================================================================
``os``, a large parameter            the slice of Paddle's own gradient; from the step to clear_grad
``os``, small neighbours             memory for this rank's part of their run; from the step to clear_grad
``os_g`` and ``p_g_os``              one lasting buffer of the shard's size
===================================  ============================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import paddle

from ..clipping import square_sum
from ..comm.base import Overlap, Segment, Work
from ..errors import UsageError
from ..paddle_compat import (
    drop_grad,
    element_size,
    flat_grad,
    flat_view,
    grad_of,
    has_grad,
    host_view,
    is_sparse,
    with_grad,
)
from ..paddle_compat import packed as pack
from .layout import ALIGN, Piece, Run
from .ops import accumulate, copy_into, scale_into

if TYPE_CHECKING:
    from .group import ParamGroup

__all__ = ["GroupGradients"]

Tensor = Any


class GroupGradients:
    """What backward passes leave in one group, and what reductions make of it."""

    def __init__(self, group: ParamGroup) -> None:
        """For the layout, the parameters and the communicator of ``group``."""
        self._group = group
        self._layout = group.layout
        self._pieces = group.pieces
        self._comm = group.comm
        self._sharded = group.placements.grad
        self._shard: Optional[Tensor] = None
        self._present: set[int] = set()  # the slots of which this rank's piece has a gradient
        self._parts: dict[Run, Part] = {}  # where it is, for runs
        self._alone: dict[int, Tensor] = {}  # where it is, 1-D, for large parameters whose gradients are whole
        self._run_gaps: dict[Run, Any] = {}

    @property
    def dtype(self) -> Any:
        """Dtype in which gradients are accumulated: float32 with ``main_grad``, else the parameters' own."""
        has_main_grad = any(hasattr(param.tensor, "main_grad") for param in self._group.params)
        return paddle.float32 if has_main_grad else self._group.dtype

    def reduce(self) -> Work:
        """Begin to sum the local gradients over the ranks; they are taken from the parameters.  Collective."""
        grads = dict(self._local_grads())
        nothing = not grads
        stretches = self._layout.stretches
        segments: list[Segment] = [each if isinstance(each, int) else self._run_grad(each, grads) for each in stretches]
        if nothing and segments:
            segments[-1] = paddle.zeros([segments[-1]]).astype(self.dtype)
        return self._comm.reduce_scatter(segments, self._layout.numel, f"reduce {self._group.name}")

    def _local_grads(self) -> Iterator[tuple[int, Tensor]]:
        for param in self._group.params:
            if not param.expects_grad:
                continue
            grad = grad_of(param.tensor)
            if grad is None:
                param.reached = param.reached or (param.numel == 0 and has_grad(param.tensor))
                continue
            if is_sparse(grad):
                raise UsageError(
                    f"parameter {param} has a sparse gradient (selected rows), expected a dense one; "
                    "create its layer, or call F.embedding, with sparse=False"
                )
            param.reached = True
            yield param.index, grad

    def _run_grad(self, run: Run, grads: dict[int, Tensor]) -> Segment:
        """The gradients of one run as one tensor, which the parameters then have no more; a size if there are none."""
        members = [index for index in run.slots if self._layout.slots[index].numel]
        present = [index for index in members if index in grads]
        if not present:
            return run.numel
        dtype = self.dtype
        if len(members) == 1:
            flat = flat_grad(grads.pop(members[0]))
            drop_grad(self._group.params[members[0]].tensor)
            return flat if flat.dtype == dtype else flat.astype(dtype)
        if len(present) == len(members) and dtype in (paddle.float32, paddle.float64):
            values = [grads.pop(index) for index in members]
            itemsize = element_size(dtype)
            if any(value.element_size() != itemsize for value in values):  # comparing dtypes takes ten times as long
                values = [value.astype(dtype) for value in values]
            buffer = flat_view(pack(values, ALIGN, self._gaps_of(run)), 0, run.numel)
        else:
            buffer = paddle.zeros([run.numel]).astype(dtype)
            for index in present:
                slot = self._layout.slots[index]
                copy_into(flat_view(buffer, slot.start - run.start, slot.stop - run.start), flat_grad(grads.pop(index)))
        for index in present:
            drop_grad(self._group.params[index].tensor)
        return buffer

    def _gaps_of(self, run: Run) -> Any:
        if run not in self._run_gaps:
            inside = (range(start - run.start, stop - run.start) for start, stop in self._layout.gaps)
            self._run_gaps[run] = np.array([k for gap in inside for k in gap if 0 <= k < run.numel], dtype=np.int64)
        return self._run_gaps[run]

    def absorb(self, overlaps: Sequence[Overlap], scale: float) -> None:
        """Add ``scale`` times a reduction's result to the gradients of this rank's pieces."""
        for overlap in overlaps:
            run = self._layout.stretches[overlap.segment]
            if isinstance(run, int):
                continue
            if len(run.slots) == 1 and not self._sharded:
                self._absorb_alone(run.slots.start, overlap.value, scale)
                continue
            part = self._part_of(run)
            unknown = [index for index in part.pieces if index not in self._present]
            if len(unknown) == len(part.pieces):
                scale_into(part.memory, overlap.value, scale)
            else:
                for index in unknown:
                    copy_into(part.view(index), paddle.zeros([part.pieces[index].numel]))
                overlap.value.scale_(scale)
                accumulate(part.memory, overlap.value)
            self._present.update(part.pieces)

    def _absorb_alone(self, index: int, value: Tensor, scale: float) -> None:
        value.scale_(scale)
        if index in self._present:
            accumulate(self._alone[index], value)
            return
        # In the dtype that the other levels keep, so that all round alike.
        self._alone[index] = value if value.dtype == self.dtype else value.astype(self.dtype)
        self._present.add(index)

    def _part_of(self, run: Run) -> Part:
        if run not in self._parts:
            low, high = self._layout.shard_bounds(self._comm.rank)
            start, stop = max(run.start, low) - low, min(run.stop, high) - low
            if not self._sharded:
                memory = paddle.zeros([stop - start]).astype(self.dtype)
            else:
                if self._shard is None:
                    self._shard = paddle.zeros([self._layout.shard_numel]).astype(self.dtype)
                memory = flat_view(self._shard, start, stop)
            pieces = (self._pieces[index] for index in run.slots)
            self._parts[run] = Part(memory, start, {piece.index: piece for piece in pieces if piece is not None})
        return self._parts[run]

    def packed_run(self, index: int) -> Optional[Run]:
        """The run of slot ``index`` if its gradient lies packed with its neighbours', else None."""
        run = self._run_of(index)
        return run if run is not None and len(run.slots) > 1 else None

    def _run_of(self, index: int) -> Optional[Run]:
        return next((run for run in self._layout.runs if index in run.slots), None)

    def packed(self, run: Run, start: int, stop: int) -> Tensor:
        """The reduced gradients of elements ``start`` to ``stop`` of the shard, which lie inside ``run``."""
        return self._part_of(run).between(start, stop)

    def has(self, index: int) -> bool:
        """Whether this rank's piece of slot ``index`` has a reduced gradient."""
        return index in self._present

    def of(self, index: int) -> Optional[Tensor]:
        """The reduced gradient of this rank's piece of slot ``index``, 1-D, or None; changes are seen by the step."""
        if index not in self._present:
            return None
        if index in self._alone:
            return self._alone[index]
        run = self._run_of(index)
        return None if run is None else self._part_of(run).view(index)

    @property
    def any(self) -> bool:
        """Whether a reduction has left something here."""
        return bool(self._present)

    def shard(self) -> Tensor:
        """The gradients of this rank's pieces as one tensor of the shard's size; zeros where there is none."""
        shard = paddle.zeros([self._layout.shard_numel], dtype=paddle.float32).astype(self.dtype)
        for index in self._present:
            piece = self._pieces[index]
            if piece is not None:
                copy_into(flat_view(shard, piece.shard_start, piece.shard_start + piece.numel), self.of(index))
        return shard

    def set(self, index: int, value: Tensor) -> None:
        """Replace the gradient of this rank's piece (1-D, the piece's elements) by a copy of ``value``."""
        run = self._run_of(index)
        if run is None:
            return  # no elements
        self._present.add(index)
        if len(run.slots) == 1 and not self._sharded:
            self._alone.setdefault(index, paddle.empty(value.shape, self.dtype))
        copy_into(self.of(index), value)

    def square_sums(self) -> dict[int, float]:
        """The sum of squares of each piece's gradient, by slot, computed in float32 or wider."""
        sums: dict[int, float] = {}
        for part in self._parts.values():
            if len(part.pieces) > 1 and part.memory.dtype == paddle.float32 and part.memory.place.is_cpu_place():
                sums.update(part.square_sums())
        return {index: sums[index] if index in sums else square_sum(self.of(index)) for index in self._present}

    def finite(self) -> bool:
        """Whether no piece's gradient holds an infinite number or nan."""
        if all(bool(paddle.isfinite(tensor).all()) for tensor in self.storage):
            return True  # else it may be an element that means nothing
        return all(bool(paddle.isfinite(self.of(index)).all()) for index in self._present)

    @property
    def storage(self) -> list[Tensor]:
        """The tensors that hold the reduced gradients of this rank's pieces, each once; other elements mean nothing."""
        if self._shard is not None:
            return [self._shard]
        return [*(part.memory for part in self._parts.values()), *self._alone.values()]

    def drop(self) -> None:
        """Forget the gradients; a buffer of the shard's size stays for the next step."""
        self._present.clear()
        self._alone.clear()
        if not self._sharded:
            self._parts.clear()
        for index in with_grad(self._group.tensors):
            param = self._group.params[index]
            if param.optimized:
                param.reached = True
                drop_grad(param.tensor)


class Part:
    """Memory for the gradients of this rank's part of one run."""

    def __init__(self, memory: Tensor, start: int, pieces: dict[int, Piece]) -> None:
        """``memory``, 1-D, begins at element ``start`` of the shard; ``pieces``: those inside, by slot."""
        self.memory = memory
        self.pieces = pieces
        self._start = start
        self._views: dict[int, Tensor] = {}

    def between(self, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the shard."""
        return flat_view(self.memory, start - self._start, stop - self._start)

    def view(self, index: int) -> Tensor:
        """The gradient of the piece of slot ``index``."""
        if index not in self._views:
            piece = self.pieces[index]
            self._views[index] = self.between(piece.shard_start, piece.shard_start + piece.numel)
        return self._views[index]

    def square_sums(self) -> dict[int, float]:
        """Of each piece, by slot; the memory is float32 on the host, with zeros between the pieces."""
        starts = [piece.shard_start - self._start for piece in self.pieces.values()]
        sums = np.add.reduceat(np.square(host_view(self.memory), dtype=np.float64), starts)
        return dict(zip(self.pieces, sums.tolist()))

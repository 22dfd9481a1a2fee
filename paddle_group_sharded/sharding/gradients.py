"""The gradients of a group's parameters: taken from Paddle, reduced, kept for this rank's pieces.

===================================  ============================================================================
where the reduced gradients are      until when
===================================  ============================================================================
``os``, a large parameter            the slice of Paddle's own gradient; from the step to clear_grad
``os``, small neighbours             lasting memory for this rank's part of their run
``os_g`` and ``p_g_os``              one lasting buffer of the shard's size
===================================  ============================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import paddle

from ..comm.base import Overlap, Segment, Work
from ..errors import UsageError
from ..paddle_compat import drop_grad, flat_grad, flat_view, grad_of, has_grad, is_sparse
from ..paddle_compat import packed as pack
from .layout import ALIGN, Run
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
        self._grads: dict[int, Tensor] = {}  # slot -> 1-D gradient of this rank's piece
        self._parts: dict[Run, tuple[Tensor, dict[int, Tensor]]] = {}  # see _part_of
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
            if any(value.dtype != dtype for value in values):
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
            index = run.slots.start
            if len(run.slots) == 1 and not self._sharded:
                overlap.value.scale_(scale)
                if index in self._grads:
                    accumulate(self._grads[index], overlap.value)
                else:  # rounded alike at every level
                    value, dtype = overlap.value, self.dtype
                    self._grads[index] = value if value.dtype == dtype else value.astype(dtype)
                continue
            part, views = self._part_of(run)
            unknown = [view for slot, view in views.items() if slot not in self._grads]
            if len(unknown) == len(views):
                scale_into(part, overlap.value, scale)
            else:
                for view in unknown:
                    copy_into(view, paddle.zeros(view.shape))
                overlap.value.scale_(scale)
                accumulate(part, overlap.value)
            self._grads.update(views)

    def _part_of(self, run: Run) -> tuple[Tensor, dict[int, Tensor]]:
        """Lasting memory for the gradients of this rank's part of ``run``, and its pieces by slot."""
        if run not in self._parts:
            low, high = self._layout.shard_bounds(self._comm.rank)
            start, stop = max(run.start, low) - low, min(run.stop, high) - low
            if self._sharded:
                if self._shard is None:
                    self._shard = paddle.zeros([self._layout.shard_numel]).astype(self.dtype)
                part = flat_view(self._shard, start, stop)
            else:
                part = paddle.empty([stop - start], dtype=self.dtype)
            pieces = [piece for piece in (self._pieces[index] for index in run.slots) if piece is not None]
            views = {
                piece.index: flat_view(part, piece.shard_start - start, piece.shard_start - start + piece.numel)
                for piece in pieces
            }
            self._parts[run] = part, views
        return self._parts[run]

    def packed_run(self, index: int) -> Optional[Run]:
        """The run of slot ``index`` if its gradient lies packed with its neighbours', else None."""
        return next((run for run in self._layout.runs if index in run.slots and len(run.slots) > 1), None)

    def packed(self, run: Run, start: int, stop: int) -> Tensor:
        """The reduced gradients of elements ``start`` to ``stop`` of the shard, which lie inside ``run``."""
        part, _ = self._part_of(run)
        begin = max(run.start - self._layout.shard_bounds(self._comm.rank)[0], 0)
        return flat_view(part, start - begin, stop - begin)

    def of(self, index: int) -> Optional[Tensor]:
        """The reduced gradient of this rank's piece of slot ``index``, 1-D, or None; changes are seen by the step."""
        return self._grads.get(index)

    def shard(self) -> Tensor:
        """The gradients of this rank's pieces as one tensor of the shard's size; zeros where there is none."""
        shard = paddle.zeros([self._layout.shard_numel], dtype=paddle.float32).astype(self.dtype)
        for index, grad in self._grads.items():
            piece = self._pieces[index]
            if piece is not None:
                copy_into(flat_view(shard, piece.shard_start, piece.shard_start + piece.numel), grad)
        return shard

    def set(self, index: int, value: Tensor) -> None:
        """Replace the gradient of this rank's piece (1-D, the piece's elements) by a copy of ``value``."""
        if index not in self._grads:
            run = next(run for run in self._layout.runs if index in run.slots)
            alone = len(run.slots) == 1 and not self._sharded
            self._grads[index] = paddle.empty(value.shape, self.dtype) if alone else self._part_of(run)[1][index]
        copy_into(self._grads[index], value)

    @property
    def storage(self) -> list[Tensor]:
        """The tensors that hold the reduced gradients of this rank's pieces, each once; other elements mean nothing."""
        if self._shard is not None:
            return [self._shard]
        parts = [(part, views) for part, views in self._parts.values() if not views.keys().isdisjoint(self._grads)]
        shared = {index for _, views in parts for index in views}
        return [*(part for part, _ in parts), *(grad for index, grad in self._grads.items() if index not in shared)]

    @property
    def lasting(self) -> list[Tensor]:
        """The tensors that are kept for the reduced gradients from step to step, whether they hold any or not."""
        return [part for part, _ in self._parts.values()] if self._shard is None else [self._shard]

    def drop(self) -> None:
        """Forget the gradients; the shard's gradient buffer stays for the next step."""
        self._grads.clear()
        for param in self._group.params:
            if param.optimized and has_grad(param.tensor):
                param.reached = True
                drop_grad(param.tensor)

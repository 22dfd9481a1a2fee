"""A group: its full buffer, its shard, and the gradients of its pieces.

Who holds what, and until when:

=============  ==========================  =========================================================================
full buffer    whole parameters            always
full buffer    sharded parameters          from :meth:`ParamGroup.gather` to :meth:`ParamGroup.release`
shard          whole parameters            a slice of the full buffer
shard          sharded parameters          memory of its own, always
gradient       whole gradients (``os``)    the reduced slices of Paddle's own gradients, from the step to clear_grad
gradient       sharded gradients           one buffer of the shard's size, from the first reduction on
=============  ==========================  =========================================================================
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Any, Optional

import paddle

from ..comm.base import Comm, Overlap, Segment, Server, Work
from ..errors import UsageError
from ..paddle_compat import bind_view, drop_grad, flat_view, has_grad, has_memory, is_sparse, release, take_grad
from .buffers import BufferPool, FullBuffer
from .layout import GroupLayout, Piece
from .level import Placements
from .ops import accumulate, copy_into
from .param import ShardedParam

__all__ = ["GroupState", "ParamGroup"]

Tensor = Any


class GroupState(Enum):
    """Where the values of a group's parameters are."""

    SHARDED = "sharded"  # only in the shards
    GATHERING = "gathering"  # a gather is under way
    FULL = "full"  # the parameters are views of the full buffer


class ParamGroup:
    """The parameters that share one flat buffer and one collective."""

    def __init__(
        self,
        name: str,
        tensors: Sequence[tuple[str, Tensor]],
        placements: Placements,
        comms: Sequence[Comm],
        pool: BufferPool,
    ) -> None:
        """Move ``tensors`` (structured name, Parameter) into one buffer with rank 0's values.  Collective.

        The last of ``comms`` shares the group out; the others hold replicas of it.  Never holds more than this group
        twice: the parameters' own memory is given up one by one.
        """
        self.name = name
        self.placements = placements
        self.comm = comm = comms[-1]
        self.dtype = tensors[0][1].dtype
        self.layout = GroupLayout.pack([(n, tuple(t.shape)) for n, t in tensors], comm.world_size)
        self.params = [ShardedParam(n, t, self, i, optimized=False) for i, (n, t) in enumerate(tensors)]
        self.pieces: tuple[Optional[Piece], ...] = tuple(
            self.layout.piece(index, comm.rank) for index in range(len(tensors))
        )
        self.state = GroupState.FULL
        self.touched_outside = False  # read outside any forward: the user may have written to the full buffer
        self.users = 0  # forward calls under way that use it
        self.rewritten = False  # the shard has been changed by someone other than the optimizer's step
        self._pool = pool
        self._gather_work: Optional[Work] = None
        self._grad_shard: Optional[Tensor] = None
        self._grads: dict[int, Tensor] = {}  # slot -> 1-D gradient of this rank's piece
        self._build(comms)

    def _build(self, comms: Sequence[Comm]) -> None:
        self._lent: Optional[FullBuffer] = None
        if self.placements.param:
            self._lent = self._pool.take(self.layout.numel, self.dtype)
            self.full: Optional[Tensor] = self._lent.tensor
        else:
            self.full = paddle.empty([self.layout.numel], dtype=self.dtype)
        for param in self.params:
            slot = self.layout.slots[param.index]
            if slot.numel:
                copy_into(flat_view(self.full, slot.start, slot.stop), flat_view(param.tensor))
                bind_view(param.tensor, self.full, slot.start, slot.stop)
        padding = self.layout.numel - self.layout.param_numel
        if padding:
            copy_into(flat_view(self.full, self.layout.param_numel), paddle.zeros([padding]).astype(self.dtype))
        for comm in comms:
            comm.broadcast(self.full, 0, f"initial values of {self.name}").wait()
        own = flat_view(self.full, *self.layout.shard_bounds(self.comm.rank))
        if self.placements.param:
            self.shard: Tensor = own.clone()
            this = weakref.ref(self)  # the communicator's thread must not keep the group alive
            self.comm.serve(self._gather_label, Server(lambda: this().shard, self.layout.numel))  # type: ignore[union-attr]
            own = None
            self.release()
        else:
            self.shard = own

    @property
    def _gather_label(self) -> str:
        return f"gather {self.name}"

    @property
    def expects_grad(self) -> bool:
        """Whether a reduction of this group has anything to reduce."""
        return any(param.expects_grad for param in self.params)

    @property
    def grad_dtype(self) -> Any:
        """Dtype in which gradients are accumulated: float32 with ``main_grad``, else the parameters' own."""
        has_main_grad = any(hasattr(param.tensor, "main_grad") for param in self.params)
        return paddle.float32 if has_main_grad else self.dtype

    # -------------------------------------------------------------------------------------------------- parameters

    def start_gather(self) -> None:
        """Begin to fetch the full buffer; returns at once.  Collective, but may be asked for by some ranks only."""
        if self.state is not GroupState.SHARDED:
            return
        self.adopt_writes()
        self._lent = self._pool.take(self.layout.numel, self.dtype)
        self.full = self._lent.tensor
        self._gather_work = self.comm.all_gather(self.full, self.shard, self._gather_label)
        self.state = GroupState.GATHERING

    def gather(self) -> None:
        """Make the parameters whole.  Collective, but may be asked for by some ranks only."""
        self.start_gather()
        if self._gather_work is not None:
            work, self._gather_work = self._gather_work, None
            work.wait()
            self.bind()
            self.state = GroupState.FULL

    def gathered_copy(self) -> Tensor:
        """The values of the full buffer in memory of its own.  Collective as :meth:`gather`."""
        full = paddle.empty([self.layout.numel], dtype=self.dtype)
        self.comm.all_gather(full, self.shard, self._gather_label).wait()
        return full

    def reload(self) -> None:
        """Undo changes to the full buffer.  Collective, but may be asked for by some ranks only."""
        self.comm.all_gather(self.full, self.shard, self._gather_label).wait()
        self.bind()

    def bind(self) -> None:
        """Make the parameters views of the full buffer."""
        for param in self.params:
            slot = self.layout.slots[param.index]
            if slot.numel:
                bind_view(param.tensor, self.full, slot.start, slot.stop)

    def bind_anything(self) -> None:
        """After a gather that failed inside a backward pass: memory without meaning, so that the pass can end."""
        if self.full is None:
            self._lent = self._pool.take(self.layout.numel, self.dtype)
            self.full = self._lent.tensor
        self._gather_work = None
        self.bind()
        self.state = GroupState.FULL

    def release(self) -> None:
        """Give the full buffer back; sharded parameters hold no memory afterwards."""
        if not self.placements.param or self.state is GroupState.SHARDED:
            return
        if self.state is GroupState.GATHERING:
            self.gather()
        if self.touched_outside:
            self.store_full()
        for param in self.params:
            if param.numel:
                release(param.tensor)
        self.full = None
        if self._lent is not None:
            self._pool.give(self._lent)
        self._lent = None
        self.state = GroupState.SHARDED

    def store_full(self) -> None:
        """Take what stands in the full buffer as the values of the shard."""
        self.touched_outside = False
        self.rewritten = True
        if self.placements.param:
            copy_into(self.shard, flat_view(self.full, *self.layout.shard_bounds(self.comm.rank)))

    def adopt_writes(self) -> None:
        """Keep what the user has written to released parameters (``set_value``, an initializer), or to whole ones."""
        if self.touched_outside and self.state is GroupState.FULL:
            self.store_full()
        if not self.placements.param or self.state is not GroupState.SHARDED:
            return
        for param in self.params:
            if param.numel and has_memory(param.tensor):
                self.write(param.index, param.tensor)
                release(param.tensor)

    def shard_view(self, index: int) -> Optional[Tensor]:
        """The piece of slot ``index`` in this rank's shard, 1-D, or None."""
        piece = self.pieces[index]
        if piece is None:
            return None
        return flat_view(self.shard, piece.shard_start, piece.shard_start + piece.numel)

    def write(self, index: int, value: Tensor) -> None:
        """Set one parameter from a whole tensor of its shape, which every rank gives alike.  No communication."""
        slot = self.layout.slots[index]
        self.rewritten = True
        if self.state is GroupState.GATHERING:
            self.gather()  # what was fetched ahead would overwrite it
        if self.full is not None and slot.numel:
            copy_into(flat_view(self.full, slot.start, slot.stop), flat_view(value))
        piece = self.pieces[index]
        if self.placements.param and piece is not None:
            own = self.shard_view(index)
            copy_into(own, flat_view(value, piece.start, piece.stop))

    def publish(self) -> Optional[Work]:
        """After a step: let every rank see the new values.  Collective."""
        if self.placements.param:
            self.release()
            return None
        return self.comm.all_gather(self.full, self.shard, self._gather_label)

    # --------------------------------------------------------------------------------------------------- gradients

    def reduce(self) -> Work:
        """Begin to sum the local gradients over the ranks; they are taken from the parameters.  Collective."""
        segments: list[Segment] = []
        grad_dtype = self.grad_dtype
        for param in self.params:
            if param.expects_grad and is_sparse(param.tensor):
                raise UsageError(
                    f"parameter {param} has a sparse gradient (selected rows), expected a dense one; "
                    "create its layer, or call F.embedding, with sparse=False"
                )
            grad = take_grad(param.tensor) if param.expects_grad else None
            if param.expects_grad and param.numel == 0:
                param.reached = param.reached or has_grad(param.tensor)
            if grad is None:
                segments.append(param.numel)
                continue
            param.reached = True
            segments.append(grad if grad.dtype == grad_dtype else grad.astype(grad_dtype))
        if all(isinstance(segment, int) for segment in segments):
            segments[0] = paddle.zeros([self.params[0].numel]).astype(grad_dtype)
        return self.comm.reduce_scatter(segments, self.layout.numel, f"reduce {self.name}")

    def absorb(self, overlaps: Sequence[Overlap], scale: float) -> None:
        """Add ``scale`` times a reduction's result to the gradients of this rank's pieces."""
        grad_dtype = self.grad_dtype
        for overlap in overlaps:
            value = overlap.value
            value.scale_(scale)
            known = self._grads.get(overlap.segment)
            if known is not None:
                accumulate(known, value)
            elif not self.placements.grad:  # rounded alike at every level
                self._grads[overlap.segment] = value if value.dtype == grad_dtype else value.astype(grad_dtype)
            elif value.size:
                self._grads[overlap.segment] = view = self._grad_view(overlap.segment)
                copy_into(view, value)

    def _grad_view(self, index: int) -> Tensor:
        if self._grad_shard is None:
            self._grad_shard = paddle.empty([self.layout.shard_numel], dtype=self.grad_dtype)
        piece = self.pieces[index]
        if piece is None:
            raise ValueError(f"rank owns no piece of {self.params[index]}")
        return flat_view(self._grad_shard, piece.shard_start, piece.shard_start + piece.numel)

    def grad(self, index: int) -> Optional[Tensor]:
        """The reduced gradient of this rank's piece of slot ``index``, 1-D, or None; changes are seen by the step."""
        return self._grads.get(index)

    def grad_shard(self) -> Tensor:
        """The gradients of this rank's pieces as one tensor of the shard's size; zeros where there is none."""
        shard = paddle.zeros([self.layout.shard_numel], dtype=paddle.float32).astype(self.grad_dtype)
        for index, grad in self._grads.items():
            piece = self.pieces[index]
            if piece is not None:
                copy_into(flat_view(shard, piece.shard_start, piece.shard_start + piece.numel), grad)
        return shard

    def set_grad(self, index: int, value: Tensor) -> None:
        """Replace the gradient of this rank's piece (1-D, the piece's elements) by a copy of ``value``."""
        if index not in self._grads:
            sharded = self.placements.grad
            self._grads[index] = self._grad_view(index) if sharded else paddle.empty(value.shape, self.grad_dtype)
        copy_into(self._grads[index], value)

    @property
    def grad_storage(self) -> list[Tensor]:
        """The tensors that hold the reduced gradients of this rank's pieces: one buffer, or one for each piece."""
        return list(self._grads.values()) if self._grad_shard is None else [self._grad_shard]

    def drop_grads(self) -> None:
        """Forget the gradients; the shard's gradient buffer stays for the next step."""
        self._grads.clear()
        for param in self.params:
            if param.optimized:
                param.reached = param.reached or has_grad(param.tensor)
                drop_grad(param.tensor)

    def __repr__(self) -> str:
        """Name, size and state."""
        return f"ParamGroup({self.name!r}, {self.layout.param_numel} elements, {self.state.value})"

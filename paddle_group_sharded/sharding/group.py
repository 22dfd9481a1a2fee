"""A group: its full buffer and its shard; its gradients are in :mod:`.gradients`.

Who holds what, and until when:

=============  ==========================  =========================================================================
full buffer    whole parameters            always
full buffer    sharded parameters          from :meth:`ParamGroup.gather` to :meth:`ParamGroup.release`
shard          whole parameters            a slice of the full buffer
shard          sharded parameters          memory of its own, always
=============  ==========================  =========================================================================
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Any, Optional

import paddle

from ..comm.base import Comm, Server, Work
from ..errors import UsageError
from ..paddle_compat import (
    bind_view,
    bind_views,
    flat_view,
    release,
    with_memory,
)
from .buffers import BufferPool, FullBuffer
from .gradients import GroupGradients
from .layout import GroupLayout, Piece
from .level import Placements
from .ops import copy_into, same_bits
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
        self.params = [
            ShardedParam(name, tensor, self, index, optimized=False, numel=self.layout.slots[index].numel)
            for index, (name, tensor) in enumerate(tensors)
        ]
        self.tensors = [tensor for _, tensor in tensors]
        self._places = [  # of the tensors in the full buffer
            (tensor, slot.start, slot.stop, list(slot.shape)) for (_, tensor), slot in zip(tensors, self.layout.slots)
        ]
        self.pieces: tuple[Optional[Piece], ...] = tuple(
            self.layout.piece(index, comm.rank) for index in range(len(tensors))
        )
        self.state = GroupState.FULL
        self.touched_outside = False  # read outside any forward: the user may have written to the full buffer
        self.users = 0  # forward calls under way that use it
        self.may_be_written = False  # code that is not Paddle's own runs in the forward of one of its layers
        self._uses = 0  # ended so far
        self.rewritten = False  # the shard has been changed by someone other than the optimizer's step
        self._pool = pool
        self._gather_work: Optional[Work] = None
        self.gradients = GroupGradients(self)
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
        for start, stop in self.layout.gaps:
            copy_into(flat_view(self.full, start, stop), paddle.zeros([stop - start]))
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
        bind_views(self.full, self._places)

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
        for tensor, start, stop, _ in self._places:
            if start != stop:
                release(tensor)
        self.full = None
        if self._lent is not None:
            self._pool.give(self._lent)
        self._lent = None
        self.state = GroupState.SHARDED

    def end_use(self) -> Optional[UsageError]:
        """Give the full buffer back after a forward or backward; an error as :meth:`written` describes it."""
        self._uses += 1
        looks = self._uses & (self._uses - 1) == 0  # at uses 1, 2, 4, 8 ...: a layer that writes does so soon
        error = self.written() if looks else None
        self.release()
        return error

    def written(self) -> Optional[UsageError]:
        """An error if a layer's forward has changed a sharded parameter, which would be lost; not on every rank."""
        if not self.may_be_written or self.touched_outside or self.state is not GroupState.FULL:
            return None
        low, high = self.layout.shard_bounds(self.comm.rank)
        if same_bits(flat_view(self.full, low, high), self.shard):
            return None
        for param, piece in zip(self.params, self.pieces):
            if piece is None:
                continue
            start = low + piece.shard_start
            if not same_bits(flat_view(self.full, start, start + piece.numel), self.shard_view(param.index)):
                return UsageError(
                    f"parameter {param} was changed while its layer was called, on global rank "
                    f"{self.comm.ranks[self.comm.rank]}; at p_g_os such a change would be lost: list the class of the "
                    "layer in exclude_layer, so that its parameters stay whole, or make the parameter a buffer"
                )
        return None

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
        for index in with_memory(self.tensors):
            if self.params[index].numel:
                self.write(index, self.tensors[index])
                release(self.tensors[index])

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

    def __repr__(self) -> str:
        """Name, size and state."""
        return f"ParamGroup({self.name!r}, {self.layout.param_numel} elements, {self.state.value})"

"""What the optimizer steps: a flat piece of a parameter, or the whole of it where the rule needs whole tensors.

==============  ==================================  ==========================================================
unit            its memory                          when
==============  ==================================  ==========================================================
piece           a view of the shard                 the parameter's own dtype can be stepped where it lies
piece, copied   its own, float32 or on the host     16-bit parameters (the fp32 master), ``offload``
whole           its own, at the owning rank         optimizers whose update of an element needs the whole tensor
==============  ==================================  ==========================================================

A unit carries the name and the options of its parameter, so name-based decay, rates per parameter, regularizers and the
keys of the state are those of an unsharded run.
"""

from __future__ import annotations

from typing import Any, Optional

import paddle

from ..paddle_compat import bind_view, flat_view, has_memory, new_param
from .ops import LOW_PRECISION, copy_into
from .param import ShardedParam

__all__ = ["PieceUnit", "WholeUnit"]

Tensor = Any


class PieceUnit:
    """This rank's piece of one parameter."""

    def __init__(self, param: ShardedParam, master: bool, host: bool) -> None:
        """Step in place, unless ``master`` (a float32 copy of a 16-bit piece) or ``host`` asks for a copy."""
        piece = param.group.pieces[param.index]
        if piece is None:
            raise ValueError(f"rank owns no piece of {param}")
        self.param = param
        self.start, self.stop = piece.start, piece.stop
        self.is_master = master and param.group.dtype in LOW_PRECISION
        self.on_host = host and not param.group.shard.place.is_cpu_place()
        self.is_copy = self.is_master or host
        dtype = paddle.float32 if self.is_master else param.group.dtype
        self.tensor = new_param(param.tensor, [piece.numel], dtype)
        self.refresh()

    def refresh(self) -> None:
        """Take the values of the shard."""
        own: Tensor = self.param.group.shard_view(self.param.index)
        if self.is_copy:
            value = own.astype(self.tensor.dtype)
            value = value.cpu() if self.on_host else value if self.is_master else value.clone()
            bind_view(self.tensor, value, 0, self.stop - self.start)
        else:
            bind_view(self.tensor, own, 0, self.stop - self.start)

    def grad(self) -> Tensor:
        """The reduced gradient where and in the dtype that the step needs it; zeros where there is none."""
        grad = self.param.group.grad(self.param.index)
        if grad is None:
            return paddle.zeros([self.stop - self.start], dtype=self.tensor.dtype)
        if self.on_host:
            grad = grad.cpu()
        return grad if grad.dtype == self.tensor.dtype else grad.astype(self.tensor.dtype)

    def store(self) -> None:
        """Bring the stepped values into the shard."""
        if self.is_copy:
            copy_into(self.param.group.shard_view(self.param.index), flat_view(self.tensor))


class WholeUnit:
    """One whole parameter, stepped by the rank that owns it; the other ranks hold no state of it."""

    def __init__(self, param: ShardedParam, master: bool) -> None:
        """Keep a float32 copy of a 16-bit parameter where ``master`` says so."""
        self.param = param
        self.start, self.stop = 0, param.numel
        self.is_master = master and param.group.dtype in LOW_PRECISION
        dtype = paddle.float32 if self.is_master else param.group.dtype
        self.tensor = new_param(param.tensor, param.tensor.shape, dtype)
        self.stale = True  # the fp32 copy has to be made anew from the parameter

    def load(self, full: Tensor) -> None:
        """Take the values of the parameter out of its group's full buffer."""
        slot = self.param.group.layout.slots[self.param.index]
        value = flat_view(full, slot.start, slot.stop)
        if not self.is_master:
            value = value.clone()
        elif self.stale or not has_memory(self.tensor):
            value = value.astype(paddle.float32)
        else:
            return
        bind_view(self.tensor, value, 0, self.stop)
        self.stale = False

    def store(self, full: Tensor) -> None:
        """Bring the stepped values into the full buffer."""
        slot = self.param.group.layout.slots[self.param.index]
        copy_into(flat_view(full, slot.start, slot.stop), flat_view(self.tensor))


Unit = Optional[PieceUnit]

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

from typing import Any

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
        if piece is None and param.numel:
            raise ValueError(f"rank owns no piece of {param}")
        self.param = param
        self.start, self.stop = (piece.start, piece.stop) if piece is not None else (0, 0)
        self.is_master = master and param.group.dtype in LOW_PRECISION
        self.on_host = host and not param.group.shard.place.is_cpu_place()
        self.is_copy = self.is_master or host
        self.shard_start = piece.shard_start if piece is not None else 0
        # The neighbours that it may share a step with.
        self.run = None if self.is_copy else param.group.gradients.packed_run(param.index)
        dtype = paddle.float32 if self.is_master else param.group.dtype
        self.tensor = new_param(param.tensor, param.tensor.shape if piece is None else [piece.numel], dtype)
        self.refresh()

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return self.stop - self.start

    def refresh(self) -> None:
        """Take the values of the shard."""
        if self.start == self.stop:
            return
        own: Tensor = self.param.group.shard_view(self.param.index)
        if self.is_copy:
            value = _master(own, self.tensor) if self.is_master else own.clone()
            bind_view(self.tensor, value.cpu() if self.on_host else value, 0, self.stop - self.start)
        else:
            bind_view(self.tensor, own, 0, self.stop - self.start)

    def grad(self) -> Tensor:
        """The reduced gradient where and in the dtype that the step needs it; zeros where there is none."""
        grad = self.param.group.gradients.of(self.param.index)
        if grad is None:
            return paddle.zeros([self.stop - self.start], dtype=self.tensor.dtype)
        if self.on_host:
            grad = grad.cpu()
        return grad if grad.dtype == self.tensor.dtype else grad.astype(self.tensor.dtype)

    def store(self) -> None:
        """Bring the stepped values into the shard."""
        if self.is_copy and self.start < self.stop:
            copy_into(self.param.group.shard_view(self.param.index), flat_view(self.tensor))


class WholeUnit:
    """One whole parameter, stepped by the rank that owns it; the other ranks hold no state of it."""

    def __init__(self, param: ShardedParam, master: bool, host: bool) -> None:
        """Keep a float32 copy of a 16-bit parameter where ``master`` says so; ``host``: step on the host."""
        self.param = param
        self.on_host = host and not param.group.shard.place.is_cpu_place()
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
            value = value.clone() if self.stop else value
        elif self.stale or not has_memory(self.tensor):
            value = _master(value, self.tensor)
        else:
            return
        bind_view(self.tensor, value.cpu() if self.on_host else value, 0, self.stop)
        self.stale = False

    def store(self, full: Tensor) -> None:
        """Bring the stepped values into the full buffer."""
        slot = self.param.group.layout.slots[self.param.index]
        copy_into(flat_view(full, slot.start, slot.stop), flat_view(self.tensor))


def _master(value: Tensor, master: Tensor) -> Tensor:
    """``value`` as float32; elements that still are what ``master`` was rounded to keep the digits of ``master``."""
    exact = value.astype(paddle.float32)
    if not has_memory(master):
        return exact
    known = flat_view(master)
    if not value.place.is_cpu_place():  # with offload the master is on the host
        known = paddle.to_tensor(known, place=value.place)
    return paddle.where(known.astype(value.dtype).astype(paddle.float32) == exact, known, exact)

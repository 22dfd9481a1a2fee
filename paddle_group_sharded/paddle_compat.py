"""Every private Paddle name that the package uses, one documented function each.

The rest of the package imports from here and from Paddle's public modules only, so a new Paddle release is checked in
one place: ``unittests/test_paddle_compat.py`` runs every function on both supported versions.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np
import paddle
from paddle.base import core
from paddle.base.framework import EagerParamBase
from paddle.base.layer_helper import LayerHelper

__all__ = [
    "GlooGroup",
    "HostMemory",
    "allocated_bytes",
    "bind_view",
    "create_accumulators",
    "current_host",
    "element_size",
    "flat_view",
    "has_grad",
    "has_memory",
    "is_sparse",
    "new_param",
    "on_grad_ready",
    "peak_bytes",
    "release",
    "step_units",
    "take_grad",
    "tcp_store",
]

Tensor = Any
Optimizer = Any


# ----------------------------------------------------------------------------------------------------------- memory


def allocated_bytes() -> int:
    """Bytes of live CPU tensors of this process, by Paddle's allocator; exact."""
    return int(core.host_memory_stat_current_value("Allocated", 0))


def peak_bytes() -> int:
    """Highest :func:`allocated_bytes` since the process started (Paddle 2.6 cannot reset it)."""
    return int(core.host_memory_stat_peak_value("Allocated", 0))


def element_size(dtype: Any) -> int:
    """Bytes of one element of a Paddle dtype."""
    return int(core.size_of_dtype(dtype))


def flat_view(tensor: Tensor, start: int = 0, stop: Optional[int] = None) -> Tensor:
    """A 1-D tensor over elements ``start`` to ``stop`` of ``tensor``'s memory; outside of autograd.

    It holds the memory as an owner does, so it outlives ``tensor``.
    """
    view = core.eager.Tensor(tensor.get_tensor())
    dense = view.get_tensor()
    numel = int(tensor.size)
    dense._set_dims([numel])
    if start != 0 or (stop is not None and stop != numel):
        dense._share_data_with(dense._slice(start, numel if stop is None else stop))
    return view


def bind_view(tensor: Tensor, buffer: Tensor, start: int, stop: int) -> None:
    """Make ``tensor`` a view of elements ``start`` to ``stop`` of the 1-D ``buffer``; it keeps its shape.

    What it held before is given up; tensors that autograd saved see the new memory.
    """
    shape = list(tensor.shape)
    dense = tensor.get_tensor()
    dense._share_data_with(buffer.get_tensor()._slice(start, stop))
    dense._set_dims(shape)


def release(tensor: Tensor) -> None:
    """Give up ``tensor``'s memory; its shape stays, and reading it raises until it is bound again."""
    tensor._clear_data()


def has_memory(tensor: Tensor) -> bool:
    """Whether ``tensor`` holds memory."""
    return bool(tensor._is_initialized())


class HostMemory:
    """Host memory for buffers that are used again, which knows whether anybody still looks at it.

    A released parameter may have left a view behind (``weight.t()`` saved by autograd, a slice that the user keeps);
    writing another layer's weights under it would change numbers silently.  The tensors handed out are therefore built
    over a NumPy array, whose reference count tells whether the last of them, and of all views of them, is gone.  The
    bytes are Paddle's own, so that the allocator's statistics count them.
    """

    def __init__(self, numel: int, dtype: Any) -> None:
        """Allocate ``numel`` elements of ``dtype`` on the host."""
        base = paddle.empty([numel], dtype=dtype)
        raw = (ctypes.c_uint8 * (numel * element_size(dtype))).from_address(base.data_ptr())
        raw.base = base  # the memory lives until the last view of the array is gone
        numpy_dtype = np.uint16 if dtype == paddle.bfloat16 else base.numpy().dtype
        self._array = np.frombuffer(raw, dtype=numpy_dtype)
        self._idle_count = sys.getrefcount(self._array)

    @property
    def in_use(self) -> bool:
        """Whether a tensor over this memory is alive anywhere."""
        return sys.getrefcount(self._array) > self._idle_count

    def tensor(self) -> Tensor:
        """A new 1-D tensor over the memory."""
        return core.eager.Tensor(
            value=self._array,
            place=core.CPUPlace(),
            persistable=False,
            zero_copy=True,
            name="group_buffer",
            stop_gradient=True,
        )


# -------------------------------------------------------------------------------------------------------- gradients


def on_grad_ready(param: Tensor, callback: Callable[[], None]) -> None:
    """Call ``callback`` once per backward pass, after the gradient of ``param`` has been accumulated.

    ``param`` must be trainable at the time of the call.  Paddle cannot remove such a hook, so the callback has to be
    able to do nothing.
    """
    param._register_backward_hook(callback)


def is_sparse(param: Tensor) -> bool:
    """Whether the gradient of ``param`` holds selected rows instead of a whole tensor."""
    grad = param._grad_ivar()
    return grad is not None and bool(grad.is_selected_rows())


def take_grad(param: Tensor) -> Optional[Tensor]:
    """The gradient of ``param`` as a 1-D tensor, which the parameter then has no more; None without one."""
    if getattr(param, "main_grad", None) is not None:
        flat = flat_view(param.main_grad)
        param.main_grad = None
        return flat
    grad = param._grad_ivar()
    if grad is None or not grad._is_initialized():
        return None
    flat = flat_view(grad)
    param.clear_gradient(False)
    return flat


def has_grad(param: Tensor) -> bool:
    """Whether ``param`` holds a gradient of its own."""
    if getattr(param, "main_grad", None) is not None:
        return True
    grad = param._grad_ivar()
    return grad is not None and bool(grad._is_initialized())


# -------------------------------------------------------------------------------------------------------- optimizers


def new_param(like: Tensor, shape: Sequence[int], dtype: Any) -> Tensor:
    """A trainable parameter with the name and the options of ``like``, but another shape; without memory."""
    param = EagerParamBase(shape=list(shape), dtype=dtype, name=like.name, trainable=True)
    for key, value in vars(like).items():
        if key not in ("main_grad", "trainable"):
            setattr(param, key, value)
    return param


def step_units(optimizer: Optimizer, param_groups: Sequence[dict[str, Any]]) -> None:
    """Let ``optimizer`` update parameters with the given gradients.

    ``param_groups`` holds one dict per group of the optimizer, with the pairs ``(param, grad)`` under ``"params"`` and
    the group's own options, without clipping, beside them; an optimizer without groups of its own has one dict that
    holds nothing else.
    """
    has_groups = bool(optimizer._param_groups) and isinstance(optimizer._param_groups[0], dict)
    grad_clip, optimizer._grad_clip = optimizer._grad_clip, None
    try:
        with paddle.no_grad():
            for index, group in enumerate(param_groups):
                if not group["params"]:
                    continue
                params_grads = {**group, "grad_clip": None} if has_groups else group["params"]
                optimizer._apply_optimize(
                    loss=None, startup_program=None, params_grads=params_grads, param_group_idx=index
                )
    finally:
        optimizer._grad_clip = grad_clip


def create_accumulators(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    """Give ``params`` fresh optimizer states, as their first step would."""
    block = paddle.static.default_main_program().global_block()
    if optimizer.helper is None:  # set by the first step; 2.6 needs it before
        optimizer.helper = LayerHelper(type(optimizer).__name__)
    with paddle.no_grad():
        optimizer._create_accumulators(block, list(params))


# ------------------------------------------------------------------------------------------------------ communication


def tcp_store() -> Any:
    """The key-value store between all ranks of the launch: ``set(name, str)``, ``get(name) -> bytes`` (waits for the
    name), ``add(name, number) -> sum``.  Tens of milliseconds a call.
    """
    return core.create_or_get_global_tcp_store()


def current_host() -> str:
    """The address at which the launch says that other ranks reach this one."""
    return paddle.distributed.ParallelEnv().current_endpoint.rpartition(":")[0].strip("[]") or "127.0.0.1"


class GlooGroup:
    """A gloo process group that Paddle's registry of groups does not hand out to anybody else.

    Every method takes contiguous CPU tensors, blocks until done, and releases the GIL meanwhile.
    """

    def __init__(self, store: Any, rank: int, world_size: int, group_id: int) -> None:
        """Collective over the members; ``group_id`` keeps their messages apart from those of other groups."""
        self._group = core.ProcessGroupGloo.create(store, rank, world_size, group_id)

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        """Fill the 1-D ``full`` with every rank's ``shard``; ``shard`` may be this rank's slice of ``full``."""
        self._group.all_gather_into_tensor(full, shard, True).wait()

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """``"sum"`` or ``"max"`` over the ranks, in place."""
        self._group.all_reduce(tensor, core.ReduceOp.SUM if op == "sum" else core.ReduceOp.MAX, True).wait()

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Overwrite ``tensor`` with that of group rank ``src``."""
        self._group.broadcast(tensor, src, True).wait()

    def send(self, tensor: Tensor, dst: int) -> None:
        """Hand ``tensor`` to group rank ``dst``; returns when it has received."""
        self._group.send(tensor, dst, True).wait()

    def recv(self, tensor: Tensor, src: int) -> None:
        """Overwrite ``tensor`` with the next one from group rank ``src``."""
        self._group.recv(tensor, src, True).wait()

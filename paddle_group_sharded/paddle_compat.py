"""Every private Paddle name that the package uses, one documented function each.

The rest of the package imports from here and from Paddle's public modules only, so a new Paddle release is checked in
one place: ``unittests/test_paddle_compat.py`` runs every function on both supported versions.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional

import numpy as np
import paddle
from paddle.base import core
from paddle.base.framework import EagerParamBase
from paddle.base.layer_helper import LayerHelper

__all__ = [
    "GlooGroup",
    "HostMemory",
    "accumulators",
    "add_pending_states",
    "allocated_bytes",
    "bind_view",
    "bind_views",
    "copy_options",
    "create_accumulators",
    "current_host",
    "drop_grad",
    "element_size",
    "flat_grad",
    "flat_view",
    "forget_fused_params",
    "forward_pre_hooks",
    "fill_lazy",
    "fresh_states",
    "functions_of_params",
    "grad_of",
    "has_grad",
    "has_memory",
    "host_view",
    "innermost_optimizer",
    "is_lazy",
    "is_sparse",
    "keeps_masters",
    "layer_params",
    "lr_scheduler",
    "master_weights",
    "new_param",
    "on_backward_end",
    "on_grad_ready",
    "on_gradient",
    "open_tcp_store",
    "optimizer_options",
    "overflow_flag",
    "packed",
    "param_groups",
    "peak_bytes",
    "pending_states",
    "release",
    "set_layer_params",
    "set_master_weights",
    "set_overflow_flag",
    "share_memory",
    "step_units",
    "take_pending_states",
    "tcp_store",
    "tensor_over",
    "unwrapped_layer",
    "with_grad",
    "with_memory",
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
    numel = int(tensor.size)
    if start == (numel if stop is None else stop):  # Paddle has no views of nothing
        return paddle.empty([0], dtype=tensor.dtype)
    view = paddle.Tensor.__new__(paddle.Tensor)  # calling the class leaks a list each time in 3.3
    tensor._share_buffer_to(view)
    dense = view.get_tensor()
    dense._set_dims([numel])
    if start != 0 or (stop is not None and stop != numel):
        dense._share_data_with(dense._slice(start, numel if stop is None else stop))
    return view


def bind_view(tensor: Tensor, buffer: Tensor, start: int, stop: int) -> None:
    """Make ``tensor`` a view of elements ``start`` to ``stop`` of the 1-D ``buffer``; it keeps its shape.

    What it held before is given up; tensors that autograd saved see the new memory.
    """
    bind_views(buffer, [(tensor, start, stop, list(tensor.shape))])


def bind_views(buffer: Tensor, places: Iterable[tuple[Tensor, int, int, list[int]]]) -> None:
    """Do as :func:`bind_view` for each tensor, start, stop and shape; known shapes save a fifth of the time."""
    memory = buffer.get_tensor()
    for tensor, start, stop, shape in places:
        if start != stop:
            dense = tensor.get_tensor()
            dense._share_data_with(memory._slice(start, stop))
            dense._set_dims(shape)


def release(tensor: Tensor) -> None:
    """Give up ``tensor``'s memory; its shape stays, and reading it raises until it is bound again."""
    tensor.get_tensor()._clear()


def is_lazy(param: Tensor) -> bool:
    """Whether ``param`` was made under ``paddle.LazyGuard`` and has not been given its initial value."""
    return getattr(param, "_init_func", None) is not None


def fill_lazy(param: Tensor, for_good: bool) -> None:
    """Give a lazy parameter its initial value, or with ``for_good`` False a value that leaves it lazy."""
    init = param._init_func
    param.initialize()
    if not for_good:
        param._init_func = init


def share_memory(source: Tensor, target: Tensor) -> None:
    """Make ``target`` a view of the memory of ``source``, which has the same number of elements."""
    source._share_buffer_to(target)


def has_memory(tensor: Tensor) -> bool:
    """Whether ``tensor`` holds memory."""
    return bool(tensor._is_initialized())


def with_memory(tensors: Iterable[Tensor]) -> list[int]:
    """The positions of those of ``tensors`` that hold memory."""
    return [position for position, tensor in enumerate(tensors) if tensor._is_initialized()]


def host_view(tensor: Tensor) -> Any:
    """The memory of a contiguous CPU tensor as a 1-D NumPy array; bfloat16 as its 16-bit patterns.

    Writing to it writes to the tensor.  It keeps the tensor alive, but not the tensor its memory.
    """
    numel = math.prod(tensor.shape)
    name = str(tensor.dtype).rpartition(".")[2]
    numpy_dtype = np.dtype(np.uint16 if name == "bfloat16" else name)
    if numel == 0:
        return np.empty(0, numpy_dtype)
    raw: Any = (ctypes.c_uint8 * (numel * numpy_dtype.itemsize)).from_address(tensor.data_ptr())
    raw.base = tensor
    return np.frombuffer(raw, numpy_dtype)


def tensor_over(array: Any) -> Tensor:
    """A CPU tensor over the memory of a NumPy array, which it keeps alive; uint16 becomes bfloat16."""
    return core.eager.Tensor(
        value=array, place=core.CPUPlace(), persistable=False, zero_copy=True, name="host", stop_gradient=True
    )


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
        raw: Any = (ctypes.c_uint8 * (numel * element_size(dtype))).from_address(base.data_ptr())
        raw.base = base  # the memory lives until the last view of the array is gone
        numpy_dtype = np.uint16 if dtype == paddle.bfloat16 else paddle.empty([1], dtype=dtype).numpy().dtype
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


# ----------------------------------------------------------------------------------------------------------- layers


def layer_params(layer: Any) -> Any:
    """The mapping of names to parameters that ``layer`` owns directly."""
    return layer.__dict__["_parameters"]


def set_layer_params(layer: Any, params: Any) -> None:
    """Replace that mapping; attribute access goes through its ``__getitem__``."""
    layer.__dict__["_parameters"] = params


def unwrapped_layer(layer: Any) -> Any:
    """The user's own layer inside Paddle's wrappers: ``DataParallel``, fleet's ``MixPrecisionLayer``."""
    while isinstance(layer, paddle.DataParallel) or type(layer).__name__ == "MixPrecisionLayer":
        layer = layer._layers
    return layer


def forward_pre_hooks(layer: Any) -> list[Any]:
    """The hooks that run before the forward of ``layer``."""
    return list(layer._forward_pre_hooks.values())


# -------------------------------------------------------------------------------------------------------- gradients


def on_grad_ready(param: Tensor, callback: Callable[[], None]) -> None:
    """Call ``callback`` once per backward pass, after the gradient of ``param`` has been accumulated.

    ``param`` must be trainable at the time of the call.  Paddle cannot remove such a hook, so the callback has to be
    able to do nothing.
    """
    param._register_backward_hook(callback)


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call ``hook`` whenever a backward pass reaches ``tensor``: its ``register_hook``, at a third of the cost.

    ``tensor`` must be the result of an operation that autograd records.
    """
    tensor._register_grad_hook(hook)


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` once, at the end of the backward pass under way.

    A pass inside of it, such as recompute's, counts as one of its own: its end is the first.
    """
    core.eager._add_backward_final_hook(callback)


def grad_of(param: Tensor) -> Optional[Tensor]:
    """The gradient of ``param``, in its shape, or None; it may be sparse or not contiguous."""
    if getattr(param, "main_grad", None) is not None:
        return param.main_grad
    grad = param._grad_ivar()
    return grad if grad is not None and grad._is_initialized() else None


def is_sparse(grad: Tensor) -> bool:
    """Whether a gradient holds selected rows instead of a whole tensor."""
    return bool(grad.is_selected_rows())


def flat_grad(grad: Tensor) -> Tensor:
    """A gradient as a 1-D tensor that holds its memory by itself, so that the parameter's can be dropped."""
    return flat_view(grad if grad.is_contiguous() else grad.contiguous())  # weight.t() gives a transposed one


def packed(tensors: Sequence[Tensor], align: int, gaps: Any) -> Tensor:
    """A new 1-D tensor with ``tensors`` (any shapes, all float32 or all float64) one after the other.

    Each begins at a multiple of ``align`` elements.  ``gaps``: the positions between them, a NumPy array; zeros there.
    The end is padded to ``align`` with elements that have no meaning.
    """
    dtype = tensors[0].dtype
    itemsize = element_size(dtype)
    _, fused = paddle._C_ops.coalesce_tensor(
        list(tensors), dtype, True, False, False, 0.0, True, align * itemsize, itemsize, [], []
    )
    if not fused.place.is_cpu_place():
        fused[paddle.to_tensor(gaps)] = 0.0
    elif gaps.size:
        host_view(fused)[gaps] = 0.0
    return fused


def drop_grad(param: Tensor) -> None:
    """Free the gradient of ``param``, where it has one."""
    if getattr(param, "main_grad", None) is not None:
        param.main_grad = None
    param.clear_gradient(False)


def has_grad(param: Tensor) -> bool:
    """Whether ``param`` holds a gradient of its own."""
    return bool(with_grad([param]))


def with_grad(params: Iterable[Tensor]) -> list[int]:
    """The positions of those of ``params`` that hold a gradient."""
    found = []
    for position, param in enumerate(params):
        grad = param._grad_ivar()
        if grad is not None and (grad._is_initialized() or param.size == 0):
            found.append(position)
        elif getattr(param, "main_grad", None) is not None:
            found.append(position)
    return found


# -------------------------------------------------------------------------------------------------------- optimizers


def new_param(like: Tensor, shape: Sequence[int], dtype: Any) -> Tensor:
    """A trainable parameter with the name and the options of ``like``, but another shape; without memory."""
    param = EagerParamBase(shape=list(shape), dtype=dtype, name=like.name, trainable=True)
    copy_options(like, param)
    return param


def copy_options(source: Tensor, target: Tensor) -> None:
    """Give one parameter the rate, the regularizer, the clip flag and the other attributes of another."""
    target.__dict__.update((key, value) for key, value in vars(source).items() if key != "main_grad")


# Attributes, and options of groups, that hold a function of a parameter or of its name; what else a step of units sets
# aside.
_PARAM_FUNCTIONS = ("_lr_ratio", "_exclude_from_weight_decay_fn", "exclude_from_weight_decay_fn")
_NAME_FUNCTIONS = ("_apply_decay_param_fun", "apply_decay_param_fun")
_STEP_OPTIONS = ("_grad_clip", "_use_multi_tensor", "_default_dict")
# Keys of the tables of use_multi_tensor; the second pair is that of Paddle 2.6.
_FUSED_KEYS = ({"FP32_DenseTensor", "FP16_DenseTensor"}, {"FP32_LODTensor", "FP16_LODTensor"})


def functions_of_params(optimizer: Optimizer, options: Mapping[str, Any]) -> list[Callable[[Tensor], Any]]:
    """The functions of a parameter that the user gave ``optimizer``, or a group of it by its ``options``."""
    found: list[Callable[[Tensor], Any]] = []
    for source in (vars(optimizer), options):
        found += [source[key] for key in _PARAM_FUNCTIONS if source.get(key) is not None]
        by_name = [source[key] for key in _NAME_FUNCTIONS if source.get(key) is not None]
        found += [_of_name(function) for function in by_name]
    return found


def _of_name(function: Callable[[str], Any]) -> Callable[[Tensor], Any]:
    return lambda param: function(param.name)


def step_units(
    optimizer: Optimizer, param_groups: Sequence[dict[str, Any]], originals: Mapping[str, Tensor]
) -> None:
    """Let ``optimizer`` update parameters with the given gradients.

    ``param_groups`` holds one dict per group of the optimizer, with the pairs ``(param, grad)`` under ``"params"`` and
    the group's own options beside them; an optimizer without groups of its own has one dict that holds nothing else.
    Nothing is clipped.  Functions of a parameter or of its name that the user gave (rates and decays of AdamW,
    exclusions of LAMB) see ``originals[param.name]``.  The fused kernels of ``use_multi_tensor`` read the gradients
    that the parameters hold, and units hold none: the ordinary ones are used, whose last digit may differ.
    """

    def shown(options: dict[str, Any]) -> dict[str, Any]:
        by_param = {key: options[key] for key in _PARAM_FUNCTIONS if options.get(key) is not None}
        by_name = {key: options[key] for key in _NAME_FUNCTIONS if options.get(key) is not None}
        return {
            **options,
            **{key: lambda param, f=f: f(originals[param.name]) for key, f in by_param.items()},
            **{key: lambda name, f=f: f(originals[name].name) for key, f in by_name.items()},
        }

    has_groups = bool(optimizer._param_groups) and isinstance(optimizer._param_groups[0], dict)
    set_aside = (*_PARAM_FUNCTIONS, *_NAME_FUNCTIONS, *_STEP_OPTIONS)
    before = {key: vars(optimizer)[key] for key in set_aside if key in vars(optimizer)}
    optimizer.__dict__.update(shown(before), _grad_clip=None, _use_multi_tensor=None)
    optimizer._default_dict = shown(optimizer._default_dict)
    try:
        with paddle.no_grad():
            for index, group in enumerate(param_groups):
                if not group["params"]:
                    continue
                params_grads = {**shown(group), "grad_clip": None} if has_groups else group["params"]
                optimizer._apply_optimize(
                    loss=None, startup_program=None, params_grads=params_grads, param_group_idx=index
                )
    finally:
        optimizer.__dict__.update(before)


def forget_fused_params(optimizer: Optimizer) -> None:
    """Let an optimizer with ``use_multi_tensor`` make its lists of parameters and states anew at its next step."""
    for table in vars(optimizer).values():
        if isinstance(table, dict) and set(table) in _FUSED_KEYS:
            for by_group in table.values():
                for tensors in by_group or ():
                    tensors.clear()


def innermost_optimizer(optimizer: Any) -> Any:
    """The optimizer inside the wrappers of fleet (``HybridParallelOptimizer``, ``MixPrecisionOptimizer``)."""
    while hasattr(optimizer, "_inner_opt"):
        optimizer = optimizer._inner_opt
    return optimizer


def param_groups(optimizer: Optimizer) -> list[tuple[dict[str, Any], list[Tensor], Any]]:
    """The options, parameters and clip object of each group; one without options where there are no groups."""
    groups = optimizer._param_groups or []
    if groups and isinstance(groups[0], dict):
        return [
            ({key: value for key, value in group.items() if key != "params"}, group["params"], group.get("grad_clip"))
            for group in groups
        ]
    return [({}, list(groups), optimizer._grad_clip)]


def optimizer_options(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer that are numbers, texts or flags: rates, betas, switches, by name."""
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, (bool, int, float, str))}


def lr_scheduler(optimizer: Optimizer) -> Optional[Any]:
    """The scheduler of the learning rate, or None."""
    rate = optimizer._learning_rate
    return rate if isinstance(rate, paddle.optimizer.lr.LRScheduler) else None


def keeps_masters(optimizer: Optimizer) -> bool:
    """Whether the user asked for float32 master weights."""
    return bool(getattr(optimizer, "_multi_precision", False))


def overflow_flag(optimizer: Optimizer) -> Any:
    """What ``GradScaler.step`` has left for the optimizer: a flag or a tensor, None where no scaler is used."""
    return optimizer._get_auxiliary_var("found_inf")


def set_overflow_flag(optimizer: Optimizer, value: Any) -> None:
    """Answer the scaler, which reads the flag again after the step."""
    optimizer._set_auxiliary_var("found_inf", value)


def accumulators(optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """The optimizer's own table of states: state name -> parameter name -> tensor; changes are seen by it."""
    table: dict[str, dict[str, Tensor]] = optimizer._accumulators
    return table


def master_weights(optimizer: Optimizer) -> dict[str, Tensor]:
    """A copy of the table of float32 master weights: parameter name -> tensor."""
    return dict(getattr(optimizer, "_master_weights", None) or {})


def set_master_weights(optimizer: Optimizer, masters: dict[str, Tensor]) -> None:
    """Replace the table of master weights."""
    if hasattr(optimizer, "_master_weights"):
        optimizer._master_weights = masters


def pending_states(optimizer: Optimizer) -> dict[str, Any]:
    """What ``set_state_dict`` keeps until parameters are stepped for the first time."""
    return dict(optimizer._accumulators_holder)


def add_pending_states(optimizer: Optimizer, states: Mapping[str, Any]) -> None:
    """Add to :func:`pending_states`, by the keys of ``state_dict()``."""
    optimizer._accumulators_holder.update(states)


def take_pending_states(optimizer: Optimizer) -> dict[str, Any]:
    """:func:`pending_states`, which the optimizer then forgets."""
    pending, optimizer._accumulators_holder = dict(optimizer._accumulators_holder), {}
    return pending


def fresh_states(optimizer: Optimizer, param: Tensor) -> dict[str, Tensor]:
    """The states that ``optimizer`` would create for ``param``; its tables are left as they were."""
    pending, optimizer._accumulators_holder = optimizer._accumulators_holder, {}
    param.name = paddle.utils.unique_name.generate("state_probe")  # optimizers remember names for ever
    names = len(optimizer._opti_name_list)
    try:
        create_accumulators(optimizer, [param])
    finally:
        optimizer._accumulators_holder = pending
        del optimizer._opti_name_list[names:]
    table = {name: by_param.pop(param.name, None) for name, by_param in accumulators(optimizer).items()}
    return {name: state for name, state in table.items() if state is not None}


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


def open_tcp_store(host: str, port: int, serve: bool) -> Any:
    """A key-value store of our own: ``serve`` it on this rank, or connect to the rank that does."""
    return core.TCPStore(host, port, serve, 1)


class GlooGroup:
    """A gloo process group that Paddle's registry of groups does not hand out to anybody else.

    Every method takes contiguous CPU tensors, blocks until done, and releases the GIL meanwhile.  Paddle keeps the
    group, its sockets and its threads until the process ends.
    """

    def __init__(self, store: Any, rank: int, world_size: int, group_id: int) -> None:
        """Collective over the members; ``group_id`` must be new to the process.

        ``store`` must be new to gloo: Paddle leaves the addresses of every group under the same names, so a rank that
        is slow to overwrite its own sends the others to sockets of an earlier group ("Connection refused").
        """
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

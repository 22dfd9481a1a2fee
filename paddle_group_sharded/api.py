"""What users call: check the arguments on every rank, agree, then build."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Optional

import paddle
from paddle import nn

from .comm import Comm, LocalComm, create_comm
from .errors import GroupShardedError, UsageError
from .model_files import load_group_sharded_model, save_group_sharded_model
from .paddle_compat import has_memory
from .sharding.engine import Engine, EngineConfig, named_params
from .sharding.hooks import RootHook
from .sharding.level import Level
from .sharding.model import ShardedModel
from .sharding.optimizer import ShardedOptimizer
from .sharding.rules import unwrap_optimizer
from .sharding.scaler import share_scaler, unshare_scaler

__all__ = ["group_sharded_parallel", "load_group_sharded_model", "save_group_sharded_model", "unwrap"]

DEFAULT_TIMEOUT = 1800.0  # seconds


def group_sharded_parallel(
    model: nn.Layer,
    optimizer: Any,
    level: str,
    scaler: Optional[paddle.amp.GradScaler] = None,
    group: Any = None,
    offload: bool = False,
    sync_buffers: bool = False,
    buffer_max_size: int = 2**23,
    segment_size: int = 0,
    sync_comm: bool = False,
    dp_group: Any = None,
    exclude_layer: Optional[Sequence[Any]] = None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> tuple[ShardedModel, ShardedOptimizer, Optional[paddle.amp.GradScaler]]:
    """Shard optimizer states, gradients and parameters over a group of ranks (ZeRO, arXiv 1910.02054, section 5).

    A step gives the result of ``paddle.DataParallel`` with the same optimizer.  Collective over ``group`` and
    ``dp_group``; the weights and buffers of group rank 0 become everyone's.

    Args:
        model: any ``nn.Layer``; call the returned model in its place.
        optimizer: any of ``paddle.optimizer`` but LBFGS, over parameters of ``model``; may have states already.
        level: ``"os"`` shards the optimizer states, ``"os_g"`` also the gradients, ``"p_g_os"`` also the parameters.
        scaler: for float16; returned as the same object, sharing its overflow decision over the ranks.
        group: a ``paddle.distributed`` group of the ranks to shard over; None for all ranks.
        offload: keep the optimizer's pieces and states on the host and step there.
        sync_buffers: broadcast the buffers of group rank 0 before each forward.
        buffer_max_size: elements of a bucket where parameters are whole.
        segment_size: parameters of at most so many elements stay whole at ``"p_g_os"``.
        sync_comm: wait for each reduction where it is issued, instead of at the step.
        dp_group: the group of ranks that hold the same shard; gradients are averaged over it too.
        exclude_layer: class names and ``id``s of layers whose parameters stay whole at ``"p_g_os"``.
        timeout: seconds that a rank may be late for a collective before the others give up, naming it.

    Returns:
        The wrapped model, the wrapped optimizer and the scaler.

    Raises:
        UsageError: on every rank, before anything has been changed, for what cannot be done exactly.

    Example:
        >>> import paddle
        >>> from paddle_group_sharded import group_sharded_parallel
        >>> model = paddle.nn.Linear(4, 2)
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> model, optimizer, _ = group_sharded_parallel(model, optimizer, "p_g_os")
        >>> model(paddle.ones([3, 4])).mean().backward()
        >>> optimizer.step()
        >>> optimizer.clear_grad()
    """
    if not paddle.in_dynamic_mode():
        raise UsageError("group_sharded_parallel works in dynamic mode only; call paddle.disable_static() first")
    comm = create_comm(group, timeout)
    dp_comm = create_comm(dp_group, timeout) if dp_group is not None else LocalComm((comm.ranks[comm.rank],))
    try:
        arguments = {
            "offload": offload,
            "sync_buffers": sync_buffers,
            "buffer_max_size": buffer_max_size,
            "segment_size": segment_size,
            "sync_comm": sync_comm,
            "exclude_layer": exclude_layer,
        }
        inner, config = _agree(comm, dp_comm, model, optimizer, level, scaler, arguments)
        names_root = _names_root(model)
        optimized = {id(param) for param in _optimizer_params(inner)}
        engine = Engine(model, names_root, optimized, config, comm, dp_comm)
        engine.reducer.synchronous = sync_comm
        sharded_optimizer = ShardedOptimizer(inner, engine, offload)
    except BaseException:
        comm.close()
        dp_comm.close()
        raise
    if scaler is not None:
        share_scaler(scaler)
    return ShardedModel(model, engine, sharded_optimizer), sharded_optimizer, scaler


def unwrap(
    model: ShardedModel, optimizer: ShardedOptimizer, scaler: Optional[paddle.amp.GradScaler] = None
) -> tuple[nn.Layer, Any]:
    """Give back the plain model and optimizer that were wrapped, with their current values.  Collective.

    Both are whole on every rank afterwards, so there must be room for them.  The wrappers must not be used any more.
    """
    if not isinstance(model, ShardedModel) or not isinstance(optimizer, ShardedOptimizer):
        raise UsageError(
            "unwrap takes the model and the optimizer that group_sharded_parallel returned, got "
            f"{type(model).__name__} and {type(optimizer).__name__}"
        )
    optimizer._states.give_back()
    model._engine.close()
    if scaler is not None:
        unshare_scaler(scaler)
    return model._layer, optimizer._optim


# ------------------------------------------------------------------------------------------------------------- checks


def _agree(
    comm: Comm, dp_comm: Comm, model: Any, optimizer: Any, level: Any, scaler: Any, arguments: dict[str, Any]
) -> tuple[Any, EngineConfig]:
    """Check on this rank, then compare with the others: all go on, or all raise."""
    problem: Optional[GroupShardedError] = None
    signature: list[Any] = []
    try:
        inner, config = _check(model, optimizer, level, scaler, arguments)
        names = [
            (entry[0][0], tuple(entry[2].shape), str(entry[2].dtype), bool(entry[2].stop_gradient))
            for entry in named_params(_names_root(model))
        ]
        excluded = tuple(item if isinstance(item, str) else "a layer's id" for item in config.whole_layers)
        signature = [type(inner).__name__, level, str(replace(config, whole_layers=excluded)), names]
    except GroupShardedError as error:
        problem = error
    for group in (comm, dp_comm):
        reports = group.exchange((problem, signature), "group_sharded_parallel")
        if problem is not None:
            continue
        for rank, (reported, other) in enumerate(reports):
            if reported is not None:
                problem = type(reported)(f"rank {group.ranks[rank]}: {reported}")
            elif other != reports[0][1]:
                problem = UsageError(_difference(group.ranks[0], reports[0][1], group.ranks[rank], other))
    if problem is not None:
        raise problem
    return inner, config


def _difference(rank0: int, first: list[Any], rank: int, other: list[Any]) -> str:
    for what, ours, theirs in zip(("optimizer", "level", "arguments"), first, other):
        if ours != theirs:
            return f"{what} differ between ranks: rank {rank0} has {ours}, rank {rank} has {theirs}"
    if len(first[3]) != len(other[3]):
        return (
            f"the models differ between ranks: rank {rank0} has {len(first[3])} parameters, "
            f"rank {rank} has {len(other[3])}; build the same model on every rank"
        )
    for ours, theirs in zip(first[3], other[3]):
        if ours != theirs:
            return (
                "the models differ between ranks (name, shape, dtype, frozen): "
                f"rank {rank0} has {ours}, rank {rank} has {theirs}"
            )
    return "the ranks differ"


def _check(
    model: Any, optimizer: Any, level: Any, scaler: Any, arguments: dict[str, Any]
) -> tuple[Any, EngineConfig]:
    parsed = Level.parse(level)
    if not isinstance(model, nn.Layer):
        raise UsageError(f"model must be a paddle.nn.Layer, got {type(model).__name__}")
    _check_model(model)
    if isinstance(optimizer, ShardedOptimizer):
        raise UsageError("optimizer has already been through group_sharded_parallel; pass it once only")
    inner = unwrap_optimizer(optimizer)
    if scaler is not None and not isinstance(scaler, paddle.amp.GradScaler):
        raise UsageError(f"scaler must be a paddle.amp.GradScaler or None, got {type(scaler).__name__}")
    _check_params(model, inner, scaler)
    for name in ("buffer_max_size", "segment_size"):
        value = arguments[name]
        least = 1 if name == "buffer_max_size" else 0
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{name} must be a number of elements, at least {least}, got {value!r}")
    excluded = arguments["exclude_layer"]
    if excluded is None:
        excluded = ()
    if not isinstance(excluded, (list, tuple)) or not all(isinstance(item, (str, int)) for item in excluded):
        raise UsageError(f"exclude_layer must be a list of class names and layer ids, got {excluded!r}")
    return inner, EngineConfig(
        level=parsed,
        bucket_numel=arguments["buffer_max_size"],
        whole_numel=arguments["segment_size"],
        whole_layers=tuple(excluded),
        sync_buffers=bool(arguments["sync_buffers"]),
    )


def _check_model(model: nn.Layer) -> None:
    for layer in model.sublayers(include_self=True):
        if isinstance(layer, paddle.DataParallel):
            raise UsageError(
                "model is wrapped in paddle.DataParallel, which would reduce the gradients a second time; "
                "pass the layer inside it"
            )
        if isinstance(layer, ShardedModel) or any(
            isinstance(hook, RootHook) for hook in layer._forward_pre_hooks.values()
        ):
            raise UsageError("model, or a layer of it, has already been through group_sharded_parallel")
        if isinstance(layer, nn.Embedding) and getattr(layer, "_sparse", False):
            raise UsageError(
                f"embedding layer {layer.full_name()} has sparse=True; sparse gradients are not reduced exactly, "
                "create it with sparse=False"
            )


def _optimizer_params(inner: Any) -> list[Any]:
    groups = inner._param_groups or []
    return [param for group in groups for param in (group["params"] if isinstance(group, dict) else [group])]


def _check_params(model: nn.Layer, inner: Any, scaler: Any) -> None:
    params = [param for _, _, param in named_params(model)]
    known = {id(param) for param in params}
    foreign = [param.name for param in _optimizer_params(inner) if id(param) not in known]
    if foreign:
        raise UsageError(
            f"the optimizer has {len(foreign)} parameters that are not in the model, the first is {foreign[0]!r}; "
            "pass an optimizer over parameters of this model"
        )
    for names, _, param in named_params(model):
        if param.size and not has_memory(param):
            raise UsageError(f"parameter {names[0]!r} is not initialised; call its initialize() before wrapping")
        if not paddle.is_floating_point(param):
            raise UsageError(f"parameter {names[0]!r} has dtype {param.dtype}, expected a floating-point dtype")
    if scaler is None and any(param.dtype == paddle.float16 for param in params):
        warnings.warn("the model has float16 parameters but no scaler was given", stacklevel=4)


def _names_root(model: nn.Layer) -> nn.Layer:
    """The layer whose structured names the user knows: inside Paddle's MixPrecisionLayer, else the model itself."""
    while type(model).__name__ == "MixPrecisionLayer":
        model = model._layers
    return model

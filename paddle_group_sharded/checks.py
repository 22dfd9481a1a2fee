"""What a user can get wrong in ``group_sharded_parallel``: checked on each rank, then compared between the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from numbers import Integral
from typing import Any, Optional

import paddle
from paddle import nn

from .clipping import check_clip
from .comm import Comm
from .comm.agreement import agree
from .errors import GroupShardedError, UsageError
from .paddle_compat import (
    forward_pre_hooks,
    has_memory,
    is_lazy,
    lr_scheduler,
    optimizer_options,
    param_groups,
    unwrapped_layer,
)
from .sharding.engine import EngineConfig, is_sharded, named_params
from .sharding.hooks import RootHook
from .sharding.level import Level
from .sharding.model import ShardedModel
from .sharding.optimizer import ShardedOptimizer
from .sharding.rules import unwrap_optimizer

__all__ = ["check_together", "engine_config"]


def check_together(
    comms: Sequence[Comm], model: Any, optimizer: Any, level: Any, scaler: Any, arguments: dict[str, Any]
) -> tuple[Any, EngineConfig]:
    """The innermost optimizer and the configuration; or :class:`UsageError` on every rank.  Collective."""
    problem: Optional[GroupShardedError] = None
    signature: dict[str, Any] = {}
    try:
        inner, config = _check(model, optimizer, level, scaler, arguments)
        signature = _signature(model, inner, config, scaler, arguments)
    except GroupShardedError as error:
        problem = error
    agree(comms, "group_sharded_parallel", problem, signature, _difference)
    return inner, config


# ------------------------------------------------------------------------------------------------------- on each rank


def _check(
    model: Any, optimizer: Any, level: Any, scaler: Any, arguments: dict[str, Any]
) -> tuple[Any, EngineConfig]:
    if not paddle.in_dynamic_mode():
        raise UsageError("expected dynamic mode, got static-graph mode; call paddle.disable_static() first")
    parsed = Level.parse(level)
    if not isinstance(model, nn.Layer):
        raise UsageError(f"model must be a paddle.nn.Layer, got {type(model).__name__}")
    _check_model(model)
    if isinstance(optimizer, ShardedOptimizer):
        raise UsageError("optimizer has already been through group_sharded_parallel; pass it once only")
    inner = unwrap_optimizer(optimizer)
    if scaler is not None and not isinstance(scaler, paddle.amp.GradScaler):
        raise UsageError(f"scaler must be a paddle.amp.GradScaler or None, got {type(scaler).__name__}")
    _check_params(model, scaler)
    _check_optimizer(model, inner)
    return inner, engine_config(parsed, arguments)


def engine_config(level: Level, arguments: dict[str, Any]) -> EngineConfig:
    """What the arguments of ``group_sharded_parallel`` by these names say; :class:`UsageError` for wrong ones."""
    for name, least in (("buffer_max_size", 1), ("segment_size", 0)):
        value = arguments[name]
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise UsageError(f"{name} must be a number of elements, at least {least}, got {value!r}")
    for name in ("offload", "sync_buffers", "sync_comm"):
        if not isinstance(arguments[name], bool):
            raise UsageError(f"{name} must be True or False, got {arguments[name]!r}")
    excluded = () if arguments["exclude_layer"] is None else arguments["exclude_layer"]
    if not isinstance(excluded, (list, tuple)) or not all(isinstance(item, (str, int)) for item in excluded):
        raise UsageError(f"exclude_layer must be a list of class names and layer ids, got {excluded!r}")
    return EngineConfig(
        level=level,
        bucket_numel=int(arguments["buffer_max_size"]),
        whole_numel=int(arguments["segment_size"]),
        whole_layers=tuple(excluded),
        sync_buffers=arguments["sync_buffers"],
    )


def _check_model(model: nn.Layer) -> None:
    for layer in model.sublayers(include_self=True):
        if isinstance(layer, paddle.DataParallel):
            raise UsageError(
                "model is wrapped in paddle.DataParallel, which would reduce the gradients a second time; "
                "pass the layer inside it"
            )
        wrapped = any(isinstance(hook, RootHook) and hook.engine is not None for hook in forward_pre_hooks(layer))
        if isinstance(layer, ShardedModel) or wrapped:
            raise UsageError(
                "model, or a layer of it, has already been through group_sharded_parallel; pass it once only, or "
                "unwrap() it first"
            )
        if isinstance(layer, nn.Embedding) and getattr(layer, "_sparse", False):
            raise UsageError(
                f"embedding layer {layer.full_name()} has sparse=True; sparse gradients are not reduced exactly, "
                "create it with sparse=False"
            )


def _check_params(model: nn.Layer, scaler: Any) -> None:
    for names, _, param in named_params(model):
        if is_sharded(param):
            raise UsageError(
                f"parameter {names[0]!r} belongs to another model that has been through group_sharded_parallel; "
                "pass the whole model once, or unwrap() the other one first"
            )
        if param.size and not has_memory(param) and not is_lazy(param):
            raise UsageError(f"parameter {names[0]!r} is not initialised; call its initialize() before wrapping")
        if not paddle.is_floating_point(param):
            raise UsageError(f"parameter {names[0]!r} has dtype {param.dtype}, expected a floating-point dtype")
        if scaler is None and param.dtype == paddle.float16:
            warnings.warn("the model has float16 parameters but no scaler was given", stacklevel=6)
            scaler = False  # said once


def _check_optimizer(model: nn.Layer, inner: Any) -> None:
    known = {id(param) for _, _, param in named_params(model)}
    groups = param_groups(inner)
    foreign = [param.name for _, params, _ in groups for param in params if id(param) not in known]
    if foreign:
        raise UsageError(
            f"the optimizer has {len(foreign)} parameters that are not in the model, the first is {foreign[0]!r}; "
            "pass an optimizer over parameters of this model"
        )
    for _, _, clip in groups:
        check_clip(clip)


# -------------------------------------------------------------------------------------------------- between the ranks


def _signature(
    model: nn.Layer, inner: Any, config: EngineConfig, scaler: Any, arguments: dict[str, Any]
) -> dict[str, Any]:
    """What has to be equal on every rank, under the words by which a message calls it."""
    root = unwrapped_layer(model)
    layer_names = {id(layer): name for name, layer in model.named_sublayers(include_self=True)}
    number = {id(entry[2]): index for index, entry in enumerate(named_params(root))}
    whole = [
        item if isinstance(item, str) else layer_names.get(item, "no layer of the model")
        for item in config.whole_layers
    ]
    options = {**asdict(config), **arguments, "exclude_layer": whole, "whole_layers": whole}
    options["scaler"] = scaler is not None
    scheduler = lr_scheduler(inner)
    return {
        "arguments": {name: str(value) for name, value in options.items()},
        "parameters (name, shape, dtype, frozen)": [
            (names[0], tuple(param.shape), str(param.dtype), bool(param.stop_gradient))
            for names, _, param in named_params(root)
        ],
        "buffers (name, shape, dtype)": [
            (name, tuple(buffer.shape), str(buffer.dtype)) for name, buffer in model.named_buffers()
        ],
        "optimizers": type(inner).__name__,
        "options of the optimizer": {
            **optimizer_options(inner),
            "scheduler": None if scheduler is None else (type(scheduler).__name__, str(scheduler.state_dict())),
        },
        "parameter groups of the optimizer (options, clip, numbers of the parameters)": [
            (
                sorted((name, str(value)) for name, value in options.items() if isinstance(value, (int, float, str))),
                None if clip is None else (type(clip).__name__, str(getattr(clip, "clip_norm", ""))),
                [number[id(param)] for param in params],
            )
            for options, params, clip in param_groups(inner)
        ],
    }


def _difference(rank: int, mine: dict[str, Any], other: int, others: dict[str, Any]) -> UsageError:
    what = next(name for name in mine if mine[name] != others[name])
    ours, theirs = mine[what], others[what]
    if isinstance(ours, list) and len(ours) != len(theirs):
        ours, theirs = f"{len(ours)} of them", f"{len(theirs)}"
    elif isinstance(ours, list):
        ours, theirs = next(pair for pair in zip(ours, theirs) if pair[0] != pair[1])
    elif isinstance(ours, dict):
        names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        ours, theirs = ({name: values.get(name) for name in names} for values in (ours, theirs))
    return UsageError(
        f"{what} differ between ranks: rank {rank} has {ours}, rank {other} has {theirs}; build the same model and "
        "optimizer and give the same arguments on every rank"
    )

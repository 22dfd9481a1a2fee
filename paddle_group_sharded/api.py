"""What users call: check the arguments on every rank, agree, then build."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import paddle
from paddle import nn

from .checks import check_together
from .comm import LocalComm, create_comm
from .errors import CheckpointError, UsageError
from .model_files import load_group_sharded_model, save_group_sharded_model
from .paddle_compat import param_groups, unwrapped_layer
from .sharding.engine import Engine
from .sharding.model import ShardedModel
from .sharding.optimizer import ShardedOptimizer
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
        inner, config = check_together((comm, dp_comm), model, optimizer, level, scaler, arguments)
        optimized = {id(param) for _, params, _ in param_groups(inner) for param in params}
        engine = Engine(model, unwrapped_layer(model), optimized, config, comm, dp_comm)
        engine.reducer.synchronous = sync_comm
    except BaseException:
        comm.close()
        dp_comm.close()
        raise
    try:
        sharded_optimizer = ShardedOptimizer(inner, engine, offload)
    except (UsageError, CheckpointError):  # states that do not fit, on every rank alike
        engine.close()
        raise
    if scaler is not None:
        share_scaler(scaler)
    return ShardedModel(model, engine, sharded_optimizer), sharded_optimizer, scaler


def unwrap(
    model: ShardedModel, optimizer: ShardedOptimizer, scaler: Optional[paddle.amp.GradScaler] = None
) -> tuple[nn.Layer, Any]:
    """Give back the plain model and optimizer that were wrapped, with their current values.  Collective.

    Both are whole on every rank afterwards, so there must be room for them; gradients that have not been stepped are
    left averaged with the parameters.  The wrappers must not be used any more.
    """
    if not isinstance(model, ShardedModel) or not isinstance(optimizer, ShardedOptimizer):
        raise UsageError(
            "unwrap takes the model and the optimizer that group_sharded_parallel returned, got "
            f"{type(model).__name__} and {type(optimizer).__name__}"
        )
    if optimizer._engine is not model._engine:
        raise UsageError("optimizer belongs to another model; pass the one that was returned beside this model")
    optimizer.views.give_back_grads()
    optimizer._states.give_back()
    model._engine.close()
    if scaler is not None:
        unshare_scaler(scaler)
    return model._layer, optimizer._optim

"""Which optimizers may step pieces, which need whole parameters, and which cannot be sharded exactly."""

from __future__ import annotations

from typing import Any

import paddle

from ..errors import UsageError

__all__ = ["steps_pieces", "unwrap_optimizer"]

Optimizer = Any

# Each element of the update depends on that element of the parameter, the gradient and the states, and on scalars.
_ELEMENTWISE = tuple(
    getattr(paddle.optimizer, name)
    for name in (
        "SGD Momentum Adam AdamW Adamax Adagrad Adadelta RMSProp NAdam RAdam ASGD Rprop".split()
    )
    if hasattr(paddle.optimizer, name)
)


def steps_pieces(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` gives the same result on pieces as on whole parameters.

    Only Paddle's own element-wise classes do for certain; LAMB and every class derived by a user get whole parameters.
    """
    return type(optimizer) in _ELEMENTWISE


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The ``paddle.optimizer.Optimizer`` inside ``optimizer`` and the wrappers of fleet; refuses what cannot be exact."""
    inner = optimizer
    while hasattr(inner, "_inner_opt"):  # HybridParallelOptimizer, MixPrecisionOptimizer
        inner = inner._inner_opt
    name = type(inner).__name__
    if not isinstance(inner, paddle.optimizer.Optimizer):
        raise UsageError(f"optimizer must be a paddle.optimizer.Optimizer, got {type(optimizer).__name__}")
    if name == "LBFGS":
        raise UsageError("LBFGS cannot be sharded: its line search evaluates the whole model inside one step")
    if hasattr(inner, "inner_optimizer"):
        raise UsageError(f"{name} wraps another optimizer; pass that one to group_sharded_parallel instead")
    if not type(inner).step.__module__.startswith("paddle."):
        raise UsageError(
            f"{name} defines a step() of its own, which would not see the sharded gradients; "
            "put its rule into _append_optimize_op, as paddle.optimizer.Optimizer describes"
        )
    if getattr(inner, "_use_multi_tensor", False):
        raise UsageError(f"{name}(use_multi_tensor=True) is not supported; leave the option out")
    return inner

"""Which optimizers may step pieces, which need whole parameters, and which cannot be sharded exactly."""

from __future__ import annotations

from typing import Any

import paddle

from ..clipping import check_clip
from ..errors import UsageError
from ..paddle_compat import innermost_optimizer, param_groups

__all__ = ["rounds_alike_everywhere", "steps_pieces", "unwrap_optimizer"]

Optimizer = Any

# Each element of the update depends on that element of the parameter, the gradient and the states, and on scalars.
_ELEMENTWISE = tuple(
    getattr(paddle.optimizer, name)
    for name in (
        "SGD Momentum Adam AdamW Adamax Adagrad Adadelta RMSProp NAdam RAdam ASGD Rprop".split()
    )
    if hasattr(paddle.optimizer, name)
)
# Those whose kernels round alike at the end of a tensor and in its middle.
_ROUND_ALIKE = ("SGD", "Momentum", "Adam", "AdamW", "Adamax")
_DECAYS = (paddle.regularizer.L1Decay, paddle.regularizer.L2Decay)


def steps_pieces(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` gives the same result on pieces as on whole parameters.

    Only Paddle's own element-wise classes and regularizers do for certain; LAMB and every class derived by a user get
    whole parameters.
    """
    tensors = (tensor for _, tensors, _ in param_groups(optimizer) for tensor in tensors)
    decays = [optimizer.regularization, *(getattr(tensor, "regularizer", None) for tensor in tensors)]
    own_rule = "_append_optimize_op" in vars(optimizer)  # put on the object by the user
    if type(optimizer) not in _ELEMENTWISE or own_rule:
        return False
    return all(decay is None or type(decay) in _DECAYS for decay in decays)


def rounds_alike_everywhere(optimizer: Optimizer) -> bool:
    """Whether an element's update does not depend on how many elements follow it in its tensor, to the last bit."""
    return type(optimizer).__name__ in _ROUND_ALIKE


def _steps_as_paddle(optimizer: Optimizer) -> bool:
    """Whether ``step()`` is that of ``paddle.optimizer``, neither overridden nor replaced on the object."""
    owner = next(cls for cls in type(optimizer).__mro__ if "step" in vars(cls))
    return owner.__module__.startswith("paddle.optimizer.") and "step" not in vars(optimizer)


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The ``paddle.optimizer.Optimizer`` inside the wrappers of fleet; refuses what cannot be exact."""
    inner = innermost_optimizer(optimizer)
    name = type(inner).__name__
    if not isinstance(inner, paddle.optimizer.Optimizer):
        raise UsageError(f"optimizer must be a paddle.optimizer.Optimizer, got {type(optimizer).__name__}")
    if any(cls.__name__ == "LBFGS" for cls in type(inner).__mro__):
        raise UsageError("LBFGS cannot be sharded: its line search evaluates the whole model inside one step")
    if hasattr(inner, "inner_optimizer"):
        raise UsageError(f"{name} wraps another optimizer; pass that one to group_sharded_parallel instead")
    if not _steps_as_paddle(inner):
        raise UsageError(
            f"{name} defines a step() of its own, which would not see the sharded gradients; "
            "put its rule into _append_optimize_op, as paddle.optimizer.Optimizer describes"
        )
    for _, _, clip in param_groups(inner):
        check_clip(clip)
    return inner

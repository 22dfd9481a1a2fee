"""Gradient clipping over ranks: norms are summed over them, and each parameter is counted once.

The user's clip objects are read, never changed.  What they compute on whole gradients is computed here from the pieces'
sums of squares (``ClipGradByGlobalNorm``, ``ClipGradByNorm``); ``ClipGradByValue`` looks at single elements and is
called as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn

from .errors import UsageError

__all__ = ["check_clip", "clip_factors", "needs_norms", "square_sum"]

Tensor = Any

_BY_NORM = (nn.ClipGradByGlobalNorm, nn.ClipGradByNorm)
_KNOWN = (*_BY_NORM, nn.ClipGradByValue)


def check_clip(clip: Any) -> None:
    """Refuse a clip object whose rule is not known: on pieces it could be silently wrong."""
    if clip is not None and type(clip) not in _KNOWN:
        names = ", ".join(cls.__name__ for cls in _KNOWN)
        raise UsageError(f"grad_clip must be None or one of {names}, got {type(clip).__name__}")


def needs_norms(clip: Any) -> bool:
    """Whether ``clip`` needs norms over all ranks."""
    return isinstance(clip, _BY_NORM)


def square_sum(grad: Tensor) -> float:
    """Sum of squares of a 1-D gradient, computed in float32 or wider."""
    value = grad.astype(paddle.float32) if grad.dtype in (paddle.float16, paddle.bfloat16) else grad
    return float(paddle.dot(value, value).item()) if value.size else 0.0


def clip_factors(clip: Any, square_sums: Sequence[float]) -> list[float]:
    """What each gradient is multiplied by, from its sum of squares over all ranks.

    ``square_sums`` holds only the parameters that take part: those with a gradient and with ``need_clip``.
    """
    norms = [value**0.5 for value in square_sums]
    if isinstance(clip, nn.ClipGradByGlobalNorm):
        norm = sum(square_sums) ** 0.5
        if norm != norm and clip.auto_skip_clip:  # Paddle asks whether nan is larger than the limit
            return [1.0] * len(norms)
        return [_factor(norm, clip.clip_norm)] * len(norms)
    return [_factor(norm, clip.clip_norm) for norm in norms]


def _factor(norm: float, limit: float) -> float:
    if norm != norm:  # nan spreads, as it does through Paddle's own clipping
        return norm
    return limit / norm if norm > limit else 1.0

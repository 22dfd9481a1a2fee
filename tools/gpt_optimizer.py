"""The optimizer of the GPT: AdamW that decays matrices only, with a rate that warms up and then falls like a cosine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import paddle

__all__ = ["adamw", "rate_at"]


def adamw(parameters: Iterable[Any], options: Any) -> tuple[Any, Any]:
    """The scheduler and the optimizer of a run with these options of ``train_gpt.py``."""
    parameters = list(parameters)
    scheduler = paddle.optimizer.lr.LambdaDecay(options.lr, lambda step: rate_at(step, options) / options.lr)
    decaying = {parameter.name for parameter in parameters if parameter.ndim > 1}
    optimizer = paddle.optimizer.AdamW(
        learning_rate=scheduler,
        beta2=0.95,
        parameters=parameters,
        weight_decay=options.weight_decay,
        apply_decay_param_fun=lambda name: name in decaying,
        grad_clip=paddle.nn.ClipGradByGlobalNorm(options.clip) if options.clip else None,
        multi_precision=options.amp in ("O2", "bf16"),
    )
    return scheduler, optimizer


def rate_at(step: int, options: Any) -> float:
    """Learning rate of a step: up in a line during ``--warmup``, then down in half a cosine to ``--min-lr``."""
    if step < options.warmup:
        return float(options.lr * (step + 1) / options.warmup)
    done = min(1.0, (step - options.warmup) / max(1, options.steps - options.warmup))
    return float(options.min_lr + (options.lr - options.min_lr) * (1 + math.cos(math.pi * done)) / 2)

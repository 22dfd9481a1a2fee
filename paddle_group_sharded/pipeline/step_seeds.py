"""Random numbers that do not depend on how a model is cut: each layer draws from a seed of its own, in each pass.

The seed is made of the base seed of the model, the number of the step, the replica, the micro-batch and the number of
the layer.  So dropout is the same for every schedule and every number of stages, in recompute too, and differs between
layers, micro-batches, steps and replicas.  Outside of the pass the generators go on as if nothing had been drawn.
"""

from __future__ import annotations

import random

import numpy as np
import paddle

from .randomness import derive_seed

__all__ = ["layer_seed", "seed_layer"]


def layer_seed(base: int, step: int, replica: int, micro_batch: int, layer: int) -> int:
    """The seed of one pass of one layer; all numbers count from 0, ``layer`` through the whole list."""
    return derive_seed(base, "pass", step, replica, micro_batch, layer)


def seed_layer(base: int, step: int, replica: int, micro_batch: int, layer: int) -> None:
    """Seed the generators of Paddle, NumPy and Python for one pass of one layer.

    A loop of one's own that calls this before each layer draws the same numbers as ``train_batch``.
    """
    seed = layer_seed(base, step, replica, micro_batch, layer)
    paddle.seed(seed)
    np.random.seed(seed)
    random.seed(seed)

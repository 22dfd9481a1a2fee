"""Values that every rank, and the test that checks them, can compute: small whole numbers, so that sums are exact."""

from __future__ import annotations

import numpy as np

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
SUMMED = (*FLOATS, *INTEGERS, "bool")
MOVED = (*SUMMED, "complex64")


def values(rank: int, numel: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """Numbers from 0 to 9 (0 and 1 for bool) as float64."""
    return np.random.default_rng([seed, rank]).integers(0, 2 if dtype == "bool" else 10, numel).astype("float64")


def summed(world_size: int, numel: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """The sum of every rank's :func:`values`; for bool, whether any is set."""
    total = np.sum([values(rank, numel, seed, dtype) for rank in range(world_size)], axis=0)
    return np.minimum(total, 1) if dtype == "bool" else total

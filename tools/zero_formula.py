"""Bytes of model states per rank by the ZeRO paper (arXiv 1910.02054), for Adam; a level divides what it shards.

In float32 a parameter takes 4 bytes, its gradient 4 and the two moments 8.  Of a 16-bit parameter these are 2, 2 and
12, as the optimizer also holds a float32 master of it.
"""

from __future__ import annotations

__all__ = ["LEVELS", "formula", "state_bytes"]

LEVELS = ("none", "os", "os_g", "p_g_os")


def formula(level: str, sixteen_bit: bool = False) -> str:
    """Bytes a parameter, with N for the number of ranks."""
    whole, divided = _split(level, sixteen_bit)
    return " + ".join([str(whole)] * bool(whole) + [f"{divided}/N"] * bool(divided))


def state_bytes(level: str, parameters: int, ranks: int, sixteen_bit: bool = False) -> float:
    """Bytes of weights, gradients and Adam states that one of ``ranks`` ranks holds at ``level``."""
    whole, divided = _split(level, sixteen_bit)
    return parameters * (whole + divided / ranks)


def _split(level: str, sixteen_bit: bool) -> tuple[int, int]:
    """Bytes a parameter that every rank keeps, and that are divided by the number of ranks."""
    kinds = (2, 2, 12) if sixteen_bit else (4, 4, 8)  # parameter, gradient, optimizer: sharded from the last
    sharded = LEVELS.index(level)
    return sum(kinds[: 3 - sharded]), sum(kinds[3 - sharded :])

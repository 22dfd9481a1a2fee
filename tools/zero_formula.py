"""Bytes of model states per rank by the ZeRO paper (arXiv 1910.02054), for fp32 parameters and Adam.

4 bytes a parameter are weights, 4 gradients, 8 the two moments; a level divides what it shards by the number of ranks.
"""

from __future__ import annotations

__all__ = ["FORMULAS", "LEVELS", "state_bytes"]

# level: (bytes that every rank keeps, bytes that are divided by the number of ranks), per parameter
_BYTES = {"none": (16, 0), "os": (8, 8), "os_g": (4, 12), "p_g_os": (0, 16)}

FORMULAS = {"none": "16", "os": "8 + 8/N", "os_g": "4 + 12/N", "p_g_os": "16/N"}
LEVELS = tuple(_BYTES)


def state_bytes(level: str, parameters: int, ranks: int) -> float:
    """Bytes of weights, gradients and Adam states that one of ``ranks`` ranks holds at ``level``."""
    whole, divided = _BYTES[level]
    return parameters * (whole + divided / ranks)

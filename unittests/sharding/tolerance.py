"""How far results may be from their reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["check"]

# Two ranks add in one order only; elsewhere spec and reference differ in the order of the sum.
TOLERANCE = {1: 0.0, 2: 0.0, 3: 1e-6, 4: 1e-6}


def check(results: Sequence[Mapping[str, Any]], world_size: int, exact: bool = True) -> None:
    """``results``: per rank, what ``parity.compare`` returned; not ``exact`` where several passes are summed."""
    limit = TOLERANCE[world_size] if exact else 1e-6
    for rank, by_level in enumerate(results):
        for level, difference in by_level.items():
            assert max(difference) <= limit, f"rank {rank}, {level}: {difference}"

"""The levels: which of parameters, gradients and optimizer states are sharded (arXiv 1910.02054, figure 1)."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ..errors import UsageError

__all__ = ["Level", "Placements"]


class Placements(NamedTuple):
    """``True`` where each rank keeps a shard only, ``False`` where each rank keeps the whole."""

    param: bool
    grad: bool
    optim: bool


class Level(Enum):
    """The three levels by the names that users write."""

    OS = "os"
    OS_G = "os_g"
    P_G_OS = "p_g_os"

    @property
    def placements(self) -> Placements:
        """The triple that the engine works by; nothing else depends on a level's name."""
        return Placements(param=self is Level.P_G_OS, grad=self is not Level.OS, optim=True)

    @classmethod
    def parse(cls, text: object) -> Level:
        """Return the level called ``text``; :class:`UsageError` lists the three names."""
        for level in cls:
            if text == level.value:
                return level
        names = ", ".join(repr(level.value) for level in cls)
        raise UsageError(f"level must be one of {names}, got {text!r}")

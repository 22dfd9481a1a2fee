"""An error in a hook of the backward pass, kept until a call that can raise it.

What a hook raises reaches the user as a ``SystemError`` without its message, after other hooks have run into it.
"""

from __future__ import annotations

from typing import Optional

from ..errors import GroupShardedError

__all__ = ["BackwardError"]


class BackwardError:
    """The first error of a backward pass."""

    def __init__(self) -> None:
        """Nothing has gone wrong."""
        self.pending: Optional[GroupShardedError] = None  # then the gradients of this pass are lost: hooks do nothing

    def keep(self, error: GroupShardedError) -> None:
        """Raise ``error`` at the next :meth:`check`, unless there is an earlier one."""
        self.pending = self.pending or error

    def check(self) -> None:
        """Raise what was kept."""
        error, self.pending = self.pending, None
        if error is not None:
            raise error

"""The exceptions of the package.  Every message says what was expected, what came, and what to do."""

from __future__ import annotations

__all__ = ["GroupShardedError", "UsageError", "StateError", "CommError", "CheckpointError"]


class GroupShardedError(Exception):
    """Base of everything that this package raises on purpose."""


class UsageError(GroupShardedError, ValueError):
    """An argument, a model or an optimizer that cannot be handled; raised before anything is changed."""


class StateError(GroupShardedError, RuntimeError):
    """A call in the wrong order, such as reading a gradient that has already been given up."""


class CommError(GroupShardedError, RuntimeError):
    """A rank is missing, has ended, or asks for another operation than its peers."""


class CheckpointError(GroupShardedError, RuntimeError):
    """A file that is missing, foreign or damaged; nothing in memory has been changed."""

"""A GradScaler whose overflow decision all ranks share, and which counts the steps that it skipped."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.amp import GradScaler

from ..errors import StateError, UsageError
from .optimizer import ShardedOptimizer

__all__ = ["ShardedGradScaler", "share_scaler", "unshare_scaler"]


class ShardedGradScaler(GradScaler):  # type: ignore[misc]
    """``paddle.amp.GradScaler`` over the gradients of a :class:`.optimizer.ShardedOptimizer`.

    ``unscale_``, ``step`` and ``minimize`` are collective over the sharding group; ``scale``, ``update`` and the state
    are Paddle's own.  ``skipped_steps`` counts the steps that any rank's overflow has skipped.
    """

    skipped_steps = 0
    _scale: Any  # Paddle's own, of shape [1]
    plain_class: type[GradScaler] = GradScaler  # of the user's scaler

    def _unscale(self, optimizer: Any) -> None:
        if not self._enable:
            return
        if not isinstance(optimizer, ShardedOptimizer):
            raise UsageError(
                f"expected the optimizer that group_sharded_parallel returned, got {type(optimizer).__name__}"
            )
        state = self._optimizer_states[id(optimizer)]
        if state["state"].name != "INIT":
            raise StateError("unscale_() was already called, or step() was, since the last update()")
        found = optimizer.unscale(float(self._scale.item()))
        self._found_inf = paddle.to_tensor([found])
        self.skipped_steps += int(found)
        state["state"] = type(state["state"]).UNSCALED

    def _update(self) -> None:
        if not self._enable:
            return
        # Paddle prints the scale as a Python float when it falls; NumPy 2.4 makes one of a scalar only.
        self._scale = self._scale.reshape([])
        super()._update()
        self._scale = self._scale.reshape([1])

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients by the scale; every rank learns whether any rank's overflowed.  Collective."""
        self._unscale(optimizer)


def share_scaler(scaler: GradScaler) -> GradScaler:
    """Make ``scaler`` share its decisions; it stays the same object with the same state."""
    if not isinstance(scaler, ShardedGradScaler):
        plain = type(scaler)
        scaler.__dict__.pop("_unscale", None)  # fleet's own, which cannot see sharded gradients
        scaler.__class__ = type(f"Sharded{plain.__name__}", (ShardedGradScaler, plain), {"plain_class": plain})
        scaler.skipped_steps = 0
    return scaler


def unshare_scaler(scaler: GradScaler) -> None:
    """Undo :func:`share_scaler`."""
    if isinstance(scaler, ShardedGradScaler):
        scaler.__class__ = scaler.plain_class

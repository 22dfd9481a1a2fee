"""What the package's optimizers have in common: each stands in the place of the user's own, which does the stepping."""

from __future__ import annotations

from typing import Any

import paddle

__all__ = ["WrappedOptimizer"]


class WrappedOptimizer(paddle.optimizer.Optimizer):  # type: ignore[misc]
    """A ``paddle.optimizer.Optimizer`` around another one, ``optimizer._optim``.

    What a class does not define is read from and written to the wrapped optimizer; the names in its ``_own`` are its
    own attributes.
    """

    _own: frozenset[str] = frozenset(("_optim",))
    _optim: Any

    def __init__(self, inner: Any) -> None:
        """Wrap ``inner``; the base class, which would make an optimizer of its own, is not initialised."""
        self.__dict__["_optim"] = inner

    def __getattr__(self, name: str) -> Any:
        """Read from the wrapped optimizer what is not defined here."""
        if name in self._own or "_optim" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_optim"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Write to the wrapped optimizer what is not this object's own."""
        if name in self._own:
            self.__dict__[name] = value
        else:
            setattr(self._optim, name, value)

    def minimize(self, loss: Any, *args: Any, **kwargs: Any) -> tuple[None, list[Any]]:
        """``step()``, for code that calls ``minimize`` after ``backward()``, as GradScaler does."""
        self.step()
        return None, []

    def get_lr(self) -> float:
        """The present learning rate."""
        return float(self._optim.get_lr())

    def set_lr(self, value: float) -> None:
        """Set the learning rate."""
        self._optim.set_lr(value)

    def set_lr_scheduler(self, scheduler: Any) -> None:
        """Set the scheduler of the learning rate."""
        self._optim.set_lr_scheduler(scheduler)

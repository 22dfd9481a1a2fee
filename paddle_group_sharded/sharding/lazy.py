"""Parameters made under ``paddle.LazyGuard``: filled one group at a time, with the values of an ordinary construction.

An ordinary construction draws random numbers in the order in which the layers are made.  That is the order of
``parameters()``, unless a layer makes parameters of its own after sublayers; the values are then those of
``for param in model.parameters(): param.initialize()``.  Groups may need another order; a parameter that is passed over
is filled and emptied again, and the state of the generator before it is kept, so that it can be drawn once more when
its group comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import paddle

from ..paddle_compat import fill_lazy, is_lazy, release

__all__ = ["LazyValues"]

Tensor = Any


class LazyValues:
    """The initial values of a model's lazy parameters."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        """``params``: all of the model, in the order of registration."""
        self._waiting = [param for param in params if is_lazy(param)]
        self._waiting.reverse()  # the next one is the last
        self._passed_over: dict[int, Any] = {}  # id of the parameter -> state of the generator before it

    def fill(self, param: Tensor) -> None:
        """Give ``param`` its value, if it waits for one."""
        if not is_lazy(param):
            return
        if id(param) in self._passed_over:
            now = paddle.get_rng_state()
            paddle.set_rng_state(self._passed_over.pop(id(param)))
            fill_lazy(param, for_good=True)
            paddle.set_rng_state(now)
            return
        while self._waiting:
            each = self._waiting.pop()
            if each is param:
                fill_lazy(param, for_good=True)
                return
            self._passed_over[id(each)] = paddle.get_rng_state()
            fill_lazy(each, for_good=False)
            release(each)

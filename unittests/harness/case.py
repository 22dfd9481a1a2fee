"""Inside a trainer: what makes every case start as in a new process."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["CleanSlate", "fresh", "to_host"]


def fresh(seed: int = 0) -> None:
    """Seed Paddle, numpy and ``random``, and let automatic names (``linear_0.w_0``) start over."""
    import numpy
    import paddle

    paddle.seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)
    paddle.utils.unique_name.switch()


class CleanSlate:
    """Remembers the settings of this process when it was new, and runs each case with them."""

    def __init__(self) -> None:
        self._flags = _public_flags()
        self._environment = dict(os.environ)
        self._directory = os.getcwd()
        gc.collect()
        gc.freeze()  # Paddle's own objects stay for ever; searching them after each case would take 0.1 s

    @contextlib.contextmanager
    def case(self) -> Iterator[None]:
        """Settings as when this object was made, before and after the block; garbage of the block is collected."""
        import paddle

        with paddle.utils.unique_name.guard(), warnings.catch_warnings():
            # As in pyproject.toml, which holds for pytest's own process only.
            warnings.filterwarnings("error", module="paddle_group_sharded")
            self._reset()
            fresh()
            try:
                yield
            finally:
                self._reset()
                gc.collect()

    def _reset(self) -> None:
        import paddle

        os.chdir(self._directory)
        if os.environ != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        paddle.disable_static()
        paddle.set_device("cpu")
        paddle.set_default_dtype("float32")
        paddle.set_grad_enabled(True)
        now = _public_flags()
        changed = {name: value for name, value in self._flags.items() if now[name] != value}
        if changed:
            paddle.set_flags(changed)


def _public_flags() -> dict[str, Any]:
    from paddle.base import core

    flags = core.globals()
    return {name: flags[name] for name in flags.keys() if flags.is_public(name)}


def to_host(value: Any) -> Any:
    """``value`` with every tensor in its lists, tuples and dicts as a numpy array (bfloat16 as float32)."""
    import paddle

    if isinstance(value, paddle.Tensor):
        return (value.astype("float32") if value.dtype == paddle.bfloat16 else value).numpy()
    if isinstance(value, dict):
        return {key: to_host(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_host(item) for item in value)
    return value

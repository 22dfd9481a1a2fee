"""Random numbers that depend on named things only, such as the number of a layer, not on what was drawn before."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import paddle

__all__ = ["RandomStates", "derive_seed", "draw_seed", "seeded"]

_SEEDS = 2**31 - 1  # what every generator takes


class RandomStates(NamedTuple):
    """The states of Paddle's generators (of the present device and of the host), NumPy's and Python's."""

    device: Any
    host: Any
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> RandomStates:
        """What the generators would go on with."""
        with _on_host():
            host = paddle.get_rng_state()
        return cls(paddle.get_rng_state(), host, np.random.get_state(), random.getstate())

    def restore(self) -> None:
        """Let the generators go on from here."""
        with _on_host():
            paddle.set_rng_state(self.host)
        paddle.set_rng_state(self.device)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    """Paddle 2.6 cannot set the state of another device than the present one."""
    device = paddle.get_device()
    if device == "cpu":
        yield
        return
    paddle.set_device("cpu")
    try:
        yield
    finally:
        paddle.set_device(device)


def derive_seed(base: int, *parts: object) -> int:
    """A seed made of ``base`` and of names or numbers; equal on every rank and machine, and different for others."""
    digest = hashlib.blake2b(repr((base, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _SEEDS


def draw_seed() -> int:
    """The next number of Paddle's generator, so that it follows ``paddle.seed`` and the next one differs."""
    return int(paddle.randint(0, _SEEDS, [1]).item())


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run the block with all generators seeded; afterwards they go on as if it had drawn nothing."""
    before = RandomStates.now()
    paddle.seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        before.restore()

"""The random states of one rank as plain values: Paddle's, NumPy's, Python's."""

from __future__ import annotations

import random
from typing import Any, Optional

import numpy as np
import paddle

__all__ = ["get_random_states", "set_random_states"]

_CPU = -1  # device number in Paddle's states
_WITH_ENGINE = 4  # values: device, seed, offset, and the engine that draws on the CPU


def get_random_states() -> dict[str, Any]:
    """The states now; numbers, texts and lists of those only.

    ``"paddle"`` is None for CPU under Paddle 2.6, which does not tell the state of the engine that draws there.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "paddle": _paddle_states(),
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
        "python": _plain(random.getstate()),
    }


def set_random_states(states: dict[str, Any]) -> bool:
    """Take the states; False, and nothing is set, where Paddle's are missing or of another release or device."""
    now = _paddle_states()
    then = states["paddle"]
    if now is None or then is None or [len(state) for state in now] != [len(state) for state in then]:
        return False
    restored = []
    for state, values in zip(paddle.get_rng_state(), then):
        kind: Any = type(state)
        new = kind.__new__(kind)
        new.__setstate__(tuple(list(value.encode("ascii")) if isinstance(value, str) else value for value in values))
        restored.append(new)
    paddle.set_rng_state(restored)
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, gauss))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    return True


def _paddle_states() -> Optional[list[list[Any]]]:
    states = [state.__getstate__() for state in paddle.get_rng_state()]
    if any(state[0] == _CPU and len(state) < _WITH_ENGINE for state in states):
        return None
    return [[bytes(value).decode("ascii") if isinstance(value, list) else value for value in state] for state in states]


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value

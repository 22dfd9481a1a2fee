"""Automatic names of parameters (``linear_3.w_0``) that depend on the place in the list of layers alone.

Paddle numbers the layers of each class in the order in which a process builds them, so ranks that build different
layers would give the same name to different parameters, and other names than one process gives.  Optimizer states are
stored under these names.  Here the numbers that all layers would use up are known beforehand (:mod:`.probe`), and the
counters are set before each layer is built: every parameter has the name that it has in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import paddle

__all__ = ["Counts", "LayerNames", "counts_now", "own_namespace"]

Counts = Mapping[str, int]  # what has been used up of the numbers of each name, "linear" for linear_0, linear_1 ...

_unique_name = paddle.utils.unique_name


class own_namespace:  # noqa: N801  (a context manager that reads as a function)
    """Count names from 0 inside the block; :attr:`counts` is then what it has used up."""

    counts: Counts

    def __enter__(self) -> own_namespace:
        self._before = _unique_name.switch()
        return self

    def __exit__(self, *_: object) -> None:
        generator, _checker = _unique_name.switch(*self._before)
        self.counts = _of_layers(generator.ids)


def counts_now() -> Counts:
    """What has been used up in the current namespace."""
    return _of_layers(_current_ids())


class LayerNames:
    """The numbers at which the names of each layer of the list begin."""

    def __init__(self, start: Counts, used: Sequence[Counts]) -> None:
        """``start``: used up before the first layer; ``used``: by each layer of the list."""
        self._starts = [dict(start)]
        for counts in used:
            last = self._starts[-1]
            self._starts.append({**last, **{key: last.get(key, 0) + count for key, count in counts.items()}})

    def move_to(self, index: int) -> None:
        """Let the names made next be those of layer ``index``; the number of layers stands for what comes after."""
        _current_ids().update(self._starts[index])


def _current_ids() -> Any:
    generator, checker = _unique_name.switch()
    _unique_name.switch(generator, checker)
    return generator.ids


def _of_layers(ids: Counts) -> dict[str, int]:
    """Without the counters that belong to one layer, such as ``linear_0.w``."""
    return {key: count for key, count in ids.items() if "." not in key}

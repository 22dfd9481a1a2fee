"""A bar for long work, on a terminal only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

from tqdm import tqdm

__all__ = ["progress"]

_DELAY_SECONDS = 3.0


@contextmanager
def progress(what: str, size: int, shown: bool = True) -> Iterator[Callable[[int], Any]]:
    """A function to tell of bytes that are done, of ``size``; the bar appears after some seconds."""
    with tqdm(
        total=size,
        desc=what,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        delay=_DELAY_SECONDS,
        disable=None if shown else True,
    ) as bar:
        yield bar.update

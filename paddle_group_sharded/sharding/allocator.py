"""How far memory rises, by the allocator's statistics of the device in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from ..paddle_compat import allocated_bytes, peak_bytes

__all__ = ["PeakMeter"]


class PeakMeter:
    """Bytes beside what lived when it was made; one at a time."""

    def __init__(self) -> None:
        """Begin here."""
        on_host = paddle.get_device().startswith("cpu")
        self._now: Callable[[], int] = allocated_bytes if on_host else paddle.device.cuda.memory_allocated
        self._highest: Callable[[], int] = peak_bytes if on_host else paddle.device.cuda.max_memory_allocated
        hidden = self._highest() - self._now()
        # Paddle's peak cannot be set back: memory that nobody touches lifts the present up to it, so any rise shows.
        self._ballast: Any = paddle.empty([max(hidden, 1)], dtype="uint8")
        self._start = self._now()

    @property
    def live(self) -> int:
        """Bytes that live now."""
        return self._now() - self._start

    @property
    def peak(self) -> int:
        """The most that have lived at once."""
        return self._highest() - self._start

"""How far memory rises, by the allocator's statistics of the device in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import paddle

from ..paddle_compat import allocated_bytes, peak_bytes

__all__ = ["PeakMeter"]

_LARGEST_BALLAST = 2**36  # bytes of address space


class PeakMeter:
    """Bytes beside what lived when it was made; one at a time.

    Paddle's peak cannot be set back, and it is looked at only when the present thread holds more than ever before.  So
    memory that nobody touches, and that therefore costs address space only, lifts the thread up to there: from then on
    any rise shows.
    """

    def __init__(self) -> None:
        """Begin here."""
        on_host = paddle.get_device().startswith("cpu")
        self._now: Callable[[], int] = allocated_bytes if on_host else paddle.device.cuda.memory_allocated
        self._highest: Callable[[], int] = peak_bytes if on_host else paddle.device.cuda.max_memory_allocated
        self._ballast: list[Any] = []
        size = self._highest() - self._now() + 1  # one more than any peak so far, which therefore has to follow
        while size <= _LARGEST_BALLAST:
            self._ballast.append(paddle.empty([size], dtype="uint8"))
            if self._highest() == self._now():
                break
            size *= 2
        self._works = self._highest() == self._now()
        self._start = self._now()

    @property
    def live(self) -> int:
        """Bytes that live now."""
        return self._now() - self._start

    @property
    def peak(self) -> Optional[int]:
        """The most that have lived at once; None where it cannot be seen."""
        return self._highest() - self._start if self._works else None

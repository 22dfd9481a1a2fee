"""Full buffers that are used again: fresh memory costs more in page faults than the gather into it."""

from __future__ import annotations

from typing import Any, Optional

import paddle

from ..paddle_compat import HostMemory

__all__ = ["BufferPool", "FullBuffer"]

Tensor = Any

MAX_IDLE = 2  # buffers kept: groups of equal size alternate between one in use and one that is fetched ahead


class FullBuffer:
    """One 1-D buffer that is lent out; hand it back with :meth:`BufferPool.give`."""

    def __init__(self, key: tuple[int, Any], memory: Optional[HostMemory]) -> None:
        """Allocate ``key`` (elements, dtype) where ``memory`` is None, else build on ``memory``."""
        self.key = key
        self.memory = memory
        self.tensor: Tensor = memory.tensor() if memory else paddle.empty([key[0]], dtype=key[1])


class BufferPool:
    """Buffers by size and dtype.  Only host memory is kept: accelerators have a caching allocator of their own."""

    def __init__(self) -> None:
        """Start empty."""
        self._idle: list[tuple[tuple[int, Any], HostMemory]] = []  # the last given back at the end

    def take(self, numel: int, dtype: Any) -> FullBuffer:
        """A buffer of ``numel`` elements, not initialised; one that is still looked at is not lent again."""
        key = (numel, dtype)
        if not paddle.get_device().startswith("cpu"):
            return FullBuffer(key, None)
        for index, (idle_key, memory) in enumerate(self._idle):
            if idle_key == key and not memory.in_use:
                del self._idle[index]
                return FullBuffer(key, memory)
        return FullBuffer(key, HostMemory(numel, dtype))

    def give(self, buffer: FullBuffer) -> None:
        """Take back a buffer whose parameters have been released."""
        del buffer.tensor
        if buffer.memory is not None:
            self._idle.append((buffer.key, buffer.memory))
            del self._idle[:-MAX_IDLE]

    def trim(self) -> None:
        """Free what is not lent out."""
        self._idle.clear()

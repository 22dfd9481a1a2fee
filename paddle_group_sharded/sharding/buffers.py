"""Full buffers that are used again: fresh memory costs more in page faults than the gather into it."""

from __future__ import annotations

from typing import Any, Optional

import paddle

from ..paddle_compat import HostMemory

__all__ = ["BufferPool", "FullBuffer"]

Tensor = Any


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
        self._idle: dict[tuple[int, Any], list[HostMemory]] = {}

    def take(self, numel: int, dtype: Any) -> FullBuffer:
        """A buffer of ``numel`` elements, not initialised; one that is still looked at is not lent again."""
        key = (numel, dtype)
        if not paddle.get_device().startswith("cpu"):
            return FullBuffer(key, None)
        idle = self._idle.get(key, [])
        for index, memory in enumerate(idle):
            if not memory.in_use:
                return FullBuffer(key, idle.pop(index))
        idle.clear()  # whoever still looks at them keeps them alive, nobody else needs to
        return FullBuffer(key, HostMemory(numel, dtype))

    def give(self, buffer: FullBuffer) -> None:
        """Take back a buffer whose parameters have been released."""
        del buffer.tensor
        if buffer.memory is not None:
            self._idle.setdefault(buffer.key, []).append(buffer.memory)

    def trim(self) -> None:
        """Free what is not lent out."""
        self._idle.clear()

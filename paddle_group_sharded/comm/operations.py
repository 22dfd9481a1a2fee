"""The operations of a :class:`~.base.Comm`: what each asks for, how it runs, and how a small one travels with the gate.

A collective of gloo costs several wake-ups of threads, a fraction of a millisecond and far more on a busy machine, and
the gate's round trip is due anyway.  So the elements of a small operation go along with the request, the hub hands
everybody's to everybody, and each rank combines them itself, in rank order: no second round, and equal sums everywhere.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import paddle

from ..errors import UsageError
from ..paddle_compat import host_view
from .base import Overlap, Segment
from .dtypes import (
    Array,
    check_tensor,
    dtype_name,
    host_widened,
    numel_of,
    overwrite,
    overwrite_bytes,
    widened,
)
from .transport import GlooTransport
from .verdict import Request

__all__ = ["AllGather", "AllReduce", "Barrier", "Broadcast", "Exchange", "Operation", "ReduceScatter"]

Tensor = Any

SMALL = 1 << 14  # elements of all ranks together up to which an operation travels with the gate


class Operation:
    """One call on one rank.  The constructor raises :class:`UsageError` for arguments that cannot be right."""

    request: Request

    def offer(self) -> Optional[bytes]:
        """This rank's elements, for everybody, if the operation is small and this rank has any."""
        return None

    def combine(self, offers: Sequence[Optional[bytes]], dtype: str) -> Any:
        """The result, from every rank's :meth:`offer`; ``dtype`` is what the ranks agreed on."""
        raise NotImplementedError

    def run(self, transport: GlooTransport, dtype: str) -> Any:
        """The result, by a collective in which every rank takes part."""


class Barrier(Operation):
    """Nothing but the gate."""

    def __init__(self, label: str) -> None:
        """See :meth:`.base.Comm.barrier`."""
        self.request = Request("barrier", label)


class Exchange(Operation):
    """A small Python value of each rank, for all."""

    def __init__(self, value: Any, label: str) -> None:
        """See :meth:`.base.Comm.exchange`."""
        self.request = Request("exchange", label)
        self._pickled = pickle.dumps(value)

    def offer(self) -> bytes:
        """The pickled value."""
        return self._pickled

    def combine(self, offers: Sequence[Optional[bytes]], dtype: str) -> list[Any]:
        """The values, in rank order."""
        return [pickle.loads(offer) for offer in offers if offer is not None]


class AllGather(Operation):
    """Shards to a full tensor."""

    def __init__(self, full: Tensor, shard: Tensor, label: str, world_size: int) -> None:
        """See :meth:`.base.Comm.all_gather`."""
        check_tensor(full, label)
        check_tensor(shard, label)
        numel, shard_numel = numel_of(full), numel_of(shard)
        if numel != world_size * shard_numel or full.dtype != shard.dtype:
            raise UsageError(
                f"all_gather '{label}': expected a full tensor of world_size ({world_size}) times the shard's elements "
                f"in its dtype; got {numel} elements of {dtype_name(full)} for a shard of {shard_numel} elements of "
                f"{dtype_name(shard)}"
            )
        self.request = Request("all_gather", label, numel, dtype_name(full))
        self._full = full
        self._shard = shard

    def offer(self) -> Optional[bytes]:
        """The bytes of the shard."""
        return host_view(self._shard).tobytes() if 0 < self.request.numel <= SMALL else None

    def combine(self, offers: Sequence[Optional[bytes]], dtype: str) -> None:
        """The shards one after the other."""
        overwrite_bytes(self._full, b"".join(offer or b"" for offer in offers))

    def run(self, transport: GlooTransport, dtype: str) -> None:
        """By gloo."""
        transport.all_gather(self._full, self._shard)


class Broadcast(Operation):
    """One rank's tensor to all."""

    def __init__(self, tensor: Tensor, src: int, label: str, rank: int, world_size: int) -> None:
        """See :meth:`.base.Comm.broadcast`."""
        if not 0 <= src < world_size:
            raise UsageError(f"broadcast '{label}': expected src from 0 to {world_size - 1} (group rank), got {src}")
        check_tensor(tensor, label)
        self.request = Request("broadcast", label, numel_of(tensor), dtype_name(tensor), (src,))
        self._tensor = tensor
        self._src = src
        self._small = 0 < self.request.numel * world_size <= SMALL
        self._is_source = rank == src

    def offer(self) -> Optional[bytes]:
        """The bytes of the source's tensor."""
        return host_view(self._tensor).tobytes() if self._small and self._is_source else None

    def combine(self, offers: Sequence[Optional[bytes]], dtype: str) -> None:
        """Take the source's."""
        if not self._is_source:
            overwrite_bytes(self._tensor, offers[self._src] or b"")

    def run(self, transport: GlooTransport, dtype: str) -> None:
        """By gloo."""
        transport.broadcast(self._tensor, self._src)


class AllReduce(Operation):
    """A sum or maximum over the ranks, in place."""

    def __init__(self, tensor: Tensor, label: str, op: str, world_size: int) -> None:
        """See :meth:`.base.Comm.all_reduce`."""
        if op not in ("sum", "max"):
            raise UsageError(f"all_reduce '{label}': expected op 'sum' or 'max', got {op!r}")
        check_tensor(tensor, label, summed=True)
        self.request = Request("all_reduce", label, numel_of(tensor), dtype_name(tensor), (op,))
        self._tensor = tensor
        self._op = op
        self._small = 0 < self.request.numel * world_size <= SMALL

    def offer(self) -> Optional[bytes]:
        """The elements in the dtype in which they are summed."""
        return host_widened(self._tensor).tobytes() if self._small else None

    def combine(self, offers: Sequence[Optional[bytes]], dtype: str) -> None:
        """Sum, or compare, in rank order."""
        overwrite(self._tensor, _combined(offers, dtype, self._op))

    def run(self, transport: GlooTransport, dtype: str) -> None:
        """By gloo."""
        transport.all_reduce(self._tensor, self._op)


class ReduceScatter(Operation):
    """Sums over the ranks, each rank keeping its interval."""

    def __init__(self, segments: Sequence[Segment], numel: int, label: str, rank: int, world_size: int) -> None:
        """See :meth:`.base.Comm.reduce_scatter`."""
        self._segments = list(segments)
        tensors = [segment for segment in self._segments if not isinstance(segment, int)]
        for tensor in tensors:
            check_tensor(tensor, label, summed=True)
        dtypes = {dtype_name(tensor) for tensor in tensors}
        sizes = tuple(numel_of(each) for each in self._segments)
        if numel % world_size or sum(sizes) > numel or len(dtypes) > 1:
            raise UsageError(
                f"reduce_scatter '{label}': expected segments of one dtype, with at most numel elements together, and "
                f"numel a multiple of world_size ({world_size}); got {sum(sizes)} elements of "
                f"{' and '.join(sorted(dtypes)) or 'zeros'} for numel {numel}"
            )
        self.request = Request("reduce_scatter", label, numel, max(dtypes, default=""), sizes)
        share = numel // world_size
        self._own = (rank * share, (rank + 1) * share)
        self._small = numel * world_size <= SMALL

    def offer(self) -> Optional[bytes]:
        """The segments, packed, in the dtype in which they are summed; nothing for zeros only."""
        if not self._small or not self.request.dtype:
            return None
        itemsize = np.dtype(widened(self.request.dtype)).itemsize
        return b"".join(
            bytes(each * itemsize) if isinstance(each, int) else host_widened(each).tobytes() for each in self._segments
        )

    def combine(self, offers: Sequence[Optional[bytes]], dtype: str) -> list[Overlap]:
        """Sum in rank order and cut out this rank's interval."""
        total = _combined(offers, dtype, "sum")
        places = []
        begin = 0
        for segment, size in enumerate(self.request.detail):
            start, stop = (min(max(bound - begin, 0), size) for bound in self._own)
            if start < stop:
                places.append((segment, start, stop - start))
            begin += size
        if not places:
            return []
        own = paddle.to_tensor(total[self._own[0] : self._own[1]])
        values = paddle.split(own, [numel for _, _, numel in places]) if len(places) > 1 else [own]
        return [Overlap(segment, start, value) for (segment, start, _), value in zip(places, values)]

    def run(self, transport: GlooTransport, dtype: str) -> list[Overlap]:
        """By gloo."""
        return transport.reduce_scatter(self._segments, self.request.detail, self.request.numel, dtype)


def _combined(offers: Sequence[Optional[bytes]], dtype: str, op: str) -> Array:
    arrays = [np.frombuffer(offer, widened(dtype)) for offer in offers if offer is not None]
    total: Array = arrays[0].copy()
    with np.errstate(all="ignore"):  # an overflow is the caller's to find, as in every other sum
        for array in arrays[1:]:
            (np.add if op == "sum" else np.maximum)(total, array, out=total)
    return total

"""What the rest of the package knows of the network: a :class:`Comm`, its :class:`Work`, and who serves what.

Sums only: scaling is the caller's.  Every call is collective over the ranks of the group and is issued in the same
order by every rank, with one exception, named so that nobody has to guess: a gather that a *server* is registered for
may be asked for by some ranks only, and the others serve it at their next call (:meth:`Comm.serve`).

Elements are counted as a network would move them with native ring collectives; ``label`` says who asked
(``"gather blocks.0"``), is compared between the ranks, and stands in every message about a rank that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, Protocol, Union

__all__ = ["Comm", "Overlap", "Segment", "Server", "Work"]

Tensor = Any  # paddle.Tensor; Paddle is Any at the border

Segment = Union[Tensor, int]
"""One stretch of a flat buffer: a tensor that holds it, or a number of elements that count as zero."""


class Overlap(NamedTuple):
    """The part of one segment that this rank owns after a reduce-scatter."""

    segment: int  # index into the segments
    start: int  # first element, counted inside the segment
    value: Tensor  # 1-D, the sum over the ranks; may be a view of the segment, and may be of a wider dtype


class Server(NamedTuple):
    """How a rank that did not ask takes part in an operation that others ask for."""

    shard: Callable[[], Tensor]  # 1-D, this rank's part, read when the request is served
    numel: int  # elements of the full buffer, world_size times the shard's


class Work(Protocol):
    """An operation under way."""

    def wait(self) -> Any:
        """Block until done; return its result (None, or the list of :class:`Overlap`); raise what it raised."""


class Comm(Protocol):
    """Collectives over one group of ranks."""

    rank: int  # in the group
    world_size: int
    ranks: tuple[int, ...]  # global ranks, in the order of the group

    def all_gather(self, full: Tensor, shard: Tensor, label: str) -> Work:
        """Fill ``full`` (1-D, ``world_size * shard.numel``) with every rank's ``shard``, in rank order.

        ``shard`` may be the rank's own slice of ``full`` (gathered in place).
        """

    def reduce_scatter(self, segments: Sequence[Segment], numel: int, label: str) -> Work:
        """Sum the flat concatenation of ``segments`` over the ranks; each rank gets its ``1/world_size``.

        ``segments``, each of any shape and contiguous, are padded with zeros to ``numel`` (a multiple of
        ``world_size``); all tensors have one dtype.  They may be overwritten: what they hold afterwards is unspecified,
        except that the values of the returned overlaps may be views of them.  16-bit tensors are summed in float32
        where the backend does not sum them right.  ``work.wait()`` returns the list of :class:`Overlap` of this rank.
        """

    def all_reduce(self, tensor: Tensor, label: str, op: str = "sum") -> Work:
        """Sum (``"sum"``) or take the largest (``"max"``) of ``tensor`` over the ranks, in place."""

    def broadcast(self, tensor: Tensor, src: int, label: str) -> Work:
        """Copy ``tensor`` of group rank ``src`` to every rank, in place."""

    def exchange(self, value: Any, label: str) -> list[Any]:
        """Every rank's ``value`` (small, picklable), in rank order, to every rank.  Blocks."""

    def barrier(self, label: str) -> None:
        """Return when every rank has called.  Blocks."""

    def serve(self, label: str, server: Optional[Server]) -> None:
        """Let the ``all_gather`` of this ``label`` be asked for by any rank at any time; ``None`` ends it.

        A rank that asks waits until every other rank arrives at its next call of any kind and serves the request
        there.  The server's shard must therefore be right whenever this rank issues a call.
        """

    def close(self) -> None:
        """Finish what is under way, end the worker thread and close the sockets.  Safe to call twice."""

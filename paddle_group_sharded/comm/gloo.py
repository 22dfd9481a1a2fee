"""CPU ranks: every operation passes the gate, then runs on a gloo group of our own, in a thread of our own.

Alternatives considered.  *The user's process group*: gloo matches messages by counting the operations of a group, so
our thread and the user's own collectives would pair up wrongly.  *No thread*: gloo blocks the caller, so nothing would
overlap with computing.  *A key-value store as control plane*: a hundred times slower than a socket.  *Only catching
gloo's time limit*: after it the group is dead on every rank, and a tensor may hold half a sum.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Callable, Optional

import paddle

from ..errors import CommError
from ..paddle_compat import GlooGroup, tcp_store
from .base import Segment, Server, Work
from .gate import Gate
from .groups import GROUPS, Member
from .operations import AllGather, AllReduce, Barrier, Broadcast, Exchange, Operation, ReduceScatter
from .rendezvous import accept_links, dial_link
from .transport import GlooTransport
from .verdict import Request
from .worker import Worker

__all__ = ["GlooComm"]

Tensor = Any

_EXIT_SECONDS = 1.0  # for what is still queued when the program ends without close()


class GlooComm:
    """A :class:`~.base.Comm` over gloo."""

    def __init__(self, member: Member, gate: Gate, group_id: int, group: GlooGroup) -> None:
        """Use :meth:`connect`."""
        self.rank = member.rank
        self.world_size = len(member.ranks)
        self.ranks = member.ranks
        self.on_run: Optional[Callable[[Request, bool], None]] = None
        """Called in the worker thread with each operation, in the order in which they really run; the second argument
        tells whether this rank only takes part for others."""
        self._gate = gate
        self._transport = GlooTransport(group, self.rank, self.world_size)
        self._servers: dict[str, Server] = {}  # the worker's own
        self._worker = Worker(f"group_sharded comm of ranks {list(self.ranks)}")
        give_back = functools.partial(GROUPS.give_back, member, group_id, group)
        self._leave = functools.partial(_leave, self._worker, gate, give_back)
        self._finalizer = weakref.finalize(self, self._leave, _EXIT_SECONDS)

    @classmethod
    def connect(cls, rank: int, ranks: Sequence[int], timeout: float) -> GlooComm:
        """Open a communicator over the global ``ranks``, as number ``rank`` of them; collective over these only."""
        member = Member(rank, tuple(ranks))
        store = tcp_store()
        members = "group_sharded/" + "_".join(str(number) for number in ranks)
        if rank == 0:
            by_global_rank = accept_links(store, members, ranks[1:], timeout)
            links = {ranks.index(number): link for number, link in by_global_rank.items()}
        else:
            links = {0: dial_link(store, members, ranks[rank], ranks[0], timeout)}
        gate = Gate(rank, ranks, links, timeout)
        # Ranks count alike only as long as no attempt has failed: the hub's number counts.
        number = gate.exchange(f"number of {members}", store.add(f"{members}/opened_by/{rank}", 1))[0]
        name = f"{members}/{number}"
        return cls(member, gate, *GROUPS.open(gate, member, name))

    def all_gather(self, full: Tensor, shard: Tensor, label: str) -> Work:
        """See :class:`~.base.Comm`."""
        return self._submit(AllGather(full, shard, label, self.world_size))

    def reduce_scatter(self, segments: Sequence[Segment], numel: int, label: str) -> Work:
        """See :class:`~.base.Comm`."""
        return self._submit(ReduceScatter(segments, numel, label, self.rank, self.world_size))

    def all_reduce(self, tensor: Tensor, label: str, op: str = "sum") -> Work:
        """See :class:`~.base.Comm`."""
        return self._submit(AllReduce(tensor, label, op, self.world_size))

    def broadcast(self, tensor: Tensor, src: int, label: str) -> Work:
        """See :class:`~.base.Comm`."""
        return self._submit(Broadcast(tensor, src, label, self.rank, self.world_size))

    def exchange(self, value: Any, label: str) -> list[Any]:
        """See :class:`~.base.Comm`."""
        values: list[Any] = self._submit(Exchange(value, label)).wait()
        return values

    def barrier(self, label: str) -> None:
        """See :class:`~.base.Comm`."""
        self._submit(Barrier(label)).wait()

    def serve(self, label: str, server: Optional[Server]) -> None:
        """See :class:`~.base.Comm`.  Takes effect in order with the operations."""
        self._worker.submit(lambda: self._set_server(label, server))

    def close(self) -> None:
        """See :class:`~.base.Comm`."""
        if self._finalizer.detach() is not None:
            self._leave(None)

    def _submit(self, operation: Operation) -> Work:
        if not self._finalizer.alive:
            raise CommError(f"the communicator has been closed; {operation.request} cannot run any more")
        self._gate.check()
        return self._worker.submit(lambda: self._perform(operation))

    # -- in the worker's thread -------------------------------------------------------------------------------------

    def _perform(self, operation: Operation) -> Any:
        """Take part for others until it is this operation's turn, then run it."""
        request = operation.request
        try:
            offer = operation.offer()
            while True:
                verdict = self._gate.ask(operation.request, offer)
                request = verdict.request
                mine = request.matches(operation.request)
                if self.on_run is not None:
                    self.on_run(request, not mine)
                if not mine:
                    self._serve(request)
                elif verdict.offers:
                    return operation.combine(verdict.offers, request.dtype)
                else:
                    return operation.run(self._transport, request.dtype)
        except CommError:
            raise  # the gate's own: every rank knows
        except Exception as error:
            reason = self._gate.fail(f"rank {self.ranks[self.rank]} failed in {request}: {error}", request)
            raise CommError(reason) from error

    def _serve(self, request: Request) -> None:
        """Give this rank's share of a gather that others ask for; nobody wants its result here."""
        shard = self._servers[request.label].shard()
        self._transport.all_gather(paddle.empty([request.numel], dtype=shard.dtype), shard)

    def _set_server(self, label: str, server: Optional[Server]) -> None:
        if server is None:
            self._servers.pop(label, None)
            self._gate.served.pop(label, None)
        else:
            self._servers[label] = server
            self._gate.served[label] = server.numel


def _leave(worker: Worker, gate: Gate, give_back: Callable[[], None], seconds: Optional[float]) -> None:
    """Let what is queued finish, within ``seconds``, then end the thread and the sockets."""
    if worker.close(seconds):
        if not gate.failed:
            give_back()
    else:
        gate.shutdown()
        worker.close(seconds)
    gate.close(announce=seconds is None)

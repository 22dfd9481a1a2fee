"""Point to point: one direction between two ranks, first in, first out, with a thread at each end.

Alternatives considered.  *Send and receive on a shared process group*: gloo pairs messages by counting a group's
operations, so two ranks that both send first wait for each other for ever.  *A gloo group per direction*: cannot
deadlock, but gloo gives up after 30 s when the receiver is late, and Paddle never frees a group.  A socket per
direction has neither limit, and says at once when its other end is gone.

Every message carries a label, which the receiver compares with what it expects.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Callable, Optional, Union

import numpy as np
import paddle

from ..errors import CommError, UsageError
from ..paddle_compat import host_view
from .base import Comm, Work
from .dtypes import dtype_name
from .link import Link, LinkClosed, dumps, loads
from .rendezvous import Address, Listener, connect
from .worker import Worker

__all__ = ["Receiver", "Sender", "create_channels"]

Tensor = Any

_OBJECT = "object"
_TENSOR = "tensor"
_MESSAGE = "message"  # an object and any number of tensors
_FAILURE = "failure"  # its label is the reason
_EXIT_SECONDS = 1.0  # for what is still queued when the program ends without close()


class _End:
    """One end of a channel: a link, the thread that moves messages through it, and the first error that it met."""

    def __init__(self, link: Link, me: int, other: int, timeout: float) -> None:
        self.rank = me
        self.other = other
        self._link = link
        self._timeout = timeout
        self._worker = Worker(f"group_sharded channel between ranks {me} and {other}")
        self._errors: list[CommError] = []  # at most one
        self._finalizer = weakref.finalize(self, _leave, self._worker, link, _EXIT_SECONDS)

    def close(self) -> None:
        """Finish what is under way and close the connection; raises what went wrong before.  Safe to call twice."""
        if self._finalizer.detach() is not None:
            _leave(self._worker, self._link, None)
            self._check()

    def abandon(self) -> None:
        """As :meth:`close`, after a failure: what is under way is given a second at most, and nothing is raised."""
        if self._finalizer.detach() is not None:
            _leave(self._worker, self._link, _EXIT_SECONDS)

    def _submit(self, call: Callable[[], Any]) -> Work:
        if not self._finalizer.alive:
            raise CommError(f"the channel between ranks {self.rank} and {self.other} has been closed")
        self._check()
        link, errors, doing = self._link, self._errors, call

        def run() -> Any:
            if errors:
                raise CommError(str(errors[0]))
            try:
                return doing()
            except CommError as error:
                errors.append(error)
                link.shutdown()  # the other end must not wait for ever
                raise

        return self._worker.submit(run)

    def _check(self) -> None:
        if self._errors:
            raise CommError(str(self._errors[0])) from self._errors[0]


class Sender(_End):
    """Where messages go in."""

    def send(self, tensor: Tensor, label: str) -> Work:
        """Send ``tensor`` (any shape and dtype); returns at once.

        Until the message has been sent, which ``work.wait()`` tells, the tensor is kept alive and must not be changed.
        An error that nobody waits for is raised by the next call, or by ``close()``.
        """
        host = _on_host(tensor)
        return self._submit(lambda: self._send(_TENSOR, label, _form(host), [host]))

    def send_object(self, value: Any, label: str) -> Work:
        """Send a small Python value; it is pickled before this returns."""
        pickled = dumps(value)
        return self._submit(lambda: self._send(_OBJECT, label, pickled, []))

    def send_message(self, value: Any, tensors: Sequence[Tensor], label: str) -> Work:
        """Send a small Python value and any number of tensors, as one message; otherwise as :meth:`send`."""
        hosts = [_on_host(tensor) for tensor in tensors]
        content = (dumps(value), [_form(host) for host in hosts])
        return self._submit(lambda: self._send(_MESSAGE, label, content, hosts))

    def send_failure(self, reason: str) -> Work:
        """Say why no more messages will come: the other end raises it at its next message, whatever that was to be."""
        return self._submit(lambda: self._send(_FAILURE, reason, None, []))

    def _send(self, kind: str, label: str, content: Any, tensors: Sequence[Tensor]) -> None:
        try:
            self._link.send(dumps((kind, label, content)), *map(_memory, tensors))
        except LinkClosed:
            raise CommError(
                f"rank {self.other} has ended, or has closed its end, before rank {self.rank} could send it "
                f"'{label}'; see the log of rank {self.other}"
            ) from None


class Receiver(_End):
    """Where messages come out."""

    def abandon(self) -> None:
        """See :meth:`_End.abandon`; nobody wants what is still to come."""
        self._link.shutdown()
        super().abandon()

    def recv(self, shape: Sequence[int], dtype: Union[str, Any], label: str) -> Tensor:
        """The next message, which must be a tensor of this shape, dtype and label.  Blocks."""
        return self.irecv(shape, dtype, label).wait()

    def irecv(self, shape: Sequence[int], dtype: Union[str, Any], label: str) -> Work:
        """As :meth:`recv`, but returns at once; ``work.wait()`` gives the tensor."""
        wanted = (list(shape), str(dtype).rpartition(".")[2])
        return self._submit(lambda: self._recv(_TENSOR, label, self._recv_tensor, wanted))

    def recv_object(self, label: str) -> Any:
        """The next message, which must be a Python value of this label.  Blocks."""
        return self._submit(lambda: self._recv(_OBJECT, label, loads)).wait()

    def irecv_message(self, label: str) -> Work:
        """The next message, which must be one of :meth:`Sender.send_message`, of this label.  Returns at once;
        ``work.wait()`` gives the value and the list of tensors.
        """

        def take(content: Any) -> tuple[Any, list[Tensor]]:
            pickled, forms = content
            return loads(pickled), [self._recv_tensor(form) for form in forms]

        return self._submit(lambda: self._recv(_MESSAGE, label, take))

    def _recv(
        self, kind: str, label: str, take: Callable[[Any], Any], wanted: Optional[tuple[list[int], str]] = None
    ) -> Any:
        try:
            if not self._link.poll(self._timeout):
                raise CommError(
                    f"expected '{label}' from rank {self.other}, but nothing came within {self._timeout:.0f} s. If "
                    "that rank is only slow, pass a larger timeout; otherwise look where it is stuck"
                )
            got_kind, got_label, content = loads(self._link.recv())
            if got_kind == _FAILURE:
                raise CommError(got_label)
            if (got_kind, got_label) != (kind, label) or (wanted is not None and content != wanted):
                raise CommError(
                    f"expected {_describe(kind, label, wanted)} from rank {self.other}, got "
                    f"{_describe(got_kind, got_label, content)}; both ends must agree on the order of messages"
                )
            return take(content)
        except LinkClosed:
            raise CommError(
                f"rank {self.other} has ended, or has closed its end, before it sent '{label}' to rank {self.rank}; "
                f"see the log of rank {self.other}"
            ) from None

    def _recv_tensor(self, form: tuple[list[int], str]) -> Tensor:
        shape, dtype = form
        tensor = paddle.empty(shape, dtype=dtype)
        on_host = tensor.place.is_cpu_place()
        host = tensor if on_host else tensor.cpu()
        self._link.recv_into(_memory(host))
        if not on_host:
            tensor.copy_(host, True)
        return tensor


def create_channels(
    comm: Comm, routes: Mapping[Hashable, tuple[int, int]], timeout: float = 1800.0
) -> dict[Hashable, Union[Sender, Receiver]]:
    """Open one channel per route; collective over ``comm``, with equal ``routes`` on every rank.

    ``routes`` maps a key of the caller's to ``(source, destination)``, two different group ranks.  Returns this rank's
    ends by key: a :class:`Sender` where it is the source, a :class:`Receiver` where it is the destination.
    ``timeout``: seconds that a receiver waits for a message.
    """
    for key, (source, destination) in routes.items():
        if source == destination or not {source, destination} <= set(range(comm.world_size)):
            raise UsageError(
                f"channel {key!r}: expected two different group ranks from 0 to {comm.world_size - 1}, got {source} "
                f"and {destination}"
            )
    numbered = list(enumerate(routes.items()))
    incoming = [number for number, (_, (_, destination)) in numbered if destination == comm.rank]
    with Listener() as listener:
        label = f"channels {list(routes.items())}"  # which makes sure that they are equal
        addresses = [Address(*each) for each in comm.exchange(tuple(listener.address), label)]
        outgoing = {
            number: connect(addresses[destination], number)
            for number, (_, (source, destination)) in numbered
            if source == comm.rank
        }
        accepted = listener.accept(incoming, timeout)
    ends: dict[Hashable, Union[Sender, Receiver]] = {}
    for number, (key, (source, destination)) in numbered:
        if number in outgoing:
            ends[key] = Sender(outgoing[number], comm.ranks[source], comm.ranks[destination], timeout)
        elif number in accepted:
            ends[key] = Receiver(accepted[number], comm.ranks[destination], comm.ranks[source], timeout)
        elif number in incoming:
            raise CommError(f"expected rank {comm.ranks[source]} to open channel {key!r}, but it did not come")
    return ends


def _describe(kind: str, label: str, content: Any) -> str:
    if kind != _TENSOR:
        return f"the {'value' if kind == _OBJECT else kind} '{label}'"
    shape, dtype = content
    return f"the tensor '{label}' ({dtype} {shape})"


def _on_host(tensor: Tensor) -> Tensor:
    """A contiguous tensor on the host, outside of autograd, with the elements of ``tensor``; it itself if it is one."""
    host = tensor.detach() if tensor.place.is_cpu_place() else tensor.detach().cpu()
    return host if host.is_contiguous() else host.contiguous()


def _form(host: Tensor) -> tuple[list[int], str]:
    return list(host.shape), dtype_name(host)


def _memory(host: Tensor) -> memoryview:
    return memoryview(host_view(host).view(np.uint8))


def _leave(worker: Worker, link: Link, seconds: Optional[float]) -> None:
    """Let what is queued finish, within ``seconds``, then end the thread and the socket."""
    if not worker.close(seconds):
        link.shutdown()
        worker.close(seconds)
    link.close()

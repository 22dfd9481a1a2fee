"""Framed messages over sockets, and how ranks find each other: the control plane under the gate and the channels.

Messages are pickled Python values.  A connection is accepted only after the peer has shown a random key that went
through the TCP store of the launch, so nothing is unpickled that did not come from a rank of the same run.
"""

from __future__ import annotations

import hmac
import json
import pickle
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Optional

from ..errors import CommError
from ..paddle_compat import current_host

__all__ = ["Link", "LinkClosed", "accept_links", "dial_link", "dumps", "loads", "wait_readable"]

_HEADER = struct.Struct("!Q")
_HELLO = struct.Struct("!32sI")  # the key, then the rank of the one who dials
_KEY_BYTES = 32


class LinkClosed(Exception):
    """The other end has closed its socket: it called ``close()``, ended, or was killed."""


class Link:
    """One connected socket that carries whole messages, for one sending and one receiving thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock

    def fileno(self) -> int:
        """For ``select``: readable means that a message or the end of the connection is there."""
        return self._sock.fileno()

    def send(self, message: bytes) -> None:
        """Send one message; silent when the peer has gone: what it said last is still to be read by :meth:`recv`."""
        try:
            self._sock.sendall(_HEADER.pack(len(message)) + message)
        except OSError:
            pass

    def recv(self) -> bytes:
        """The next message, waiting for it; :class:`LinkClosed` when the connection has ended."""
        (length,) = _HEADER.unpack(self._read(_HEADER.size))
        return self._read(length)

    def poll(self, seconds: Optional[float]) -> bool:
        """Whether :meth:`recv` has something to say within ``seconds`` (``None``: wait for ever)."""
        return bool(wait_readable([self], seconds))

    def shutdown(self) -> None:
        """End the connection; a thread of either rank that waits on it wakes up.  The socket stays open."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more

    def close(self) -> None:
        """:meth:`shutdown`, then free the socket; for the thread that reads it.  Safe to call twice."""
        self.shutdown()
        self._sock.close()

    def _read(self, size: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < size:
            try:
                chunk = self._sock.recv(min(size - len(chunks), 1 << 20))
            except OSError:
                raise LinkClosed from None
            if not chunk:
                raise LinkClosed
            chunks += chunk
        return bytes(chunks)


def wait_readable(links: Sequence[Link], seconds: Optional[float]) -> list[Link]:
    """The links that have a message, or have ended, within ``seconds``."""
    poller = select.poll()
    by_number = {}
    for link in links:
        number = link.fileno()
        if number < 0:
            raise LinkClosed
        by_number[number] = link
        poller.register(number, select.POLLIN)
    events = poller.poll(None if seconds is None else max(0.0, seconds) * 1000)
    return [by_number[number] for number, _ in events]


def accept_links(store: Any, name: str, peers: Sequence[int], timeout: float) -> dict[int, Link]:
    """Wait for every rank of ``peers`` to :func:`dial_link` the same ``name``; the link to each.

    Raises :class:`CommError` naming the ranks that have not come within ``timeout`` seconds.
    """
    host = current_host()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    key = secrets.token_bytes(_KEY_BYTES)
    links: dict[int, Link] = {}
    deadline = time.monotonic() + timeout
    with socket.create_server((host, 0), family=family, backlog=len(peers) + 8) as server:
        store.set(name, json.dumps([host, server.getsockname()[1], key.hex()]))
        store.add(f"{name}/open", 1)
        while len(links) < len(peers):
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                sock, _ = server.accept()
            except socket.timeout:  # TimeoutError only since Python 3.10
                raise CommError(_not_come(timeout, [peer for peer in peers if peer not in links])) from None
            rank = _greet(sock, key, set(peers) - set(links))
            if rank is not None:
                links[rank] = Link(sock)
    return links


def _not_come(timeout: float, missing: Sequence[int]) -> str:
    return (
        f"expected every rank of the group to open its communicator within {timeout:.0f} s, but rank "
        f"{', '.join(str(rank) for rank in missing)} did not come; call group_sharded_parallel on all ranks of its "
        "group, in the same order"
    )


def _greet(sock: socket.socket, key: bytes, expected: set[int]) -> Optional[int]:
    """The rank behind a fresh connection, or ``None`` (and the connection is closed) for a stranger."""
    sock.settimeout(10.0)
    try:
        hello = sock.recv(_HELLO.size, socket.MSG_WAITALL)
        shown, rank = _HELLO.unpack(hello)
        if hmac.compare_digest(shown, key) and rank in expected:
            return int(rank)
    except (OSError, struct.error):
        pass
    sock.close()
    return None


def dial_link(store: Any, name: str, rank: int, hub: int, timeout: float) -> Link:
    """Connect to the rank ``hub``, which calls :func:`accept_links` with ``name``, as ``rank``; waits until it has.

    Raises :class:`CommError` where it has not come within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while store.add(f"{name}/open", 0) == 0:  # get() would wait for ever
        if time.monotonic() > deadline:
            raise CommError(_not_come(timeout, [hub]))
    host, port, key = json.loads(store.get(name))
    sock = socket.create_connection((host, port), timeout=30.0)
    sock.sendall(_HELLO.pack(bytes.fromhex(key), rank))
    return Link(sock)


def dumps(value: Any) -> bytes:
    """The bytes of one message."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def loads(message: bytes) -> Any:
    """The value of one message."""
    return pickle.loads(message)

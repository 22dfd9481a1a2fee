"""Framed messages over sockets: what the gate and the channels talk through."""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any, Optional

__all__ = ["Link", "LinkClosed", "dumps", "loads", "wait_readable"]

_HEADER = struct.Struct("!Q")


class LinkClosed(Exception):
    """The other end has closed its socket: it called ``close()``, ended, or was killed."""


class Link:
    """One connected socket that carries whole messages, for one sending and one receiving thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanishes is noticed, within hours
        self._sock = sock

    def fileno(self) -> int:
        """For ``select``: readable means that a message or the end of the connection is there."""
        return self._sock.fileno()

    def send(self, message: bytes, *payloads: memoryview) -> None:
        """Send one message and, for :meth:`recv_into`, payloads; :class:`LinkClosed` when the connection has ended."""
        try:
            self._sock.sendall(_HEADER.pack(len(message)) + message)
            for payload in payloads:
                self._sock.sendall(payload)
        except OSError:
            raise LinkClosed from None

    def recv(self) -> bytes:
        """The next message, waiting for it; :class:`LinkClosed` when the connection has ended."""
        (length,) = _HEADER.unpack(self._read(_HEADER.size))
        return self._read(length)

    def recv_into(self, payload: memoryview) -> None:
        """Fill ``payload`` with the next of those that the last message came with."""
        done = 0
        while done < len(payload):
            try:
                count = self._sock.recv_into(payload[done:])
            except OSError:
                count = 0
            if not count:
                raise LinkClosed
            done += count

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
        data = bytearray(size)
        self.recv_into(memoryview(data))
        return bytes(data)


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


def dumps(value: Any) -> bytes:
    """The bytes of one message."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def loads(message: bytes) -> Any:
    """The value of one message."""
    return pickle.loads(message)

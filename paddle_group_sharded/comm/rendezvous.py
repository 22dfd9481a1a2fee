"""How ranks find each other: one listens, tells its address and a random key through the launch's store, others dial.

A connection is accepted only after the peer has shown the key, so nothing is unpickled that did not come from a rank of
the same run.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from ..errors import CommError
from ..paddle_compat import current_host
from .link import Link, LinkClosed

__all__ = ["Address", "Listener", "accept_links", "connect", "dial_link"]

_HELLO = struct.Struct("!32sI")  # the key, then the number of the one who dials
_KEY_BYTES = 32
_CONNECT_SECONDS = 30.0
_GREETING_SECONDS = 10.0
_RETRY_SECONDS = 0.05
_GRACE_SECONDS = 5.0  # for the hub to say which rank is missing, before it counts as missing itself


class Address(NamedTuple):
    """Where a rank listens, and what to show there."""

    host: str
    port: int
    key: str


class Listener:
    """Waits for connections of numbered peers, at the address by which the launch says that others reach this rank."""

    def __init__(self) -> None:
        host = current_host()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._server = socket.create_server((host, 0), family=family, backlog=128)
        self.address = Address(host, self._server.getsockname()[1], self._key.hex())

    def accept(self, numbers: Sequence[int], timeout: float) -> dict[int, Link]:
        """The links to the peers that came with ``numbers``: to all of them, or those within ``timeout`` seconds."""
        links: dict[int, Link] = {}
        deadline = time.monotonic() + timeout
        while len(links) < len(numbers):
            self._server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                sock, _ = self._server.accept()
            except socket.timeout:  # TimeoutError only since Python 3.10
                break
            number = self._greet(sock)
            if number is not None and number in numbers and number not in links:
                links[number] = Link(sock)
            else:
                sock.close()
        return links

    def _greet(self, sock: socket.socket) -> Optional[int]:
        """The number of a peer that shows the key, else ``None``."""
        sock.settimeout(_GREETING_SECONDS)
        try:
            shown, number = _HELLO.unpack(sock.recv(_HELLO.size, socket.MSG_WAITALL))
        except (OSError, struct.error):
            return None
        return int(number) if hmac.compare_digest(shown, self._key) else None

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()


def connect(address: Address, number: int) -> Link:
    """Connect to a :class:`Listener` as ``number``."""
    try:
        sock = socket.create_connection((address.host, address.port), timeout=_CONNECT_SECONDS)
        sock.sendall(_HELLO.pack(bytes.fromhex(address.key), number))
    except OSError as error:
        raise CommError(
            f"expected a rank of the group to listen at {address.host}:{address.port}, got: {error}. It has ended, or "
            "has given up waiting for the others (see its log); or a firewall is between the two hosts"
        ) from error
    return Link(sock)


def accept_links(store: Any, name: str, peers: Sequence[int], timeout: float) -> dict[int, Link]:
    """Wait for every rank of ``peers`` to :func:`dial_link` the same ``name``; the link to each.

    A name may be used again and again, also after a failure: who waits under it and who dials meet.
    Raises :class:`CommError` naming the ranks that have not come within ``timeout`` seconds, on those that have too.
    """
    with Listener() as listener:
        store.set(name, json.dumps(listener.address))
        store.add(f"{name}/open", 1)
        links = listener.accept(peers, timeout)
    missing = [peer for peer in peers if peer not in links]
    reason = _not_come(timeout, missing) if missing else ""
    for link in links.values():
        _send_last(link, reason.encode())  # empty: welcome
    if missing:
        for link in links.values():
            link.close()
        raise CommError(reason)
    return links


def dial_link(store: Any, name: str, rank: int, hub: int, timeout: float) -> Link:
    """Connect to the rank ``hub``, which calls :func:`accept_links` with ``name``, as ``rank``; waits until it has all.

    Raises :class:`CommError` where it has not come within ``timeout`` seconds, or what it raises.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if store.add(f"{name}/open", 0) == 0:  # get() would wait for ever
            continue
        link = _try(Address(*json.loads(store.get(name))), rank)
        if link is None:  # an address of the last time
            time.sleep(_RETRY_SECONDS)
            continue
        if not link.poll(deadline - time.monotonic() + _GRACE_SECONDS):
            break
        try:
            reason = link.recv()
        except LinkClosed:  # the hub has ended, or a stranger has the port by now
            time.sleep(_RETRY_SECONDS)
            continue
        if reason:
            raise CommError(reason.decode())
        return link
    raise CommError(_not_come(timeout, [hub]))


def _try(address: Address, number: int) -> Optional[Link]:
    try:
        return connect(address, number)
    except CommError:
        return None


def _send_last(link: Link, message: bytes) -> None:
    try:
        link.send(message)
    except LinkClosed:
        pass  # the first operation will say so


def _not_come(timeout: float, missing: Sequence[int]) -> str:
    return (
        f"expected every rank of the group to open its communicator within {timeout:.0f} s, but rank "
        f"{', '.join(str(rank) for rank in missing)} did not come; build the model "
        "(group_sharded_parallel, PipelineLayer) on all ranks of its group, in the same order"
    )

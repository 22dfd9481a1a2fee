"""Gloo groups over ranks that have found each other: made with a key-value store of their own, and used again.

Paddle keeps every process group, with its sockets and threads, until the process ends, and making one takes half a
second of store traffic.  So a group that a closed communicator leaves behind in working order goes to the next one over
the same ranks: process-wide, because Paddle's registry is.
"""

from __future__ import annotations

import queue
import socket
import threading
import zlib
from typing import Any, NamedTuple

from ..errors import CommError
from ..paddle_compat import GlooGroup, current_host, open_tcp_store
from .gate import Gate

__all__ = ["GROUPS", "GroupPool", "Member"]

_ATTEMPTS = 5  # to find a port that is still free when the store opens it, and to reach it
_OPEN_SECONDS = 20.0  # of one attempt


class Member(NamedTuple):
    """One rank's place among the ranks of a group."""

    rank: int  # in the group
    ranks: tuple[int, ...]  # global


class GroupPool:
    """The groups of this process that nobody uses at present; for any thread."""

    def __init__(self) -> None:
        self._idle: dict[tuple[int, ...], dict[int, GlooGroup]] = {}
        self._lock = threading.Lock()

    def open(self, gate: Gate, member: Member, name: str) -> tuple[int, GlooGroup]:
        """A group that is idle on every rank, or a new one; collective.  ``name`` is new, and equal on every rank."""
        with self._lock:
            mine = list(self._idle.get(member.ranks, ()))
        everywhere = set.intersection(*(set(theirs) for theirs in gate.exchange(f"idle groups for {name}", mine)))
        if everywhere:
            group_id = min(everywhere)
            with self._lock:
                return group_id, self._idle[member.ranks].pop(group_id)
        group_id = 0x4000_0000 | zlib.crc32(name.encode()) & 0x3FFF_FFFF  # far from Paddle's, which count from 0
        return group_id, GlooGroup(_store(gate, member, name), member.rank, len(member.ranks), group_id)

    def give_back(self, member: Member, group_id: int, group: GlooGroup) -> None:
        """``group`` has finished its last operation, and it went well."""
        with self._lock:
            self._idle.setdefault(member.ranks, {})[group_id] = group


GROUPS = GroupPool()


def _store(gate: Gate, member: Member, name: str) -> Any:
    """A new key-value store, served by group rank 0; collective."""
    if member.rank == 0:
        store, port = _serve(current_host(), _ATTEMPTS)
        gate.exchange(f"store for {name}", (current_host(), port))
        return store
    host, port = gate.exchange(f"store for {name}", None)[0]
    return _opened(host, port, serve=False, attempts=_ATTEMPTS)


def _serve(host: str, attempts: int) -> tuple[Any, int]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    try:
        return _opened(host, port, serve=True, attempts=1), port
    except Exception:
        if attempts == 1:
            raise
        return _serve(host, attempts - 1)  # somebody else took the port in between


def _opened(host: str, port: int, serve: bool, attempts: int) -> Any:
    """The store, made in a thread of its own: Paddle's constructor has been seen to wait for ever, without a limit."""
    outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def open_it() -> None:
        try:
            outcome.put(open_tcp_store(host, port, serve))
        except Exception as error:
            outcome.put(error)

    threading.Thread(target=open_it, name=f"group_sharded store at port {port}", daemon=True).start()
    try:
        store = outcome.get(timeout=_OPEN_SECONDS)
    except queue.Empty:
        if attempts > 1:
            return _opened(host, port, serve, attempts - 1)
        raise CommError(
            f"expected the key-value store of group rank 0 at {host}:{port} to open in {_OPEN_SECONDS} s; start the "
            "program again"
        ) from None
    if isinstance(store, Exception):
        raise store
    return store

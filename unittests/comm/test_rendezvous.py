"""Links between ranks: framing, strangers, and ranks that do not come."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from paddle_group_sharded.comm.link import Link, LinkClosed, dumps, loads, wait_readable
from paddle_group_sharded.comm.rendezvous import Address, Listener, accept_links, connect, dial_link
from paddle_group_sharded.errors import CommError


class Store:
    """The part of a TCP store that is used, in one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def set(self, name: str, value: str) -> None:
        self._values[name] = value

    def get(self, name: str) -> bytes:
        while name not in self._values:
            time.sleep(0.01)
        return self._values[name].encode()

    def add(self, name: str, number: int) -> int:
        time.sleep(0.01)
        self._counts[name] = self._counts.get(name, 0) + number
        return self._counts[name]


def pair() -> tuple[Link, Link]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    return Link(left), Link(right)


def test_messages_and_payloads_keep_their_bounds() -> None:
    left, right = pair()
    large = bytes(range(256)) * 20000
    thread = threading.Thread(target=lambda: [left.send(b""), left.send(b"head", memoryview(large)), left.send(b"end")])
    thread.start()
    assert right.recv() == b""
    assert right.recv() == b"head"
    payload = bytearray(len(large))
    right.recv_into(memoryview(payload))
    assert payload == large
    assert right.recv() == b"end"
    thread.join()
    assert not right.poll(0)


def test_values_survive() -> None:
    assert loads(dumps({"a": [1, (2, None)], "b": b"x"})) == {"a": [1, (2, None)], "b": b"x"}


def test_a_closed_link_is_readable_and_says_so_on_both_sides() -> None:
    left, right = pair()
    left.send(b"last words")
    left.close()
    assert wait_readable([right], 1) == [right]
    assert right.recv() == b"last words"
    with pytest.raises(LinkClosed):
        right.recv()
    with pytest.raises(LinkClosed):
        left.send(b"x")
    left.close()


def test_what_was_said_before_the_end_can_be_read_after_a_failed_send() -> None:
    left, right = pair()
    left.send(b"reason")
    left.close()
    with pytest.raises(LinkClosed):
        for _ in range(100):
            right.send(b"x" * 100000)
    assert right.recv() == b"reason"


def test_shutdown_wakes_a_thread_that_waits() -> None:
    _, right = pair()
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(LinkClosed):
            right.recv()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.05)
    right.shutdown()
    assert ended.wait(5)


def test_links_are_found_by_name() -> None:
    store = Store()
    dialled: dict[int, Link] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: dialled.update({rank: dial_link(store, "name", rank, 0, 10)}))
        for rank in (1, 2)
    ]
    for thread in threads:
        thread.start()
    links = accept_links(store, "name", [1, 2], 10)
    for thread in threads:
        thread.join()
    for rank in (1, 2):
        dialled[rank].send(b"I am %d" % rank)
        assert links[rank].recv() == b"I am %d" % rank


def test_a_rank_that_does_not_dial_is_named() -> None:
    with pytest.raises(CommError, match=r"within 0 s, but rank 3, 5 did not come"):
        accept_links(Store(), "name", [3, 5], 0.1)


def test_a_rank_that_does_not_listen_is_named() -> None:
    with pytest.raises(CommError, match=r"but rank 4 did not come"):
        dial_link(Store(), "name", 1, 4, 0.1)


def test_a_rank_that_has_given_up_is_explained() -> None:
    with Listener() as listener:
        address = listener.address
    with pytest.raises(CommError, match=r"expected a rank of the group to listen at 127\.0\.0\.1:\d+"):
        connect(address, 1)


def test_strangers_are_turned_away_and_do_not_disturb() -> None:
    with Listener() as listener:
        host, port, key = listener.address
        silent = socket.create_connection((host, port))
        silent.close()
        wrong_key = connect(Address(host, port, bytes(32).hex()), 7)
        wrong_number = connect(listener.address, 8)
        right = connect(listener.address, 7)
        again = connect(listener.address, 7)
        links = listener.accept([7], 5)
        assert list(links) == [7]
        right.send(b"hello")
        assert links[7].recv() == b"hello"
    for stranger in (wrong_key, wrong_number, again):
        with pytest.raises(LinkClosed):
            stranger.recv()

"""Port numbers on loopback that no other test process on this machine will pick at the same time."""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ["PortLease"]

# Below the range that Linux and macOS hand out to outgoing connections, so no connection takes one in the meantime.
_FIRST, _LAST = 20000, 32000


class PortLease:
    """``count`` TCP ports of 127.0.0.1, free when taken, and not given to a second lease until ``release()``.

    The TCP port must stay free for the trainer that will listen on it, so what the lease holds is the *UDP* port of
    the same number: the operating system gives it to one process only and takes it back when that process ends.
    """

    def __init__(self, count: int) -> None:
        self.ports: list[int] = []
        self._held = contextlib.ExitStack()
        choice = random.SystemRandom()  # not the seeded generator: parallel sessions would all pick the same
        for _ in range(1000):
            if len(self.ports) == count:
                return
            port = choice.randrange(_FIRST, _LAST)
            if self._take(port):
                self.ports.append(port)
        self.release()
        raise OSError(f"found no {count} free ports between {_FIRST} and {_LAST} on 127.0.0.1")

    def release(self) -> None:
        """Give the numbers back.  May be called twice."""
        self._held.close()

    def _take(self, port: int) -> bool:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            udp.bind(("127.0.0.1", port))
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tcp:
                tcp.bind(("127.0.0.1", port))
        except OSError:
            udp.close()
            return False
        self._held.callback(udp.close)
        return True

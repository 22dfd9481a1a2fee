"""The gate: before an operation starts, every rank says what it is about to do, and the hub says what happens.

A star of sockets around group rank 0, the *hub*.  Each rank's worker thread sends a :class:`Request` and blocks for the
:class:`Verdict`; the hub's own worker collects one request per rank and decides, so no further thread exists and
nothing moves until all ranks are there.  Hence the data collective that follows never waits long, and gloo's fixed
limit of 30 s, after which a group is dead on every rank, is out of play: a rank may be late by minutes.

    rank 0 (hub)                rank 1                     rank 2
      |  <---- request ---------  |                          |
      |  <---- request -----------------------------------   |
    decide
      |  ----- verdict -------->  |  ----------------------> |        then all run the same operation

The requests and verdicts of one rank alternate strictly.  Besides them the hub sends a notice while it waits for
others, and a failure may be sent at any time: it is what the receiver reads at its next call, late as it may be.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Optional

from ..errors import CommError
from .link import Link, LinkClosed, dumps, loads, wait_readable
from .verdict import Kind, Request, Verdict, decide, explain

__all__ = ["Gate"]

_logger = logging.getLogger(__name__)

_WARN_AFTER = 30.0  # seconds until a missing rank is worth a line in the log
_NOTICE_AFTER = 1.0  # seconds until the hub tells those present that it is there
_CAUSE_WITHIN = 0.5  # seconds in which the end of a rank shows on its socket, after its data did not come
_GRACE = 5.0  # seconds that the other ranks give the hub to report before they call it missing

# The first byte of a message tells what it is.
_REQUEST = b"R"  # a request and an offer
_GO = b"G"  # run what you asked for
_VERDICT = b"V"
_NOTICE = b"N"  # a line for the log, or nothing
_FAILURE = b"F"  # the reason; the last message
_CLOSED = b"C"  # the last message


class Gate:
    """One rank's end of the control plane; used by its worker thread alone, apart from :meth:`shutdown`."""

    def __init__(self, rank: int, ranks: Sequence[int], links: Mapping[int, Link], timeout: float) -> None:
        """``links``: on the hub one per other group rank, elsewhere ``{0: link to the hub}``; owned from here on."""
        self._rank = rank
        self._ranks = tuple(ranks)  # global, for the messages
        self._links = dict(links)
        self._timeout = timeout
        self._failure: Optional[str] = None
        self.served: dict[str, int] = {}  # see decide(); equal on every rank at the same operation

    def ask(self, request: Request, offer: Optional[bytes] = None) -> Verdict:
        """Announce ``request`` and block for the verdict; ``offer`` goes to every rank if all run the same.

        Raises :class:`CommError` when the ranks do not go together, one has ended, or one has not come in time; every
        later call then raises the same.
        """
        self.check()
        message = _REQUEST + dumps((request, offer))
        return self._ask_others(request, offer, message) if self._rank == 0 else self._ask_hub(request, message)

    def exchange(self, label: str, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order."""
        return [
            loads(offer) for offer in self.ask(Request("exchange", label), dumps(value)).offers if offer is not None
        ]

    def check(self) -> None:
        """Raise if the communicator has failed."""
        if self._failure is not None:
            raise CommError(self._failure)

    @property
    def failed(self) -> bool:
        """Whether the communicator has failed."""
        return self._failure is not None

    def fail(self, reason: str, request: Request) -> str:
        """This rank cannot go on: ``request`` failed with ``reason``.  All calls of all ranks raise from here on.

        Returns the first cause that is known: where another rank has ended or failed, this one's reason is only that
        its data did not come.
        """
        if self._failure is None:
            self._fail(self._first_cause(request) or reason)
        return self._failure or reason

    def shutdown(self) -> None:
        """Wake the worker out of a wait, from another thread."""
        for link in self._links.values():
            link.shutdown()

    def close(self, announce: bool) -> None:
        """Leave: the next call of the others raises that this rank has ended or, with ``announce``, has closed."""
        if announce and self._failure is None:
            self._send(self._links, _CLOSED)
        for link in self._links.values():
            link.close()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._send(self._links, _FAILURE + reason.encode())

    def _first_cause(self, request: Request) -> Optional[str]:
        """What the other ranks have said, or not said, by now."""
        ready = wait_readable(list(self._links.values()), _CAUSE_WITHIN)
        for rank, link in self._links.items():
            if link in ready:
                _, reason = self._read(rank, request)
                if reason is not None:
                    return reason
        return None

    def _read(self, rank: int, request: Request) -> tuple[bytes, Optional[str]]:
        """The next message of ``rank``, and the reason to give up ``request`` if it was its last."""
        try:
            message = self._links[rank].recv()
        except LinkClosed:
            return b"", (
                f"{self._names([rank])} has ended (its process exited, crashed or was killed, or dropped the model) "
                f"while the others wait for it at {request}; see the log of {self._names([rank])} for the reason"
            )
        if message == _CLOSED:
            return message, (
                f"{self._names([rank])} has closed its communicator while the others wait for it at {request}: its "
                "program has ended, or dropped the model; look for a call that only some ranks reach (under `if rank "
                "== 0:`, after an early return or an exception)"
            )
        return message, message[1:].decode() if message[:1] == _FAILURE else None

    def _send(self, to: Iterable[int], message: bytes) -> None:
        for rank in to:
            with contextlib.suppress(LinkClosed):  # what it said last is still to be read
                self._links[rank].send(message)

    def _names(self, group_ranks: Iterable[int]) -> str:
        """``"rank 3"`` or ``"ranks 3, 5"``: global numbers, as users know them."""
        numbers = [str(self._ranks[rank]) for rank in sorted(group_ranks)]
        return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(numbers)

    def _overdue(self, missing: Iterable[int], request: Request) -> str:
        return (
            f"expected every rank at {request}, but {self._names(missing)} did not come within {self._timeout:.0f} s. "
            f"If it is only slow (loading, saving, evaluating), pass a larger timeout; otherwise look where it is "
            f"stuck, or which path it took instead"
        )

    # -- the hub ----------------------------------------------------------------------------------------------------

    def _ask_others(self, request: Request, offer: Optional[bytes], message: bytes) -> Verdict:
        messages = self._collect(request, message)
        if offer is None and all(other == message for other in messages):
            self._send(self._links, _GO)  # the common case costs no unpickling
            return Verdict(Kind.GO, request)
        requests, offers = zip(*(loads(other[1:]) for other in messages))
        verdict = decide(requests, self.served)
        if verdict is None:
            self._end(explain(requests, self._ranks))
        if verdict.kind is Kind.GO and any(each is not None for each in offers):
            verdict = verdict._replace(offers=offers)
        self._send(self._links, _VERDICT + dumps(verdict))
        return verdict

    def _collect(self, request: Request, message: bytes) -> list[bytes]:
        """One message per rank, in rank order."""
        messages = {0: message}
        started = time.monotonic()
        told = {0}  # the ranks that know that the hub is there
        warned = False
        while len(messages) < len(self._ranks):
            waited = time.monotonic() - started
            missing = set(self._links) - set(messages)
            if waited >= self._timeout:
                self._end(self._overdue(missing, request))
            if waited >= _WARN_AFTER and not warned:
                warned = True
                text = f"waiting for {self._names(missing)} at {request} since {_WARN_AFTER:.0f} s"
                _logger.warning(text)
                self._send(set(messages) - {0}, _NOTICE + text.encode())
            if waited >= _NOTICE_AFTER:
                self._send(set(messages) - told, _NOTICE)
                told |= set(messages)
            alarm = min(alarm for alarm in (_NOTICE_AFTER, _WARN_AFTER, self._timeout, waited + 60) if alarm > waited)
            self._receive(request, messages, alarm - waited)
        self._receive(request, messages, 0.0)  # one that asked may have given up, or ended, since
        return [messages[rank] for rank in range(len(self._ranks))]

    def _receive(self, request: Request, messages: dict[int, bytes], seconds: float) -> None:
        """Add what arrives within ``seconds``; a rank that waits already can only say that it has ended."""
        ready = wait_readable(list(self._links.values()), seconds)
        for rank, link in self._links.items():
            if link in ready:
                messages[rank], reason = self._read(rank, request)
                if reason is not None:
                    self._end(reason)

    def _end(self, reason: str) -> NoReturn:
        self._fail(reason)
        raise CommError(reason)

    # -- the other ranks --------------------------------------------------------------------------------------------

    def _ask_hub(self, request: Request, message: bytes) -> Verdict:
        link = self._links[0]
        self._send([0], message)
        patience: Optional[float] = self._timeout + _GRACE  # None: the hub is there and keeps the time
        while True:
            if not link.poll(patience):
                self._end(self._overdue([0], request))
            answer, reason = self._read(0, request)
            if reason is not None:
                self._end(reason)
            if answer == _GO:
                return Verdict(Kind.GO, request)
            if answer[:1] == _VERDICT:
                verdict: Verdict = loads(answer[1:])
                return verdict
            patience = None
            if len(answer) > 1:
                _logger.warning(answer[1:].decode())

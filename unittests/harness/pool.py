"""Pools of trainers: start them together, feed them cases, end them together."""

from __future__ import annotations

import atexit
import pickle
import shutil
import tempfile
import time
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from unittests.harness.ports import PortLease
from unittests.harness.rank import RankProcess
from unittests.harness.report import Ended, Hung, Outcome, Raised, RankFailure, Returned, exit_text, failure_text
from unittests.harness.trainer import PORT_TAKEN

__all__ = ["GRACE_SECONDS", "RankPool", "Ranks", "run_fresh"]

GRACE_SECONDS = 3.0  # for the other ranks, after one has failed: time to raise errors of their own
START_SECONDS = 180.0  # importing Paddle takes seconds; many trainers may start on two cores at once
_POLL_SECONDS = 0.1


class RankPool:
    """``world_size`` trainers that run one case after another; started by the first one, and anew after a failure."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[RankProcess] = []
        self._lease: PortLease | None = None
        self._directory: Path | None = None
        self._last_case = "the start"

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while no trainers run."""
        return [rank.pid for rank in self._ranks]

    def run(
        self,
        module: str,
        function: str,
        /,
        *args: Any,
        timeout: float = 60.0,
        expect_exit: dict[int, int] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``module.function(*args, **kwargs)`` on every rank and return what each returned, by rank.

        Raises ``RankFailure`` unless every rank returns within ``timeout`` seconds; ranks in ``expect_exit`` must
        instead end with the exit code given there, and None stands for their result.
        """
        __tracebackhide__ = True  # in pytest's report, the failing line is the caller's
        expect_exit = expect_exit or {}
        case = f"{module}.{function}"
        pickled = pickle.dumps((module, function, args, kwargs))  # an argument that cannot be sent fails here
        try:
            self._start_unless_running()
            for rank in self._ranks:
                rank.begin(pickled)
            outcomes = self._wait(set(expect_exit), timeout)
            self._last_case = case
            failed = any(not _as_expected(outcome, expect_exit.get(rank)) for rank, outcome in outcomes.items())
            text = failure_text(case, outcomes, expect_exit, self._outputs()) if failed else ""
        except BaseException:  # also an interrupt: whatever the trainers are doing, nobody waits for it any more
            self.close()
            raise
        if failed or expect_exit:
            self.close()
        if failed:
            raise RankFailure(text)
        return [outcomes[rank].value if rank not in expect_exit else None for rank in range(self.world_size)]

    def close(self) -> None:
        """End the trainers and remove their files.  A next ``run`` starts new ones."""
        while self._ranks:
            self._ranks.pop().kill()
        if self._lease is not None:
            self._lease.release()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._lease = self._directory = None
        atexit.unregister(self.close)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start_unless_running(self) -> None:
        ended = [(rank.rank, code) for rank in self._ranks if (code := rank.exit_code()) is not None]
        if ended:
            text = ", ".join(f"rank {rank} {exit_text(code)}" for rank, code in ended)
            warnings.warn(f"between two cases, after {self._last_case}: {text}; starting new trainers", stacklevel=3)
            self.close()
        while not self._ranks:
            self._start()

    def _start(self) -> None:
        """Start all trainers and wait until they are ready; leaves none if somebody else took the port meanwhile."""
        atexit.register(self.close)
        self._lease = PortLease(self.world_size)
        self._directory = Path(tempfile.mkdtemp(prefix="pgs-ranks-"))
        for rank in range(self.world_size):
            self._ranks.append(RankProcess(rank, self._lease.ports, self._directory))
        outcomes = self._wait(set(), START_SECONDS)
        if outcomes[0] == Ended(PORT_TAKEN):
            self.close()
        elif not all(isinstance(outcome, Returned) for outcome in outcomes.values()):
            raise RankFailure(failure_text("the start of the trainers", outcomes, {}, self._outputs()))

    def _wait(self, may_end: set[int], timeout: float) -> dict[int, Outcome]:
        """One outcome per rank.  An unexpected failure shortens the wait for the others to ``GRACE_SECONDS``."""
        start = time.monotonic()
        deadline = start + timeout
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.world_size and time.monotonic() < deadline:
            pending = [rank for rank in self._ranks if rank.rank not in outcomes]
            wait([rank.pipe for rank in pending], timeout=min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
            for rank in pending:
                outcome = _poll(rank)
                if outcome is None:
                    continue
                outcomes[rank.rank] = outcome
                if not isinstance(outcome, Returned) and rank.rank not in may_end:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for rank in self._ranks:
            if rank.rank not in outcomes:
                outcomes[rank.rank] = Hung(time.monotonic() - start, rank.stacks())
        return outcomes

    def _outputs(self) -> dict[int, str]:
        return {rank.rank: rank.output() for rank in self._ranks}


def _poll(rank: RankProcess) -> Outcome | None:
    """What a rank has answered or how it has ended, if either; never waits."""
    code = rank.exit_code()  # before the pipe: an answer that it sent before it ended must not be missed
    try:
        if rank.pipe.poll():
            kind, value = rank.pipe.recv()
            return Raised(value) if kind == "raised" else Returned(value)
    except (EOFError, ConnectionResetError):
        code = rank.await_exit()
    return None if code is None else Ended(code)


def _as_expected(outcome: Outcome, exit_code: int | None) -> bool:
    return isinstance(outcome, Returned) if exit_code is None else outcome == Ended(exit_code)


class Ranks:
    """One pool per world size, made when first asked for: ``ranks(2).run(...)``."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        """The pool of that many trainers."""
        return self._pools.setdefault(world_size, RankPool(world_size))

    def close(self) -> None:
        """End all trainers."""
        for pool in self._pools.values():
            pool.close()


def run_fresh(world_size: int, module: str, function: str, /, *args: Any, **kwargs: Any) -> list[Any]:
    """``RankPool.run`` on new trainers that end with this one case."""
    __tracebackhide__ = True
    with RankPool(world_size) as pool:
        return pool.run(module, function, *args, **kwargs)

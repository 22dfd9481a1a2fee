"""A save that is being written, now or by a thread while training goes on.

The thread issues no collective: those of training would get out of order.  Each rank leaves what it has written in a
small file, ``<save>-<rank>.done``, and the thread of rank 0 publishes when all of them are there.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Callable, Optional

from ..errors import CheckpointError
from .durable import create, remove
from .job import SaveJob, Written
from .manifest import FileInfo, Manifest, PieceEntry
from .team import Team

__all__ = ["IN_FLIGHT", "InFlight", "PendingSave"]

_LABEL = "save_checkpoint"
_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 1800.0  # for the other ranks' files


class PendingSave:
    """One save."""

    def __init__(
        self,
        team: Team,
        job: SaveJob,
        compose: Callable[[Sequence[Written]], Manifest],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """``compose`` makes the manifest from what every rank has written; rank 0 runs ``after`` once it is there."""
        self._team = team
        self._job = job
        self._compose = compose
        self._after = after
        self._thread: Optional[threading.Thread] = None
        self._error: Optional[Exception] = None
        self._has_written = threading.Event()  # this rank has, or has failed to
        self._abandoned = threading.Event()  # a rank has ended: nobody publishes

    def run(self) -> None:
        """Write and publish.  Collective."""
        team, job = self._team, self._job
        try:
            try:
                written = team.together(job.write, _LABEL)
            except BaseException:
                job.discard()
                raise
            reports = team.exchange(written, _LABEL)
            team.together(lambda: self._complete(reports) if team.rank == 0 else None, _LABEL)
        finally:
            job.close()

    def start(self) -> None:
        """Let a thread write.  It is no daemon: a process that ends waits for it, so nothing is cut off."""
        self._thread = threading.Thread(target=self._work, name=f"save {self._job.save}")
        self._thread.start()

    def wait(self) -> None:
        """Return when the save is complete; raise on every rank what has failed on one.  Collective."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._has_written.wait()
        try:
            # All ranks have left their reports, or one has ended; rank 0's thread would wait for that one's.
            self._team.exchange(None, _LABEL)
        except BaseException:
            self._abandoned.set()
            raise
        finally:
            thread.join()
        self._team.together(self._raise, _LABEL)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        try:
            try:
                self._leave({"written": self._job.write()})
            except Exception as error:
                self._job.discard()
                with suppress(OSError):
                    self._leave({"error": f"rank {self._job.rank}: {error}"})
                raise
            finally:
                self._has_written.set()
            if self._team.rank == 0:
                self._complete(self._reports())
        except Exception as error:
            self._error = error
        finally:
            self._job.close()

    def _complete(self, reports: Sequence[Written]) -> None:
        self._job.publish(self._compose(reports))
        self._after()

    def _leave(self, content: dict[str, Any]) -> None:
        with create(self._job.report_path(self._job.rank)) as file:
            file.write(json.dumps(content, default=vars).encode())

    def _reports(self) -> list[Written]:
        """What every rank has written, as soon as they all have."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        reports: list[Written] = []
        while len(reports) < self._team.world_size:
            path = self._job.report_path(len(reports))
            if path.exists():
                reports.append(_report(json.loads(path.read_bytes())))
            elif self._abandoned.is_set() or time.monotonic() > deadline:
                raise CheckpointError(f"{path}: rank {len(reports)} has not written its file")
            else:
                time.sleep(_POLL_SECONDS)
        for rank in range(self._team.world_size):
            remove(self._job.report_path(rank))
        return reports


def _report(content: dict[str, Any]) -> Written:
    if "error" in content:
        raise CheckpointError(content["error"])
    file, info, pieces = content["written"]
    return Written(
        file,
        None if info is None else FileInfo(**info),
        [(tuple(key), dtype, tuple(shape), PieceEntry(**piece)) for key, dtype, shape, piece in pieces],
    )


class InFlight:
    """The save of this process that a thread is writing; there is one at most."""

    def __init__(self) -> None:
        self._pending: Optional[PendingSave] = None

    def start(self, pending: PendingSave) -> None:
        """Let ``pending`` be written by a thread."""
        self._pending = pending
        pending.start()

    def settle(self) -> None:
        """Wait for the save under way and raise what went wrong.  Collective, but where there is none."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


IN_FLIGHT = InFlight()  # of the process: its memory holds one copy at most, whichever model it is of

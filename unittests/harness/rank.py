"""The parent's handle of one trainer process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

from unittests.harness.environment import trainer_environment
from unittests.harness.template import TrainerJob, template

__all__ = ["RankProcess"]

_STACKS_SECONDS = 2.0  # how long a signalled rank may take to write its stacks


class RankProcess:
    """One trainer: its process, the pipe to it, its output file and its stacks file (both in ``directory``)."""

    def __init__(self, rank: int, ports: list[int], directory: Path) -> None:
        self.rank = rank
        self._output = directory / f"rank{rank}.out"
        self._stacks = directory / f"rank{rank}.stacks"
        self._output_start = 0
        self._template = template()
        job = TrainerJob(
            environment=trainer_environment(rank, ports),
            directory=str(directory),  # a case that writes to a relative path does not litter the sources
            output=str(self._output),
            stacks=str(self._stacks),
        )
        self.pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self.pid = self._template.fork(job, theirs)

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._template.exit_code(self.pid)

    def await_exit(self) -> int | None:
        """Its exit code, once it has closed the pipe; None if it lives on without one."""
        deadline = time.monotonic() + _STACKS_SECONDS
        while (code := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return code

    def begin(self, case: bytes) -> None:
        """Send a pickled ``(module, function, args, kwargs)``; what is written from here on is that case's output."""
        self._output_start = self._output.stat().st_size
        try:
            self.pipe.send_bytes(case)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has just ended: the wait for its answer will say so

    def output(self) -> str:
        """What it has written since the last ``begin``."""
        if not self._output.exists():
            return ""
        with open(self._output, "rb") as file:
            file.seek(self._output_start)
            return file.read().decode(errors="replace")

    def stacks(self) -> str:
        """Python stacks of all its threads, now.  Works while it waits inside a collective."""
        before = self._stacks.stat().st_size if self._stacks.exists() else 0
        os.kill(self.pid, signal.SIGUSR1)
        size, deadline = before, time.monotonic() + _STACKS_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.05)
            previous, size = size, self._stacks.stat().st_size if self._stacks.exists() else 0
            if size == previous > before:  # it has stopped growing
                break
        return self._stacks.read_bytes()[before:].decode(errors="replace") if size > before else "(none written)"

    def kill(self) -> None:
        """End it and everything that it has started; waits until it is gone.  Once."""
        self.pipe.close()
        self._template.end(self.pid)

"""The parent's handle of one trainer process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["RankProcess", "trainer_environment"]

_REPOSITORY = Path(__file__).resolve().parents[2]
_STACKS_SECONDS = 2.0  # how long a signalled rank may take to write its stacks


def trainer_environment(rank: int, ports: list[int]) -> dict[str, str]:
    """The environment of a trainer: what ``fleetrun`` sets for it on one machine, with one thread, on CPU and gloo."""
    world_size = len(ports)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "FLAGS_selected_"))}
    env.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONUNBUFFERED="1")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_REPOSITORY), env.get("PYTHONPATH", "")]))
    if world_size == 1:
        return env
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    env.update(
        PADDLE_MASTER=endpoints[0],
        PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
        PADDLE_CURRENT_ENDPOINT=endpoints[rank],
        PADDLE_TRAINER_ID=str(rank),
        PADDLE_TRAINERS_NUM=str(world_size),
        PADDLE_GLOBAL_RANK=str(rank),
        PADDLE_GLOBAL_SIZE=str(world_size),
        PADDLE_LOCAL_RANK=str(rank),
        PADDLE_LOCAL_SIZE=str(world_size),
        PADDLE_RANK_IN_NODE=str(rank),
        PADDLE_NNODES="1",
        PADDLE_DISTRI_BACKEND="gloo",
    )
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


class RankProcess:
    """One trainer: its process, the pipe to it, its output file and its stacks file (both in ``directory``)."""

    def __init__(self, rank: int, ports: list[int], directory: Path) -> None:
        self.rank = rank
        self._output = directory / f"rank{rank}.out"
        self._stacks = directory / f"rank{rank}.stacks"
        self._output_start = 0
        self.pipe, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", "unittests.harness.trainer"]
        with theirs, open(self._output, "wb") as output:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), str(self._stacks)],
                env=trainer_environment(rank, ports),
                cwd=directory,  # a case that writes to a relative path does not litter the sources
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # its own process group: what a case starts is ended with it
            )

    @property
    def pid(self) -> int:
        """Process id, which is also its process group's."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.poll()

    def await_exit(self) -> int:
        """Its exit code, once it has closed the pipe; a process that lives on without one is ended."""
        try:
            return self._process.wait(timeout=_STACKS_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.returncode

    def begin(self, case: bytes) -> None:
        """Send a pickled ``(module, function, args, kwargs)``; what is written from here on is that case's output."""
        self._output_start = self._output.stat().st_size
        try:
            self.pipe.send_bytes(case)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has just ended: the wait for its answer will say so

    def output(self) -> str:
        """What it has written since the last ``begin``."""
        with open(self._output, "rb") as file:
            file.seek(self._output_start)
            return file.read().decode(errors="replace")

    def stacks(self) -> str:
        """Python stacks of all its threads, now.  Works while it waits inside a collective."""
        before = self._stacks.stat().st_size if self._stacks.exists() else 0
        try:
            os.kill(self.pid, signal.SIGUSR1)
        except ProcessLookupError:
            return "(it has just ended)"
        size, deadline = before, time.monotonic() + _STACKS_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.05)
            previous, size = size, self._stacks.stat().st_size if self._stacks.exists() else 0
            if size == previous > before:  # it has stopped growing
                break
        return self._stacks.read_bytes()[before:].decode(errors="replace") if size else "(none written)"

    def kill(self) -> None:
        """End it and everything that it has started.  Waits until it is gone; may be called twice."""
        self.pipe.close()
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # all of the group has ended (macOS says "not permitted" for one that awaits its wait())
        self._process.wait()

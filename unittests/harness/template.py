"""A process that has imported Paddle and turns into trainers by forking: a start takes 0.1 s instead of seconds.

Right after its import Paddle runs no thread that could hold a lock and has made no process group and no tensor, so a
fork of that state is as good as a new process.  The template forks, watches and ends trainers on request, one request
at a time.  It keeps a dead trainer as a zombie until ``end``: no other process gets its id meanwhile.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from unittests.harness.environment import REPOSITORY, trainer_environment
from unittests.harness.report import RankFailure
from unittests.harness.trainer import die_with_parent, serve

__all__ = ["Template", "TrainerJob", "template"]


@dataclasses.dataclass(frozen=True)
class TrainerJob:
    """What makes a fork of the template a certain rank's trainer."""

    environment: dict[str, str]
    directory: str  # working directory
    output: str  # file for stdout and stderr
    stacks: str  # file for the stacks that SIGUSR1 asks for


class Template:
    """The parent's handle; the process starts with the object."""

    def __init__(self, environment: dict[str, str], directory: str) -> None:
        self._trainers: set[int] = set()
        self._control, theirs = multiprocessing.Pipe()
        self._output = tempfile.NamedTemporaryFile(prefix="pgs-template-", suffix=".out")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "unittests.harness.template", str(theirs.fileno()), str(os.getpid())],
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt at the terminal is for the parent alone
            )
        atexit.register(self.close)

    def alive(self) -> bool:
        """Whether it can still serve."""
        return self._process.poll() is None

    def fork(self, job: TrainerJob, pipe: Connection) -> int:
        """Start a trainer that serves ``pipe``, in a process group of its own; its process id."""
        try:
            pid = int(self._ask("fork", job, pipe))
        except (EOFError, OSError) as error:
            with open(self._output.name, errors="replace") as output:
                raise RankFailure(f"the template of the trainers has ended; it wrote\n{output.read()}") from error
        self._trainers.add(pid)
        return pid

    def exit_code(self, pid: int) -> int | None:
        """None while the trainer runs; negative for a signal."""
        try:
            return self._ask("poll", pid)
        except (EOFError, OSError):
            return -signal.SIGKILL  # trainers do not outlive the template

    def end(self, pid: int) -> None:
        """Kill a trainer, if it still runs, and all that it has started.  Once per trainer."""
        try:
            self._ask("end", pid)
        except (EOFError, OSError):
            _kill_group(pid)
        self._trainers.discard(pid)

    def close(self) -> None:
        """End all trainers that are left, with what they have started, and the process itself.  May be called twice."""
        while self._trainers:
            _kill_group(self._trainers.pop())
        self._process.kill()
        self._process.wait()
        self._control.close()
        self._output.close()
        atexit.unregister(self.close)

    def _ask(self, request: str, argument: Any, pipe: Connection | None = None) -> Any:
        try:
            self._control.send((request, argument))
            if pipe is not None:
                send_handle(self._control, pipe.fileno(), self._process.pid)
            return self._control.recv()
        except (EOFError, OSError):
            raise
        except BaseException:  # an interrupt or pytest-timeout: the next answer would be that of this request
            self.close()
            raise


@functools.lru_cache(maxsize=1)
def _newest_template() -> Template:
    return Template(trainer_environment(0, [0]), str(REPOSITORY))


def template() -> Template:
    """The one template of this process, made when first asked for, and again if it has ended."""
    if not _newest_template().alive():
        _newest_template.cache_clear()
    return _newest_template()


# -- the process itself --------------------------------------------------------------------------------------------


def main() -> None:
    """Import Paddle, then answer requests until the parent has gone."""
    control, parent_pid = Connection(int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(parent_pid)
    import paddle

    paddle.set_device("cpu")
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # see above
    gc.collect()
    gc.freeze()  # what the forks share is neither searched nor copied by their garbage collectors
    while True:
        try:
            request, argument = control.recv()
        except EOFError:
            return
        if request == "fork":
            control.send(_fork(argument, control))
        elif request == "poll":
            control.send(_exit_code(argument))
        else:
            _kill_group(argument)
            os.waitpid(argument, 0)
            control.send(None)


def _fork(job: TrainerJob, control: Connection) -> int:
    pipe_fd = recv_handle(control)
    template_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        control.close()
        os.setpgid(0, 0)
        die_with_parent(template_pid)
        _become(job)
        serve(Connection(pipe_fd), job.stacks)  # does not return
    os.close(pipe_fd)
    try:
        os.setpgid(pid, pid)  # here as well: whoever comes first, the group exists when the parent hears of the trainer
    except OSError:
        pass  # it came first, and may even have ended
    return pid


def _become(job: TrainerJob) -> None:
    output = os.open(job.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(job.directory)
    os.environ.clear()
    os.environ.update(job.environment)


def _exit_code(pid: int) -> int | None:
    state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # nothing of it runs any more (macOS says "not permitted" for zombies)


if __name__ == "__main__":
    main()

"""What the process of one rank does: join the others as ``fleetrun`` would have it do, then serve cases."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from unittests.harness.case import CleanSlate, to_host

__all__ = ["PORT_TAKEN", "die_with_parent", "serve"]

PORT_TAKEN = 75  # exit code of rank 0 if somebody else listens on the port that it was given
_PR_SET_PDEATHSIG = 1


def serve(pipe: Connection, stacks_path: str) -> NoReturn:
    """Say "ready" on ``pipe``, then answer each case with its value or its traceback until the pipe is closed."""
    stacks = open(stacks_path, "w")  # stays open for the life of the process: the signal handler writes into it
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable()  # replaces the handlers of Paddle, which show C++ frames only
    try:
        _join()
        slate = CleanSlate()
        pipe.send(("returned", None))
        while True:
            pipe.send(_run(slate, *pipe.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        _end(0)
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
        _end(1)


def _run(
    slate: CleanSlate, module: str, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, Any]:
    """``("returned", value)`` or ``("raised", traceback)``; a value that cannot be pickled counts as raised."""
    try:
        with slate.case():
            value = to_host(getattr(importlib.import_module(module), function)(*args, **kwargs))
            pickle.dumps(value)
        return "returned", value
    except BaseException:  # SystemExit and KeyboardInterrupt of a case are its failure, not the end of the trainer
        return "raised", traceback.format_exc()


def _join() -> None:
    """Make the default group; with one rank there is none, as without launch."""
    import paddle

    if "PADDLE_TRAINER_ID" not in os.environ:
        return
    host, port = os.environ["PADDLE_MASTER"].split(":")
    if os.environ["PADDLE_TRAINER_ID"] == "0":
        _check_port(host, int(port))
    else:
        _wait_for_port(host, int(port))
    paddle.distributed.init_parallel_env()


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            _end(PORT_TAKEN)


def _wait_for_port(host: str, port: int) -> None:
    """Wait until rank 0 has opened the store: Paddle would sleep 3 s if its first attempt to connect came too early."""
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.01)  # without a limit: the parent has one for the whole start


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends in any way.  Elsewhere the closed pipe ends it later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it has ended before the call above
        _end(1)


def _end(code: int) -> NoReturn:
    """End at once: destructors of process groups may wait for peers that have ended already."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

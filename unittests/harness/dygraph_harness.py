"""What the trainers do in ``test_harness.py``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from unittests.harness import fresh


def identity(offset: int) -> dict[str, Any]:
    """Who this rank is, to the variables of launch and to Paddle."""
    names = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_CURRENT_ENDPOINT", "OMP_NUM_THREADS")
    return {"value": dist.get_rank() + offset, "size": dist.get_world_size(), "pid": os.getpid()} | {
        name: os.environ.get(name) for name in names
    }


def summed(shape: tuple[int, ...]) -> np.ndarray:
    """An all-reduce, to see that the default group works."""
    tensor = paddle.full(shape, float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return tensor.numpy()


def tensors() -> dict[str, Any]:
    """Tensors in containers, to see how they arrive."""
    return {"half": [paddle.ones([2], "bfloat16") / 2], "pair": (paddle.arange(3), None)}


def new_model() -> tuple[list[str], float]:
    """Names and a random value of a new layer."""
    layer = paddle.nn.Linear(2, 2)
    return [p.name for p in layer.parameters()], float(layer.weight.sum().item())


def two_models() -> list[tuple[list[str], float]]:
    """Two models of one case, the second after ``fresh()``."""
    first = new_model()
    fresh()
    return [first, new_model()]


def change_settings() -> None:
    """Leave every setting changed that a case may change."""
    paddle.seed(7)
    paddle.set_default_dtype("float64")
    paddle.set_flags({"FLAGS_check_nan_inf": True})
    paddle.set_grad_enabled(False)
    paddle.nn.Linear(2, 2)
    paddle.enable_static()
    os.environ["CHANGED"] = "1"
    os.chdir("/")


def settings() -> dict[str, Any]:
    """The settings that ``change_settings`` changes."""
    return {
        "dtype": paddle.get_default_dtype(),
        "flag": paddle.get_flags(["FLAGS_check_nan_inf"])["FLAGS_check_nan_inf"],
        "grad": paddle.is_grad_enabled(),
        "dynamic": paddle.in_dynamic_mode(),
        "environment": os.environ.get("CHANGED"),
        "root": os.getcwd() == "/",
    }


def raise_on(rank: int, wait_on_others: bool = False) -> int:
    """One rank raises; the others return, or wait in a collective that the first never joins."""
    print(f"about to fail or not, I am rank {dist.get_rank()}")
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} does not like this")
    if wait_on_others:
        dist.barrier()
    return dist.get_rank()


def unpicklable() -> Any:
    """A value that cannot go back."""
    return lambda: None


def exit_python() -> None:
    """Must not end the trainer."""
    sys.exit(3)


def sleep_in_a_named_function(seconds: float) -> None:
    """Sleeps, to be found in the stacks."""
    time.sleep(seconds)


def hang(rank: int) -> int:
    """One rank sleeps, the others wait for it in a collective."""
    if dist.get_rank() == rank:
        sleep_in_a_named_function(600)
    return float(summed((1,))[0])


def die(rank: int, by_signal: int = signal.SIGKILL) -> int:
    """One rank ends by a signal; the others return."""
    if dist.get_rank() == rank:
        print("these are my last words", flush=True)
        os.kill(os.getpid(), by_signal)
    return dist.get_rank()


def exit_with(rank: int, code: int) -> int:
    """One rank ends with an exit code; the others return."""
    if dist.get_rank() == rank:
        os._exit(code)
    return dist.get_rank()


def start_a_child() -> int:
    """A process that a case starts and forgets; its id."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def warn() -> list[str]:
    """What becomes of warnings of the package and of others: the names of those that are raised."""
    raised = []
    for module in ("paddle_group_sharded.api", "paddle.nn"):
        try:
            warnings.warn_explicit("something is odd", UserWarning, "file.py", 1, module=module)
        except UserWarning:
            raised.append(module)
    return raised


def die_later(seconds: float) -> int:
    """Return, then end when no case runs."""
    import threading

    threading.Timer(seconds, os._exit, [9]).start()
    return os.getpid()

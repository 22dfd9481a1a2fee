"""Inside a trainer that will be killed: restore, look at what was restored, then save and save."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_group_sharded import CheckpointManager, CommError, group_sharded_parallel

WIDTH = 96
KEEP = 2
DONE = "done"  # file of rank 0: the newest step whose save has returned


def fill(model: Any, step: int) -> None:
    """Weights that tell their step."""
    for index, param in enumerate(model.parameters()):
        param.set_value(np.full(param.shape, step + index / 16, "float32"))


def wrong_weights(model: Any, step: int) -> list[int]:
    return [
        index
        for index, value in enumerate(model.state_dict().values())
        if not (value.numpy() == np.float32(step + index / 16)).all()
    ]


def make() -> tuple[Any, Any]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = paddle.optimizer.AdamW(0.0, parameters=model.parameters())
    if dist.get_world_size() > 1:
        model, optimizer, _ = group_sharded_parallel(model, optimizer, "p_g_os")
    return model, optimizer


def restored(folder: str) -> tuple[int, str]:
    """The step that a new job finds, and what is wrong with it."""
    model, optimizer = make()
    manager = CheckpointManager(folder, KEEP)
    found = manager.restore(model, optimizer)
    step = 0 if found is None else found.step
    done = Path(folder, DONE)
    promised = int(done.read_text()) if done.exists() and done.read_text() else 0
    if step < promised:
        return step, f"step {promised} was complete, the newest is {step}"
    if found is not None and (found.extra != {"step": step} or wrong_weights(model, step)):
        return step, f"step {step} has the values of another one"
    if len(manager.steps()) > KEEP + 1:
        return step, f"{manager.steps()} were kept"
    return step, ""


def save_until_killed(folder: str, limit: int, doomed: Sequence[int] = ()) -> int:
    """Go on with what is there, in the foreground and in the background in turn; the step that was reached.

    A rank whose peer is killed learns of it at the next collective; if it is ``doomed`` too, its turn comes.
    """
    model, optimizer = make()
    manager = CheckpointManager(folder, KEEP)
    found = manager.restore(model, optimizer)
    first = 1 if found is None else found.step + 1
    Path(f"{folder}.{os.getpid()}").touch()  # from here on this rank may be killed
    try:
        for step in range(first, first + limit):
            fill(model, step)
            manager.save(step, model, optimizer, extra={"step": step}, async_save=step % 3 == 0)
            if dist.get_rank() == 0 and step % 3:
                done = Path(folder, DONE)
                done.with_suffix(".new").write_text(str(step))
                os.replace(done.with_suffix(".new"), done)
        manager.close()
    except CommError:
        if dist.get_rank() in doomed:
            time.sleep(60)
        return -1
    return first + limit - 1


def die_at(folder: str, call: int, victim: int) -> int:
    """Three saves, the last in the background.

    Rank ``victim`` kills itself at its ``call``-th request to change a file or a folder.
    """
    if dist.get_rank() == victim:
        count = iter(range(call))

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def count_and_call(*args: Any, **kwargs: Any) -> Any:
                if next(count, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return count_and_call

        for name in ("replace", "fsync", "remove", "rmdir", "unlink", "ftruncate", "mkdir"):
            setattr(os, name, counted(getattr(os, name)))
    return save_until_killed(folder, 3)

"""Cases of test_volume.py: what training sends, operation by operation."""

from __future__ import annotations

import contextlib
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_group_sharded import group_sharded_parallel
from paddle_group_sharded.comm import RecordingComm

WIDTH = 320  # a block of WIDTH * (WIDTH + 1) elements is a group of its own, and is divided by 2, 3 and 4 ranks


def blocks(count: int) -> nn.Layer:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def traffic(
    level: str, count: int, passes: int = 1, kept: bool = False, skip: int = -1, **arguments: Any
) -> list[list[tuple[str, str, int, float]]]:
    """The log (operation, label, elements, elements sent) of each of four steps of ``passes`` backward passes.

    ``kept``: all but the last inside no_sync(); ``skip``: odd ranks leave out the block of this number.
    """
    layer = blocks(count)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=layer.parameters())
    model, optimizer, _ = group_sharded_parallel(layer, optimizer, level, **arguments)
    comm = RecordingComm(model._engine.comm)
    steps = []
    for _ in range(4):
        for number in range(passes):
            local = kept and number < passes - 1
            with model.no_sync() if local else contextlib.nullcontext():
                hidden = paddle.ones([2, WIDTH])
                if skip < 0 or dist.get_rank() % 2 == 0:
                    hidden = model(hidden)
                else:
                    model._engine.before_forward()
                    for index, block in enumerate(layer):
                        hidden = hidden if index == skip else block(hidden)
                hidden.mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        steps.append([(entry.op, entry.label, entry.numel, entry.elements_sent) for entry in comm.log])
        comm.clear()
    return steps

"""Cases of test_memory.py: bytes by the allocator's statistics, threads, sockets and Python objects."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.utils import mix_precision_utils

from paddle_group_sharded import group_sharded_parallel
from paddle_group_sharded.paddle_compat import allocated_bytes, peak_bytes
from unittests.harness import fresh

Tensor = Any


class Block(nn.Layer):
    """A linear layer that computes in float32, whatever its weights are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([width, width])
        self.bias = self.create_parameter([width], is_bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return paddle.tanh(paddle.matmul(x, self.weight.astype("float32")) + self.bias.astype("float32"))


def build(count: int, width: int, dtype: str) -> nn.Layer:
    layer = nn.Sequential(*(Block(width) for _ in range(count)))
    if dtype != "float32":
        layer.to(dtype=dtype)
    return layer


def between_steps(
    level: str, dtype: str = "float32", main_grad: bool = False, count: int = 12, width: int = 256, **arguments: Any
) -> list[dict[str, int]]:
    """Bytes of everything that lives after backward, step and clear_grad of four steps."""
    base = allocated_bytes()
    layer: Any = build(count, width, dtype)
    optimizer: Any = paddle.optimizer.AdamW(0.01, parameters=layer.parameters())
    if main_grad:
        layer = mix_precision_utils.MixPrecisionLayer(layer, dtype=dtype)
        optimizer = mix_precision_utils.MixPrecisionOptimizer(optimizer)
    model, optimizer, _ = group_sharded_parallel(layer, optimizer, level, **arguments)
    steps = []
    for _ in range(4):
        model(paddle.ones([2, width])).mean().backward()
        row = {"backward": allocated_bytes() - base}
        optimizer.step()
        row["step"] = allocated_bytes() - base
        optimizer.clear_grad()
        row["clear"] = allocated_bytes() - base
        steps.append(row)
    return steps


def peaks(level: str, widths: list[int], steps: int, **arguments: Any) -> dict[str, int]:
    """In a new process: how far wrapping and training rise above what lived before.

    The statistics cannot be set back, so a peak that came before may hide a later one: ``hidden`` bytes at most.
    """
    layer = nn.Sequential(*(nn.Linear(width, width) for width in widths))
    optimizer = paddle.optimizer.AdamW(0.01, parameters=layer.parameters())
    before, hidden = allocated_bytes(), peak_bytes() - allocated_bytes()
    model, optimizer, _ = group_sharded_parallel(layer, optimizer, level, **arguments)
    wrapped = peak_bytes() - before
    for _ in range(steps):
        loss = sum(block(paddle.ones([2, width])).mean() for block, width in zip(layer, widths))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    return {"hidden": hidden, "wrap": wrapped, "train": peak_bytes() - before}


class Wide(nn.Layer):
    """A frozen parameter of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.value = self.create_parameter([5], dtype="float64")
        self.value.stop_gradient = True


class Mixed(nn.Layer):
    """Groups that interleave: every other layer is frozen, one parameter is of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(12, 12) for _ in range(4)])
        self.wide = Wide()
        for layer in self.layers[1::2]:
            for param in layer.parameters():
                param.stop_gradient = True
        self.last = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = paddle.tanh(layer(x))
        return self.last(x) + self.wide.value.sum().astype("float32")


def lazy_equals_eager(level: str) -> dict[str, Any]:
    """The same model made in both ways and trained for two steps; and the next random number after wrapping."""
    found: dict[str, Any] = {}
    for way in ("eager", "lazy"):
        fresh(5)
        with paddle.LazyGuard() if way == "lazy" else contextlib.nullcontext():
            layer = Mixed()
        optimizer = paddle.optimizer.AdamW(0.01, parameters=[p for p in layer.parameters() if not p.stop_gradient])
        model, optimizer, _ = group_sharded_parallel(layer, optimizer, level)
        drawn = paddle.rand([1])
        for _ in range(2):
            model(paddle.ones([3, 12])).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
        found[way] = {"drawn": drawn, **model.state_dict()}
    return found


def lazy_peaks(level: str, count: int, width: int) -> dict[str, int]:
    """In a new process: how far wrapping a lazy model rises above what lived before, and what then stays."""
    with paddle.LazyGuard():
        layer = build(count, width, "float32")
    optimizer = paddle.optimizer.AdamW(0.01, parameters=layer.parameters())
    before = allocated_bytes()
    model, optimizer, _ = group_sharded_parallel(layer, optimizer, level)
    return {"wrap": peak_bytes() - before, "stays": allocated_bytes() - before}


def growth(level: str, steps: int) -> dict[str, list[int]]:
    """Bytes, Python objects and threads at a few steps of a run that also evaluates and accumulates."""
    layer = build(3, 32, "float32")
    optimizer = paddle.optimizer.AdamW(0.01, parameters=layer.parameters())
    model, optimizer, _ = group_sharded_parallel(layer, optimizer, level)
    found: dict[str, list[int]] = {"bytes": [], "objects": [], "lists": [], "threads": []}
    for step in range(steps):
        with model.no_sync() if step % 3 == 0 else contextlib.nullcontext():
            model(paddle.ones([2, 32])).mean().backward()
        model(paddle.ones([2, 32])).mean().backward()
        with paddle.no_grad():
            model(paddle.ones([2, 32]))
        if step % 5:
            optimizer.step()
        optimizer.clear_grad(set_to_zero=bool(step % 2))
        if step % 50 == 49:
            gc.collect()
            found["bytes"].append(allocated_bytes())
            # Paddle 3.3 leaks a list for each tensor that is made by calling its class, as to_tensor() does.
            found["objects"].append(sum(type(item) is not list for item in gc.get_objects()))
            found["lists"].append(sum(type(item) is list for item in gc.get_objects()))
            found["threads"].append(threading.active_count())
    return found


def only_evaluation(level: str) -> list[int]:
    """What the engine remembers of gathers after many forwards without a step."""
    layer = build(3, 300, "float32")
    optimizer = paddle.optimizer.AdamW(0.01, parameters=layer.parameters())
    model, _, _ = group_sharded_parallel(layer, optimizer, level)
    found = []
    with paddle.no_grad():
        for _ in range(30):
            model(paddle.ones([2, 300]))
            found.append(len(model._engine.residency._trace))
    return found


def wrapped_and_dropped(level: str, times: int) -> list[tuple[int, int, int]]:
    """Threads, open files (sockets are files) and bytes after each of ``times`` models that were never unwrapped.

    Bytes of the process: Paddle 2.6 counts by thread and forgets what a thread has freed when it ends.
    """
    found = []
    for _ in range(times):
        layer = build(2, 300, "float32")
        optimizer = paddle.optimizer.AdamW(0.01, parameters=layer.parameters())
        model, optimizer, _ = group_sharded_parallel(layer, optimizer, level)
        for _ in range(2):
            model(paddle.ones([2, 300])).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
        del layer, model, optimizer
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        found.append((threading.active_count(), len(os.listdir("/proc/self/fd")), resident))
    return found

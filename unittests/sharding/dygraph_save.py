"""Inside a trainer: what save_group_sharded_model writes, and what it leaves alone."""

from __future__ import annotations

import os
import pickle
import resource
import stat
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.utils import mix_precision_utils

from paddle_group_sharded import (
    GroupShardedError,
    group_sharded_parallel,
    load_group_sharded_model,
    save_group_sharded_model,
)
from paddle_group_sharded.paddle_compat import allocated_bytes, create_accumulators
from unittests.harness import fresh
from unittests.sharding.dygraph_arguments import grid_groups
from unittests.sharding.plain_paddle import batch, build, train

LEVELS = ("os", "os_g", "p_g_os")


def reference(optimizer: str, steps: int, rank: int) -> tuple[Any, Any]:
    """The unsharded run: DataParallel, or the plain model alone."""
    fresh()
    model, optimizer = build(optimizer)
    parallel = paddle.DataParallel(model, find_unused_parameters=True) if dist.get_world_size() > 1 else model
    train(parallel, optimizer, 0, steps, rank)
    return parallel, optimizer


def raw(path: str) -> Any:
    """What stands in a file, without Paddle."""
    with open(path, "rb") as file:
        return pickle.load(file, encoding="latin1")


def differences(expected: Any, found: Any, at: str = "") -> list[str]:
    """Where two raw contents are not the same in types, keys and bits."""
    if type(expected) is not type(found):
        return [f"{at}: {type(expected).__name__} {type(found).__name__}"]
    if isinstance(expected, dict):
        if set(expected) != set(found):
            return [f"{at}: keys {sorted(set(expected) ^ set(found))}"]
        return [line for key in expected for line in differences(expected[key], found[key], f"{at}/{key}")]
    if isinstance(expected, (tuple, list)):
        return [line for pair in zip(expected, found) for line in differences(*pair, at)]
    if isinstance(expected, np.ndarray):
        same = expected.dtype == found.dtype and expected.shape == found.shape
        return [] if same and expected.tobytes() == found.tobytes() else [f"{at}: other values"]
    return [] if expected == found else [f"{at}: {expected} {found}"]


def arrays(state: Any) -> Any:
    """A state with NumPy arrays for tensors."""
    if isinstance(state, dict):
        return {name: arrays(value) for name, value in state.items()}
    return state.numpy() if isinstance(state, paddle.Tensor) else state


def distance(expected: Any, found: Any) -> float:
    """The largest difference between two raw contents of the same structure."""
    if isinstance(expected, dict):
        assert set(expected) == set(found), set(expected) ^ set(found)
        return max((distance(expected[key], found[key]) for key in expected), default=0.0)
    if isinstance(expected, np.ndarray):
        assert (expected.dtype, expected.shape) == (found.dtype, found.shape)
        return float(np.max(np.abs(expected.astype("float64") - found.astype("float64")), initial=0.0))
    return 0.0


def equal_to_unsharded(folder: str) -> dict[str, Any]:
    """Per optimizer and level: how our files differ from plain ``paddle.save`` of the unsharded run (on rank 0)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results: dict[str, Any] = {}
    for name in ("AdamW", "Momentum", "SGD", "Lamb"):
        model, optimizer = reference(name, 5, rank)
        plain = f"{folder}/{name}"
        if rank == 0:
            paddle.save(model.state_dict(), f"{plain}.pdparams")
            paddle.save(optimizer.state_dict(), f"{plain}.pdopt")
        for level in LEVELS:
            fresh()
            sharded, ours, _ = group_sharded_parallel(*build(name), level)
            train(sharded, ours, 0, 5, rank)
            output = f"{folder}/{name}_{level}/nested/deeper"
            save_group_sharded_model(sharded, output, ours)
            save_group_sharded_model(sharded, output, ours)  # twice in a row
            if rank == 0:
                pairs = [(f"{plain}.pdparams", "model.pdmodel"), (f"{plain}.pdopt", "model.pdopt")]
                contents = [(raw(theirs), raw(f"{output}/{mine}")) for theirs, mine in pairs]
                exact = world_size <= 2 and name != "Lamb"
                results[f"{name} {level}"] = (
                    [line for pair in contents for line in differences(*pair)]
                    if exact
                    else [far for far in (distance(*pair) for pair in contents) if not far <= 1e-6]
                )
                results[f"{name} {level} folder"] = sorted(os.listdir(output))
    return results


def save_for_plain(folder: str, level: str, steps: int) -> list[float]:
    """The same batches on every rank, so that any number of ranks equals one process."""
    sharded, optimizer, _ = group_sharded_parallel(*build(), level)
    losses = train(sharded, optimizer, 0, steps)
    save_group_sharded_model(sharded, folder, optimizer)
    return losses


def one_process(steps: int) -> dict[str, Any]:
    """Weights and states of the plain run, in the order of the plain program."""
    model, optimizer = build()
    losses = train(model, optimizer, 0, steps)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}


class LowPrecision(nn.Layer):
    """Parameters in bfloat16 that compute in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([5, 3], dtype="bfloat16")
        self.bias = self.create_parameter([3], dtype="bfloat16", is_bias=True)
        self.register_buffer("low", paddle.to_tensor([1.0, 2.0]).astype("float16"))
        self.low.name = "low"

    def forward(self, x: Any) -> Any:
        return paddle.matmul(x, self.weight.astype("float32")) + self.bias.astype("float32")


def low_precision(folder: str, level: str) -> dict[str, Any]:
    """bfloat16 weights with masters: plain Paddle reads our files and writes the same ones again."""
    fresh()
    model = LowPrecision()
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), multi_precision=True)
    sharded, ours, _ = group_sharded_parallel(model, optimizer, level)
    rng = np.random.RandomState(3 + dist.get_rank())
    for _ in range(3):
        sharded(paddle.to_tensor(rng.randn(4, 5).astype("float32"))).square().mean().backward()
        ours.step()
        ours.clear_grad()
    save_group_sharded_model(sharded, f"{folder}/{level}", ours)
    if dist.get_rank() != 0:
        return {}
    fresh()
    plain = LowPrecision()
    theirs = paddle.optimizer.AdamW(0.1, parameters=plain.parameters(), multi_precision=True)
    state = paddle.load(f"{folder}/{level}/model.pdopt")
    plain.set_state_dict(paddle.load(f"{folder}/{level}/model.pdmodel"))
    theirs.set_state_dict(state)
    create_accumulators(theirs, plain.parameters())
    for name, tensor in state["master_weights"].items():
        assert (tensor.astype("bfloat16").astype("float32") == _param(plain, name).astype("float32")).all(), name
        assert not (tensor == _param(plain, name).astype("float32")).all(), "masters hold no more than the weights"
    paddle.save(plain.state_dict(), f"{folder}/again.pdparams")
    paddle.save(theirs.state_dict(), f"{folder}/again.pdopt")
    return {
        "model": differences(raw(f"{folder}/again.pdparams"), raw(f"{folder}/{level}/model.pdmodel")),
        "optimizer": differences(raw(f"{folder}/again.pdopt"), raw(f"{folder}/{level}/model.pdopt")),
        "masters": len(state["master_weights"]),
    }


def _param(layer: Any, name: str) -> Any:
    return next(param for param in layer.parameters() if param.name == name)


# ------------------------------------------------------------------------------------------------------- failing saves


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file may grow beyond ``limit`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def read_only(folder: str) -> Iterator[None]:
    """A folder in which this process may not write, even where it is root's."""
    root = os.geteuid() == 0
    mode = os.stat(folder).st_mode
    os.chmod(folder, stat.S_IRUSR | stat.S_IXUSR | stat.S_IROTH | stat.S_IXOTH)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        os.chmod(folder, mode)


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def failing_saves(folder: str, level: str) -> dict[str, Any]:
    """An earlier save survives whatever goes wrong; every rank hears of it, and training goes on."""
    rank = dist.get_rank()
    model, optimizer, _ = group_sharded_parallel(*build(), level)
    train(model, optimizer, 0, 2, rank)
    output = f"{folder}/good"
    save_group_sharded_model(model, output, optimizer)
    before = contents(output)
    sizes = {name: len(data) for name, data in before.items()}
    train(model, optimizer, 2, 3, rank)
    Path(f"{folder}/file{rank}").write_text("x")
    results: dict[str, Any] = {}

    def attempt(kind: str, target: str, context: Any = None) -> None:
        error = ""
        try:
            if context is not None and rank == 0:
                with context:
                    save_group_sharded_model(model, target, optimizer)
            else:
                save_group_sharded_model(model, target, optimizer)
        except GroupShardedError as raised:
            error = f"{type(raised).__name__}: {raised}"
        results[kind] = (error, contents(output) == before)

    attempt("disk full at the model", output, full_disk(sizes["model.pdmodel"] // 2))
    # The file of the model fits, that of the optimizer does not.
    assert sizes["model.pdmodel"] < sizes["model.pdopt"]
    attempt("disk full at the optimizer", output, full_disk(sizes["model.pdmodel"] + 100))
    os.chmod(folder, 0o777)
    attempt("read-only", output, read_only(output))
    attempt("a file", f"{folder}/file0")
    attempt("below a file", f"{folder}/file0/deeper")
    attempt("not a path", 5)  # type: ignore[arg-type]
    save_group_sharded_model(model, output, optimizer)
    results["afterwards"] = (sorted(os.listdir(output)), contents(output) != before)
    return results


def weights_after(folder: str, level: str, saves: bool) -> dict[str, Any]:
    """F4: six steps, with a save at every point of a step, or without."""
    fresh()
    rank = dist.get_rank()
    model, optimizer = build()
    if level == "DataParallel":
        model = paddle.DataParallel(model, find_unused_parameters=True) if dist.get_world_size() > 1 else model
    else:
        model, optimizer, _ = group_sharded_parallel(model, optimizer, level)

    def save() -> None:
        if saves:
            save_group_sharded_model(model, f"{folder}/{level}", optimizer)

    paddle.seed(3 + rank)
    for step in range(6):
        save()
        loss = model(batch(step, rank)).square().mean()
        save()
        loss.backward()
        save()
        optimizer.step()
        save()
        optimizer.clear_grad()
    return {"random": paddle.rand([3]).numpy(), **{k: v.numpy() for k, v in model.state_dict().items()}}


# -------------------------------------------------------------------------------------------------------------- memory


class Wide(nn.Layer):
    """Equal blocks, each a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.LayerList([nn.Linear(300, 300) for _ in range(8)])

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def memory_of_a_save(folder: str) -> dict[str, float]:
    """Bytes beyond those before the save, in groups: the most at any collective, and after it."""
    model = Wide()
    optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    model, optimizer, _ = group_sharded_parallel(model, optimizer, "p_g_os")
    model(paddle.ones([2, 300])).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
    group = 4 * 300 * 301
    save_group_sharded_model(model, folder, optimizer)  # the first one may fill caches
    before = allocated_bytes()
    highest = [before]
    lock = threading.Lock()

    def look(*_: Any) -> None:
        with lock:
            highest[0] = max(highest[0], allocated_bytes())

    model._engine.comm.on_run = look
    tracemalloc.start()
    save_group_sharded_model(model, folder, optimizer)
    python_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    model._engine.comm.on_run = None
    return {
        "most": (highest[0] - before) / group,
        "arrays": python_peak / group,
        "after": (allocated_bytes() - before) / group,
    }


def resumed_from_a_save(
    folder: str, level: str, other: str, mixed: bool, rows: list[list[int]], columns: list[list[int]]
) -> dict[str, list[str]]:
    """Saved after three steps, read by plain ``paddle.load`` and loaded at ``other``; two more steps on both.

    ``mixed``: through MixPrecisionLayer and MixPrecisionOptimizer.  ``rows`` shard, ``columns`` are replicas.
    """
    group, dp_group = grid_groups(rows, columns) if rows else (None, None)

    def made(at: str) -> tuple[Any, Any]:
        fresh(0)
        layer: Any = LowPrecision() if mixed else nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3))
        optimizer: Any = paddle.optimizer.AdamW(0.1, parameters=layer.parameters(), multi_precision=mixed)
        if mixed:
            layer = mix_precision_utils.MixPrecisionLayer(layer, dtype="bfloat16")
            optimizer = mix_precision_utils.MixPrecisionOptimizer(optimizer)
        return group_sharded_parallel(layer, optimizer, at, group=group, dp_group=dp_group)[:2]

    def run(model: Any, optimizer: Any, first: int, last: int) -> None:
        for number in range(first, last):
            x = np.random.RandomState(100 * number + dist.get_rank()).randn(4, 5).astype("float32")
            model(paddle.to_tensor(x)).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad()

    model, optimizer = made(level)
    run(model, optimizer, 0, 3)
    save_group_sharded_model(model, folder, optimizer)
    result = {
        "model file": differences(arrays(dict(model.state_dict())), arrays(paddle.load(f"{folder}/model.pdmodel"))),
        "optimizer file": differences(arrays(optimizer.state_dict()), arrays(paddle.load(f"{folder}/model.pdopt"))),
    }
    run(model, optimizer, 3, 5)
    again, its_optimizer = made(other)
    load_group_sharded_model(again, folder, its_optimizer)
    run(again, its_optimizer, 3, 5)
    result["weights"] = differences(arrays(dict(model.state_dict())), arrays(dict(again.state_dict())))
    result["states"] = differences(arrays(optimizer.state_dict()), arrays(its_optimizer.state_dict()))
    return result

"""Inside a trainer: mistakes. Each must give every rank an error, leave the model as it was, and hang nobody."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from typing import Any, Callable

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_group_sharded import (
    GroupShardedError,
    group_sharded_parallel,
    load_group_sharded_model,
    save_group_sharded_model,
    unwrap,
)
from unittests.harness import fresh
from unittests.sharding.dygraph_arguments import grid_groups

Tensor = Any
LEVELS = ("os", "os_g", "p_g_os")


class Net(nn.Layer):
    """Two layers and a buffer."""

    def __init__(self, width: int = 5, dtype: str = "float32") -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, 3)
        self.register_buffer("count", paddle.zeros([2], dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def adam(model: Any, **options: Any) -> Any:
    return paddle.optimizer.Adam(0.1, parameters=model.parameters(), **options)


def step(model: Any, optimizer: Any, seed: int = 0) -> None:
    x = paddle.to_tensor(np.random.RandomState(seed + 10 * dist.get_rank()).randn(3, 4).astype("float32"))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.clear_grad()


def error_of(call: Callable[[], Any]) -> str:
    """``Type: message`` of what ``call`` raises, or an empty text."""
    try:
        call()
    except GroupShardedError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ------------------------------------------------------------------------------------------------------------- wrapping


def _wrong_arguments() -> dict[str, tuple[dict[str, Any], str]]:
    return {
        "level": ({"level": "zero"}, "'os', 'os_g', 'p_g_os', got 'zero'"),
        "level type": ({"level": 3}, "'os', 'os_g', 'p_g_os', got 3"),
        "model": ({"model": lambda x: x}, "model must be a paddle.nn.Layer, got function"),
        "optimizer": ({"optimizer": "adam"}, "optimizer must be a paddle.optimizer.Optimizer, got str"),
        "scaler": ({"scaler": 1024.0}, "scaler must be a paddle.amp.GradScaler or None, got float"),
        "buffer size": ({"buffer_max_size": 0}, "buffer_max_size must be a number of elements, at least 1, got 0"),
        "buffer type": ({"buffer_max_size": "8M"}, "buffer_max_size must be a number of elements, at least 1, got '8M"),
        "segment": ({"segment_size": -1}, "segment_size must be a number of elements, at least 0, got -1"),
        "segment type": ({"segment_size": 0.5}, "segment_size must be a number of elements, at least 0, got 0.5"),
        "exclude": ({"exclude_layer": "Linear"}, "exclude_layer must be a list of class names and layer ids"),
        "exclude type": ({"exclude_layer": [nn.Linear]}, "exclude_layer must be a list of class names and layer ids"),
        "flag": ({"offload": "cpu"}, "offload must be True or False, got 'cpu'"),
    }


def _wrong_objects() -> dict[str, tuple[Callable[[Any, Any], Any], str]]:
    """From a good model and optimizer to what is passed instead, and what the message says."""

    class Clip(nn.ClipGradByNorm):
        pass

    def frozen_integer(model: Any, optimizer: Any) -> Any:
        model.table = paddle.create_parameter([2], "int64", default_initializer=nn.initializer.Constant(0))
        return model, optimizer

    def within(model: Any, optimizer: Any) -> Any:
        outer = nn.Sequential(paddle.DataParallel(model) if dist.get_world_size() > 1 else _Parallel(model))
        return outer, adam(outer)

    return {
        "DataParallel": (lambda m, o: (paddle.DataParallel(m), o), "paddle.DataParallel"),
        "DataParallel inside": (within, "paddle.DataParallel"),
        "another model's": (lambda m, o: (m, adam(Net())), "4 parameters that are not in the model, the first is"),
        "a clip of one's own": (lambda m, o: (m, adam(m, grad_clip=Clip(1.0))), "grad_clip must be None or one of"),
        "integers": (frozen_integer, "parameter 'table' has dtype"),
        "sparse": (lambda m, o: ((e := nn.Embedding(4, 2, sparse=True)), adam(e)), "sparse=True"),
        "LBFGS": (lambda m, o: (m, paddle.optimizer.LBFGS(parameters=m.parameters())), "LBFGS"),
    }


class _Parallel(paddle.DataParallel):  # type: ignore[misc]
    """One process alone can have one too."""


def wrong_everywhere() -> dict[str, Any]:
    """The same mistake on every rank: the message, and whether the model can be wrapped rightly afterwards."""
    results: dict[str, Any] = {}
    for name, (changes, words) in _wrong_arguments().items():
        model = Net()
        call = {"model": model, "optimizer": adam(model), "level": "p_g_os", **changes}
        results[name] = (error_of(lambda call=call: group_sharded_parallel(**call)), words, _untouched(model))
    for name, (make, words) in _wrong_objects().items():
        model = Net()
        passed = make(model, adam(model))
        message = error_of(lambda passed=passed: group_sharded_parallel(*passed, "p_g_os"))
        results[name] = (message, words, name in ("integers", "sparse") or _untouched(model))
    return results


def _untouched(model: Any) -> bool:
    """Whether a failed call has left ``model`` able to be wrapped and trained, and given back with plain hooks."""
    layers = model.sublayers(include_self=True)
    marks = ("_forward_pre_hooks", "_state_dict_hooks", "forward")
    hooks = [layer for layer in layers if any(vars(layer).get(mark) for mark in marks)]
    sharded, optimizer, _ = group_sharded_parallel(model, adam(model), "p_g_os")
    step(sharded, optimizer)
    plain, _ = unwrap(sharded, optimizer)
    return not hooks and plain is model and all(np.isfinite(p.numpy()).all() for p in model.parameters())


def wrapped_twice(level: str) -> dict[str, Any]:
    """Model, layer of it, model around it, optimizer, DataParallel around; then all goes on."""
    fresh()
    layer = Net()
    inner = adam(layer)
    model, optimizer, _ = group_sharded_parallel(layer, inner, level)
    outer = nn.Sequential(layer)
    tied = nn.Linear(4, 5)
    tied.weight = next(iter(layer.parameters()))
    results = {
        "the wrapper": error_of(lambda: group_sharded_parallel(model, adam(Net()), level)),
        "the model": error_of(lambda: group_sharded_parallel(layer, adam(layer), level)),
        "a layer": error_of(lambda: group_sharded_parallel(layer.first, adam(layer.first), level)),
        "around": error_of(lambda: group_sharded_parallel(outer, adam(outer), level)),
        "a shared weight": error_of(lambda: group_sharded_parallel(tied, adam(tied), level)),
        "the optimizer": error_of(lambda: group_sharded_parallel(Net(), optimizer, level)),
        "the optimizer inside": error_of(lambda: group_sharded_parallel(Net(), inner, level)),
        "DataParallel": "" if dist.get_world_size() == 1 else error_of(lambda: paddle.DataParallel(model)),
    }
    step(model, optimizer)
    plain, plain_optimizer = unwrap(model, optimizer)
    again, again_optimizer, _ = group_sharded_parallel(plain, plain_optimizer, level)
    step(again, again_optimizer)
    return results


def static_mode() -> dict[str, str]:
    """On every rank, then on one only."""
    results = {}
    model = Net()
    optimizer = adam(model)
    for name, here in (("all", True), ("one", dist.get_rank() == dist.get_world_size() - 1)):
        if here:
            paddle.enable_static()
        results[name] = error_of(lambda: group_sharded_parallel(model, optimizer, "os"))
        paddle.disable_static()
    results["untouched"] = str(_untouched(model))
    return results


def wrong_on_one_rank() -> dict[str, Any]:
    """Each mistake on the last rank alone: the others hear which rank and what."""
    last = dist.get_rank() == dist.get_world_size() - 1
    results: dict[str, Any] = {}
    for name, (changes, words) in _wrong_arguments().items():
        model = Net()
        call = {"model": model, "optimizer": adam(model), "level": "os_g", **(changes if last else {})}
        results[name] = (error_of(lambda call=call: group_sharded_parallel(**call)), words, _untouched(model))
    return results


def different_between_ranks() -> dict[str, Any]:
    """Models, optimizers and arguments that differ between the ranks."""
    rank = dist.get_rank()
    last = rank == dist.get_world_size() - 1

    def frozen() -> Any:
        model = Net()
        model.first.weight.stop_gradient = last
        return model

    def cases(name: str) -> tuple[Any, Any, str, dict[str, Any]]:
        model: Any = Net()
        level, arguments = "os", {}
        optimizer = None
        if name == "count" and last:
            model = nn.Sequential(Net(), nn.Linear(3, 3))
        elif name == "count":
            model = nn.Sequential(Net())
        elif name == "shape":
            model = Net(6 if last else 5)
        elif name == "dtype" and last:
            model.first.to(dtype="float64")
        elif name == "frozen":
            model = frozen()
        elif name == "names":
            model = nn.Sequential(model) if last else model
        elif name == "buffer":
            model = Net(dtype="int64" if last else "float32")
        elif name == "level":
            level = "os_g" if last else "os"
        elif name == "optimizer" and last:
            optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        elif name == "rate":
            optimizer = paddle.optimizer.Adam(0.1 + rank, parameters=model.parameters())
        elif name == "part" and last:
            optimizer = adam(model.first)
        elif name == "clip" and last:
            optimizer = adam(model, grad_clip=nn.ClipGradByGlobalNorm(1.0))
        elif name == "scaler" and last:
            arguments["scaler"] = paddle.amp.GradScaler()
        elif name in ("segment_size", "buffer_max_size"):
            arguments[name] = 7 + rank
        elif name in ("offload", "sync_buffers", "sync_comm"):
            arguments[name] = last
        elif name == "exclude_layer":
            arguments[name] = ["Linear"] if last else None
        return model, optimizer or adam(model), level, arguments

    results = {}
    for name in DIFFERENCES:
        model, optimizer, level, arguments = cases(name)
        results[name] = error_of(
            lambda model=model, optimizer=optimizer, level=level, arguments=arguments: group_sharded_parallel(
                model, optimizer, level, **arguments
            )
        )
    return results


DIFFERENCES = (
    "count shape dtype frozen names buffer level optimizer rate part clip scaler segment_size buffer_max_size "
    "offload sync_buffers sync_comm exclude_layer"
).split()


def groups_and_timeouts() -> dict[str, Any]:
    """H6, H8: a rank outside the group, a wrong group, a rank that does not come to the wrapping."""
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    results: dict[str, Any] = {}
    model = Net()
    if rank == 1:
        results["outside"] = error_of(lambda: group_sharded_parallel(model, adam(model), "os", group=group))
    else:
        sharded, optimizer, _ = group_sharded_parallel(model, adam(model), "os", group=group)
        step(sharded, optimizer)
        results["outside"] = ""
    model = Net()
    results["wrong group"] = error_of(lambda: group_sharded_parallel(model, adam(model), "os", group=[0, 1]))
    results["wrong timeout"] = error_of(lambda: group_sharded_parallel(model, adam(model), "os", timeout=0))
    for missing in (2, 0):
        dist.barrier()
        start = time.monotonic()
        if rank != missing:
            message = error_of(lambda: group_sharded_parallel(model, adam(model), "os", timeout=3.0))
            results[f"missing {missing}"] = (message, time.monotonic() - start)
        dist.barrier()
    return results


def order_of_models() -> str:
    """H6: two models wrapped in another order on one rank."""
    first, second = Net(5), Net(6)
    models = [first, second] if dist.get_rank() == 0 else [second, first]
    return error_of(lambda: [group_sharded_parallel(model, adam(model), "os") for model in models])


# -------------------------------------------------------------------------------------------------- wrong calls later


def wrong_calls(folder: str, level: str) -> dict[str, str]:
    """Objects that do not go together, on every rank or on one."""
    rank = dist.get_rank()
    last = rank == dist.get_world_size() - 1
    model, optimizer, _ = group_sharded_parallel((net := Net()), adam(net), level)
    other, other_optimizer, _ = group_sharded_parallel((net := Net()), adam(net), level)
    step(model, optimizer)
    step(other, other_optimizer)
    plain = Net()
    results = {
        "save plain": error_of(lambda: save_group_sharded_model(plain, folder)),
        "save plain optimizer": error_of(lambda: save_group_sharded_model(model, folder, adam(plain))),
        "save another's": error_of(lambda: save_group_sharded_model(model, folder, other_optimizer)),
        "save on one wrong": error_of(
            lambda: save_group_sharded_model(model, folder, other_optimizer if last else optimizer)
        ),
        "load mixed": error_of(lambda: load_group_sharded_model(plain, folder, optimizer)),
        "load another's": error_of(lambda: load_group_sharded_model(model, folder, other_optimizer)),
        "load path": error_of(lambda: load_group_sharded_model(model, 7)),  # type: ignore[arg-type]
        "load no layer": error_of(lambda: load_group_sharded_model("model", folder)),  # type: ignore[arg-type]
        "unwrap plain": error_of(lambda: unwrap(plain, optimizer)),  # type: ignore[arg-type]
        "unwrap another's": error_of(lambda: unwrap(model, other_optimizer)),
    }
    step(model, optimizer)
    step(other, other_optimizer)
    return results


def on_one_rank_only(folder: str, level: str, what: str) -> str:
    """K3, R30, H5: a call that only rank 0 makes, or makes more often."""
    rank = dist.get_rank()
    model, optimizer, _ = group_sharded_parallel((net := Net()), adam(net), level, timeout=20.0)
    step(model, optimizer)

    def run() -> None:
        if what == "save" and rank == 0:
            save_group_sharded_model(model, folder, optimizer)
        if what == "load" and rank == 0:
            load_group_sharded_model(model, folder, optimizer)
        if what == "optimizer.state_dict" and rank == 0:
            optimizer.state_dict()
        if what == "backward":
            for seed in range(2 if rank == 0 else 1):
                model(paddle.full([2, 4], 1.0 + seed)).square().mean().backward()
        if what == "batches":
            for seed in range(4 if rank == 0 else 3):
                step(model, optimizer, seed)
            if rank == 0:
                return
        for seed in range(3):
            step(model, optimizer, seed)
        save_group_sharded_model(model, folder, optimizer)

    return error_of(run)


def ended(what: str, level: str) -> tuple[str, float]:
    """A rank that ends (unequal numbers of batches) or is killed in training: the others say which, within seconds."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model, optimizer, _ = group_sharded_parallel((net := Net()), adam(net), level)
    step(model, optimizer)
    start = time.monotonic()
    if rank == last:
        model(paddle.ones([2, 4])).square().mean().backward()
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    message = error_of(lambda: [step(model, optimizer, seed) for seed in range(50)])
    return message, time.monotonic() - start


def late(seconds: float) -> dict[str, Any]:
    """The last rank sleeps between two steps; weights at the end, of two levels and of the plain run."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    runs: dict[str, Any] = {}
    for name in ("DataParallel", "os_g", "p_g_os"):
        fresh()
        net = Net()
        optimizer = adam(net)
        if name == "DataParallel":
            runs[name] = (paddle.DataParallel(net), optimizer)
        else:
            runs[name] = group_sharded_parallel(net, optimizer, name)[:2]
    for model, optimizer in runs.values():
        for seed in range(5):
            step(model, optimizer, seed)
    for seed in range(5, 10):
        if seed == 7 and rank == last:
            time.sleep(seconds)
        for name in ("os_g", "p_g_os", "DataParallel"):  # the plain one last: gloo itself gives up after 30 s
            step(*runs[name], seed)
    return {name: {k: v.numpy() for k, v in model.state_dict().items()} for name, (model, _) in runs.items()}


def too_late(level: str) -> tuple[str, float]:
    """A limit of 3 s, and a rank that stays away for longer."""
    rank = dist.get_rank()
    model, optimizer, _ = group_sharded_parallel((net := Net()), adam(net), level, timeout=3.0)
    step(model, optimizer)
    if rank == 1:
        time.sleep(6.0)
    start = time.monotonic()
    message = error_of(lambda: step(model, optimizer))
    return message, time.monotonic() - start


def not_initialised() -> str:
    """Launched with two ranks, but ``init_parallel_env()`` was not called: what such a program prints."""
    code = (
        "import paddle, paddle_group_sharded as p\n"
        "m = paddle.nn.Linear(2, 2)\n"
        "o = paddle.optimizer.SGD(0.1, parameters=m.parameters())\n"
        "try:\n    p.group_sharded_parallel(m, o, 'os')\n"
        "except p.UsageError as error:\n    print('UsageError:', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.stdout


class Codebook(nn.Layer):
    """Moves its codes in its own forward, as a moving average does, in one of the ways that Paddle offers."""

    def __init__(self, way: str, frozen: bool, begin: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.codes = self.create_parameter([16, 8])
        self.codes.stop_gradient = frozen
        self.way, self.begin, self.calls = way, begin, 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        out = y @ (self.codes * 1.0).t()  # Paddle refuses backward through what an in-place operation has changed
        self.calls += 1
        if self.calls >= self.begin:
            with paddle.no_grad():
                moved = self.codes * 0.5
                if self.way == "set_value":
                    self.codes.set_value(moved)
                elif self.way == "copy_":
                    self.codes.copy_(moved, False)
                elif self.way == "item":
                    self.codes[3] = moved[3]
                else:
                    paddle.assign(moved, self.codes)
        return out


def written_in_forward(way: str, frozen: bool, begin: int, exclude: bool) -> dict[str, Any]:
    """Four steps of a layer that writes to its parameter: the error, and in which step, or the codes at the end."""
    fresh(0)
    layer = Codebook(way, frozen, begin)
    start = layer.codes.numpy()
    optimizer = paddle.optimizer.SGD(0.0, parameters=layer.parameters())
    exclude_layer = ["Codebook"] if exclude else None
    model, optimizer, _ = group_sharded_parallel(layer, optimizer, "p_g_os", exclude_layer=exclude_layer)
    for number in range(1, 5):
        model(paddle.ones([2, 4])).mean().backward()
        message = error_of(optimizer.step)
        if message:
            return {"step": number, "message": message}
        optimizer.clear_grad()
    return {"ratio": float((model.state_dict()["codes"].numpy() / start).mean())}


def deep_copies(level: str) -> dict[str, Any]:
    """Of the wrapped model, and of its layers while they are whole."""
    fresh(0)
    net = Net()
    model, optimizer, _ = group_sharded_parallel(net, adam(net), level)
    step(model, optimizer)
    message = error_of(lambda: copy.deepcopy(model))
    with model.gathered() as layer:
        copied = copy.deepcopy(layer)
    step(model, optimizer)
    before = {name: value.numpy() for name, value in copied.state_dict().items()}
    plain = Net()
    plain.set_state_dict(before)
    x = paddle.rand([2, 4])
    alike = bool((copied(x) == plain(x)).all())
    return {"message": message, "copied": before, "moved": model.state_dict(), "alike": alike}


def forward_around_ours(level: str) -> list[float]:
    """How far a layer whose forward is replaced after wrapping is from the plain one: wrapped, and unwrapped again."""
    fresh(0)
    net, x = Net(), paddle.rand([2, 4])
    model, optimizer, _ = group_sharded_parallel(net, adam(net), level)
    inner = net.first.forward
    net.first.forward = lambda x: 2 * inner(x)
    found = []
    for again in (False, True):
        if again:
            unwrap(model, optimizer)
        with paddle.no_grad():
            for _ in range(2):
                found.append(net(x).numpy())
    plain = Net()
    plain.set_state_dict(net.state_dict())
    wanted = plain.second(2 * plain.first(x)).numpy()
    return [float(np.abs(each - wanted).max()) for each in found]


class Wide(nn.Layer):
    """Three layers of one group each, which change their weight in their forward where ``writes`` says so."""

    class Block(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.weight = self.create_parameter([300, 300])
            self.writes = False

        def forward(self, x: Tensor) -> Tensor:
            out = paddle.matmul(x, self.weight * 1.0)
            if self.writes:
                self.weight.set_value(self.weight * 0.5)
            return out

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(self.Block(), self.Block(), self.Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def several_written(writers: list[int], rows: list[list[int]], columns: list[list[int]]) -> dict[str, Any]:
    """All layers write on the ``writers``: how many groups stay whole after backward, and what the step says."""
    group, dp_group = grid_groups(rows, columns) if rows else (None, None)
    fresh(0)
    net = Wide()
    for block in net.blocks:
        block.writes = dist.get_rank() in writers
    optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    model, optimizer, _ = group_sharded_parallel(net, optimizer, "p_g_os", group=group, dp_group=dp_group)
    model(paddle.ones([2, 300])).mean().backward()
    whole = [each.name for each in model._engine.groups if each.state.value != "sharded"]
    return {"whole": whole, "message": error_of(optimizer.step)}

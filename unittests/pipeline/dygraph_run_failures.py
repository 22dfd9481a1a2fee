"""Inside a trainer: pipelines in which something goes wrong, and what is freed when nothing does."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any, Callable

import paddle
import paddle.nn.functional as F
from paddle import nn

from paddle_group_sharded import (
    LayerDesc,
    PipelineLayer,
    PipelineParallel,
    SharedLayerDesc,
    group_sharded_parallel,
    pipeline_parallel,
)
from paddle_group_sharded.paddle_compat import allocated_bytes
from paddle_group_sharded.pipeline.action import Plan
from paddle_group_sharded.pipeline.schedules import one_f_one_b
from unittests.harness import fresh
from unittests.pipeline.plain_pipeline import accumulate, distance, pair

Tensor = Any
LOSS = nn.CrossEntropyLoss()


def message(call: Callable[[], Any]) -> str:
    """What ``call`` raises, or nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Trap(nn.Layer):
    """Does what the test says when the test says so."""

    armed: dict[str, Any] = {}

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        self.linear = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        at, when, what = (self.armed.get(name) for name in ("place", "when", "what"))
        y = F.tanh(self.linear(x))
        if at != self.place:
            return y
        if when == "forward" and self.calls == 2:
            what()
        if when == "backward" and not y.stop_gradient:
            y.register_hook(lambda grad: what())
        if when == "boundary":
            return {"y": y, "lock": iter(())}
        return y


def ends() -> None:
    raise KeyError("ends here")


def failures(num_stages: int) -> dict[str, Any]:
    """One rank fails in every place; all raise, and train on as if nothing had been."""
    x, y = paddle.randn([6, 6]), paddle.randint(0, 6, [6])
    results: dict[str, Any] = {}
    seconds = 0.0
    plain, layer = pair(
        lambda: [LayerDesc(Trap, place) for place in range(num_stages)], num_stages=num_stages, loss_fn=[LOSS]
    )
    reference = paddle.optimizer.SGD(0.1, parameters=plain.parameters())
    model, optimizer = pipeline_parallel(layer, paddle.optimizer.SGD(0.1, parameters=layer.parameters()), 3)
    places = [(place, when) for when in ("forward", "backward") for place in range(num_stages)]
    for place, when in [*places, (0, "boundary"), (num_stages - 1, "loss")]:
        for trap in layer.sublayers():
            trap.calls = 0
        Trap.armed = {"place": place, "when": when, "what": ends}
        layer.loss_fns[0] = (lambda *_: ends()) if when == "loss" else LOSS
        started = time.monotonic()
        results[f"{when} {place}"] = message(lambda: model.train_batch([x, y], optimizer))
        seconds = max(seconds, time.monotonic() - started)
        Trap.armed = {}
        layer.loss_fns[0] = LOSS
        expected = accumulate(plain, LOSS, [x, y], 3)
        reference.step()
        reference.clear_grad()
        loss = float(model.train_batch([x, y], optimizer).item())
        assert abs(loss - expected) < 1e-6, (place, when, loss, expected)
    layer.loss_fns[0] = lambda output, label: F.cross_entropy(output, label, reduction="none")
    results["not a number"] = message(lambda: model.train_batch([x, y], optimizer))
    return {"messages": results, "weights": distance(plain, model), "prompt": seconds < 5}


def interrupted() -> str:
    """The user of rank 1 presses Ctrl-C in a forward, and leaves."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    layer = PipelineLayer([LayerDesc(Trap, place) for place in range(2)], num_stages=2, loss_fn=LOSS)
    model, optimizer = pipeline_parallel(layer, paddle.optimizer.SGD(0.1, parameters=layer.parameters()), 4)
    Trap.armed = {"place": 1, "when": "forward", "what": interrupt}
    data = [paddle.randn([8, 6]), paddle.randint(0, 6, [8])]
    try:
        return message(lambda: model.train_batch(data, optimizer))
    except KeyboardInterrupt:
        layer.comm.close()
        return "interrupted"
    finally:
        Trap.armed = {}


def sparse(num_stages: int) -> list[str]:
    """Gradients that cannot be summed, found by the ranks that hold them, after or while the plan runs."""

    def head(layer: nn.Layer, x: Tensor) -> Tensor:
        return paddle.matmul(x, layer.weight, transpose_y=True)

    tied = [
        SharedLayerDesc("word", nn.Embedding, None, "weight", 7, 6, sparse=True),
        LayerDesc(nn.Linear, 6, 6),
        SharedLayerDesc("word", nn.Embedding, head, "weight", 7, 6),
    ]
    alone = [LayerDesc(nn.Embedding, 7, 6, sparse=True), LayerDesc(nn.Linear, 6, 6), LayerDesc(nn.Linear, 6, 7)]
    messages = []
    for entries in (tied, alone):
        layer = PipelineLayer(entries, num_stages=num_stages, loss_fn=LOSS)
        model, optimizer = pipeline_parallel(layer, paddle.optimizer.SGD(0.1, parameters=layer.parameters()), 2)
        data = [paddle.randint(0, 7, [4, 3]), paddle.randint(0, 7, [4, 3])]
        messages.append(message(lambda model=model, optimizer=optimizer, data=data: model.train_batch(data, optimizer)))
    return messages


def killed() -> list[str]:
    """Rank 1 of 3 is killed in a forward."""
    fresh()
    layer = PipelineLayer([LayerDesc(Trap, place) for place in range(3)], num_stages=3, loss_fn=LOSS)
    model, optimizer = pipeline_parallel(layer, paddle.optimizer.SGD(0.1, parameters=layer.parameters()), 4)
    data = [paddle.randn([8, 6]), paddle.randint(0, 6, [8])]
    model.train_batch(data, optimizer)
    for trap in layer.sublayers():
        trap.calls = 0
    Trap.armed = {"place": 1, "when": "forward", "what": lambda: os.kill(os.getpid(), signal.SIGKILL)}
    started = time.monotonic()
    first = message(lambda: model.train_batch(data, optimizer))
    return [first, message(lambda: model.train_batch(data, optimizer)), str(time.monotonic() - started < 5)]


def refusals() -> list[str]:
    """What cannot run is refused by every rank before anything runs."""
    entries = [LayerDesc(nn.Linear, 6, 6) for _ in range(6)]
    layer = PipelineLayer(entries, num_stages=2, loss_fn=LOSS)
    chunked = PipelineLayer(entries, num_stages=2, loss_fn=LOSS, num_virtual_pipeline_stages=2)
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    foreign = paddle.optimizer.SGD(0.1, parameters=nn.Linear(2, 2).parameters())
    backwards = Plan.parse("rank 0: 1F0 1B0\nrank 1: 0F0 0B0")
    deadlock = Plan.parse("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1B1 1F0 1B0")
    model, ours = pipeline_parallel(layer, optimizer, 2)
    data = [paddle.randn([4, 6]), paddle.randint(0, 6, [4])]

    class OwnClip(nn.ClipGradByGlobalNorm):
        pass

    own = nn.Linear(2, 2)
    sharded = group_sharded_parallel(own, paddle.optimizer.SGD(0.1, parameters=own.parameters()), "os_g")[1]
    clipped = paddle.optimizer.SGD(0.1, parameters=layer.parameters(), grad_clip=OwnClip(1.0))
    calls: list[Callable[[], Any]] = [
        lambda: pipeline_parallel(nn.Linear(2, 2), optimizer),
        lambda: pipeline_parallel(layer, foreign),
        lambda: pipeline_parallel(layer, 3),
        lambda: pipeline_parallel(layer, sharded),
        lambda: pipeline_parallel(layer, optimizer, 0),
        lambda: pipeline_parallel(layer, optimizer, 4, "2f2b"),
        lambda: pipeline_parallel(layer, optimizer, 4, one_f_one_b(3, 4)),
        lambda: pipeline_parallel(layer, optimizer, 3, one_f_one_b(2, 4)),
        lambda: pipeline_parallel(chunked, None, 4, "1f1b"),
        lambda: pipeline_parallel(layer, optimizer, 1, backwards),
        lambda: pipeline_parallel(layer, optimizer, 2, deadlock),
        lambda: pipeline_parallel(layer, optimizer, 2, "forward_only"),
        lambda: model(data[0]),
        lambda: pipeline_parallel(layer, clipped),
        lambda: PipelineParallel(chunked, micro_batches=2).train_batch(data, ours),
    ]
    return [message(call) for call in calls]


def crossed_calls() -> str:
    """One rank trains while the other evaluates."""
    layer = PipelineLayer([LayerDesc(nn.Linear, 6, 6), LayerDesc(nn.Linear, 6, 6)], num_stages=2, loss_fn=LOSS)
    model, optimizer = pipeline_parallel(layer, paddle.optimizer.SGD(0.1, parameters=layer.parameters()), 2)
    data = [paddle.randn([4, 6]), paddle.randint(0, 6, [4])]
    if layer.grid.stage == 0:
        return message(lambda: model.train_batch(data, optimizer))
    return message(lambda: model.eval_batch(data, compute_loss=True))


def memory() -> dict[str, list[int]]:
    """By schedule, live bytes between steps, in which large tensors pass the boundary both ways."""
    layer = PipelineLayer(
        [LayerDesc(nn.Linear, 4, 500), F.relu, LayerDesc(nn.Linear, 500, 4), LayerDesc(nn.PReLU)],
        num_stages=2,
        loss_fn=nn.MSELoss(),
    )
    optimizer = paddle.optimizer.SGD(0.0, parameters=layer.parameters())
    live: dict[str, list[int]] = {}
    data = [paddle.randn([1200, 4]), paddle.zeros([1200, 4])]
    for schedule in ("gpipe", "zb_h1"):
        model, ours = pipeline_parallel(layer, optimizer, 6, schedule)
        for _ in range(3):
            model.train_batch(data, ours)
            model.eval_batch(data)
            gc.collect()
            live.setdefault(schedule, []).append(allocated_bytes())
        model.close()
    return live

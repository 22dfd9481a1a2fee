"""Cases of test_plan_check.py: a plan made of the plain model, and a real step of the wrapped one beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn

from paddle_group_sharded import UsageError, group_sharded_parallel, plan
from unittests.harness import fresh
from unittests.sharding.dygraph_memory import build as low_precision_blocks

Tensor = Any
Setup = tuple[Any, Any, Callable[[Any], Tensor]]  # model, optimizer, the loss of a model


class Tied(nn.Layer):
    """Reads the embedding's weight again for its head, and calls one block twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(400, 256)
        self.blocks = nn.LayerList(
            [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4)]
        )
        self.norm = nn.LayerNorm(256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in [*self.blocks, self.blocks[1]]:
            x = x + block(x)
        return paddle.matmul(self.norm(x), self.embedding.weight, transpose_y=True)


class Mixed(nn.Layer):
    """Statistics, a frozen layer, one that is never called, and one whose gradients nobody steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(300, 300)
        self.norm = nn.BatchNorm1D(300)
        self.frozen = nn.Linear(300, 300)
        self.unused = nn.Linear(300, 200)
        self.last = nn.Linear(300, 300)
        for param in self.frozen.parameters():
            param.stop_gradient = True

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.frozen(self.norm(self.first(x)))))


def adamw(model: Any, **options: Any) -> Any:
    return paddle.optimizer.AdamW(0.01, parameters=model.parameters(), **options)


def blocks() -> Setup:
    model = nn.Sequential(*(nn.Linear(320, 320) for _ in range(6)))
    return model, adamw(model), lambda layer: layer(paddle.ones([4, 320])).mean()


def tied() -> Setup:
    model = Tied()
    tokens = paddle.arange(64).reshape([2, 32])
    optimizer = adamw(model, grad_clip=nn.ClipGradByGlobalNorm(0.01))
    return model, optimizer, lambda layer: F.cross_entropy(layer(tokens), tokens)


def mixed() -> Setup:
    model = Mixed()
    optimizer = paddle.optimizer.Momentum(0.01, parameters=[p for p in model.parameters() if not p.stop_gradient])
    return model, optimizer, lambda layer: layer(paddle.rand([8, 300])).mean()


def lamb() -> Setup:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(5)))
    optimizer = paddle.optimizer.Lamb(0.01, parameters=model.parameters())
    return model, optimizer, lambda layer: layer(paddle.ones([4, 256])).mean()


def bfloat16() -> Setup:
    model = low_precision_blocks(6, 256, "bfloat16")
    return model, adamw(model), lambda layer: layer(paddle.ones([2, 256])).mean()


def many_small() -> Setup:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(300)))
    return model, adamw(model), lambda layer: layer(paddle.ones([2, 8])).mean()


def activations_rule() -> Setup:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU())))
    return model, adamw(model), lambda layer: layer(paddle.ones([4096, 128])).mean()


KINDS = (blocks, tied, mixed, lamb, bfloat16, many_small, activations_rule)


def checked(levels: list[str], **arguments: Any) -> dict[str, Any]:
    """Of each kind and level: (measured, predicted) by name, of the third step or a later one.

    How much is alive at once depends on how soon the communicator's thread is done, so the step with the highest peak
    of a few counts.
    """
    found: dict[str, Any] = {}
    for kind in KINDS:
        for level in levels:
            fresh(0)
            model, optimizer, loss = kind()
            expected = plan(model, optimizer, level, sample=lambda m=model, f=loss: f(m), **arguments)
            wrapped, optimizer, _ = group_sharded_parallel(model, optimizer, level, **arguments)
            for _ in range(2):
                step(wrapped, optimizer, loss)
            best: dict[str, Any] = {}
            for _ in range(5):
                optimizer.clear_grad()
                with expected.check(wrapped, optimizer) as check:
                    step(wrapped, optimizer, loss)
                rows = {row.name: (row.measured, row.predicted) for row in check.rows}
                best = rows if not best or rows["peak"][0] > best["peak"][0] else best
                if best["peak"][0] >= 0.9 * best["peak"][1]:
                    break
            found[f"{kind.__name__} {level}"] = best
            text = str(check)
            del wrapped, optimizer, model, loss, expected, check
    found["text"] = text
    return found


def step(model: Any, optimizer: Any, loss: Callable[[Any], Tensor]) -> None:
    optimizer.clear_grad()
    loss(model).backward()
    optimizer.step()


def replicated() -> dict[str, Any]:
    """Of each level on one rank with a replica on the other: the first step."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    pair = dist.new_group([0, 1])
    found = {}
    for level in ("os", "os_g", "p_g_os"):
        fresh(0)
        model, optimizer, loss = tied()
        expected = plan(model, optimizer, level, 1, dp_size=2, sample=lambda m=model, f=loss: f(m))
        wrapped, optimizer, _ = group_sharded_parallel(model, optimizer, level, group=alone, dp_group=pair)
        with expected.check(wrapped, optimizer) as check:
            step(wrapped, optimizer, loss)
        found[level] = {row.name: (row.measured, row.predicted) for row in check.rows}
    return found


def refused() -> dict[str, str]:
    """The messages."""
    model, optimizer, _ = blocks()
    right = plan(model, optimizer, "p_g_os")
    replicas = plan(model, optimizer, dp_size=3)
    messages = {"plain": message(lambda: right.check(model, optimizer).__enter__())}
    wrapped, sharded, _ = group_sharded_parallel(model, optimizer, "os")
    messages["level"] = message(lambda: right.check(wrapped, sharded).__enter__())
    messages["replicas"] = message(lambda: replicas.check(wrapped, sharded).__enter__())
    messages["wrapped"] = message(lambda: plan(wrapped, sharded))
    return messages


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return "no error"

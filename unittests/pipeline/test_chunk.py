"""Recompute of layers with buffers beside the same layers without it, in one process."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from paddle_group_sharded.paddle_compat import allocated_bytes
from paddle_group_sharded.pipeline.chunk import Chunk, SharedForward

Tensor = Any


class Average(nn.Layer):
    """Subtracts a moving average that its forward moves, by writing or by replacing; some calls only."""

    def __init__(self, replaces: bool, rarely: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", paddle.zeros([4]))
        self.register_buffer("count", paddle.zeros([1], dtype="int64"))
        self.register_buffer("mask", paddle.ones([4], dtype="bool"))
        self.replaces, self.rarely = replaces, rarely

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.mask.astype("float32")
        mean = self.mean * 1.0
        with paddle.no_grad():
            if not self.rarely or float(x.mean().item()) > 0:
                moved = self.mean * 0.5 + 0.5 * y.mean(0)
                if self.replaces:
                    self.mean = moved.detach()
                else:
                    self.mean.set_value(moved)
                self.count.add_(paddle.ones([1], dtype="int64"))
        return F.tanh(y - mean) * (1.0 + 0.1 * (self.count % 3).astype("float32"))


class Twin(nn.Layer):
    """Two layers that hold one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Average(False), Average(False)
        self.second.mean = self.first.mean

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


LAYERS: dict[str, Callable[[], Any]] = {
    "written": lambda: Average(False),
    "replaced": lambda: Average(True),
    "rarely": lambda: Average(False, rarely=True),
    "two names": Twin,
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "batch norm": lambda: nn.BatchNorm1D(4),
    "shared": lambda: SharedForward(Average(True), lambda layer, x: layer(x) * 2),
}


def run(name: str, interval: int) -> list[Any]:
    paddle.seed(1)
    layers = [nn.Linear(4, 4), LAYERS[name](), F.tanh, LAYERS[name](), nn.Linear(4, 4)]
    chunk = Chunk(0, 0, layers, interval)
    owners = [layer.layer if isinstance(layer, SharedForward) else layer for layer in layers]
    net = nn.LayerList([layer for layer in owners if isinstance(layer, nn.Layer)])
    optimizer = paddle.optimizer.SGD(0.5, parameters=net.parameters())
    seen = []
    for _ in range(3):
        losses = [chunk(paddle.randn([5, 4])).square().sum() for _ in range(3)]  # three are under way
        seen += [tensor.astype("float64").numpy() for tensor in net.buffers()]
        kept = [id(tensor) for tensor in net.buffers()]
        for loss in losses:
            loss.backward()
        assert [id(tensor) for tensor in net.buffers()] == kept
        seen += [tensor.astype("float64").numpy() for tensor in net.state_dict().values()]
        seen += [param.grad.numpy() for param in net.parameters() if not param.stop_gradient]
        seen += [np.array([float(loss.item()) for loss in losses])]
        optimizer.step()
        optimizer.clear_grad()
    return seen


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_the_second_run_starts_where_the_first_one_did(name: str, interval: int) -> None:
    expected, found = run(name, 0), run(name, interval)
    assert len(expected) == len(found) > 20
    for mine, theirs in zip(found, expected):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_buffer_that_stays_is_kept_once() -> None:
    layer = nn.Linear(4, 4)
    layer.register_buffer("mask", paddle.ones([250_000]))
    chunk = Chunk(0, 0, [layer], 1)
    before = allocated_bytes()
    losses = [chunk(paddle.ones([1, 4])).sum() for _ in range(5)]
    assert allocated_bytes() - before < 1_100_000
    for loss in losses:
        loss.backward()

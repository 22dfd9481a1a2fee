"""Weight gradients that are put off beside Paddle's own, in one process."""

from __future__ import annotations

import contextlib
import gc
from typing import Any, Callable

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paddle_group_sharded.paddle_compat import allocated_bytes
from paddle_group_sharded.pipeline.weight_grad import Pending, WeightGrads

Tensor = Any


def conv_cases() -> dict[str, tuple[Callable[[], nn.Layer], list[int]]]:
    return {
        "linear": (lambda: nn.Linear(6, 4), [5, 6]),
        "linear without bias, 3-D": (lambda: nn.Linear(6, 4, bias_attr=False), [2, 3, 6]),
        "linear, 1-D": (lambda: nn.Linear(6, 4), [6]),
        "conv1d": (lambda: nn.Conv1D(4, 6, 3, stride=2, padding=1, groups=2), [2, 4, 9]),
        "conv1d, channels last": (lambda: nn.Conv1D(4, 6, 3, padding=1, data_format="NLC"), [2, 9, 4]),
        "conv2d": (lambda: nn.Conv2D(3, 4, 3), [2, 3, 7, 6]),
        "conv2d, stride that leaves a rest": (lambda: nn.Conv2D(3, 4, 3, stride=(3, 2), padding=[1, 0]), [2, 3, 9, 8]),
        "conv2d, dilation": (lambda: nn.Conv2D(3, 4, 3, dilation=2, padding=2, bias_attr=False), [2, 3, 9, 8]),
        "conv2d, depthwise": (lambda: nn.Conv2D(4, 8, 3, groups=4, padding=1), [2, 4, 5, 5]),
        "conv2d, channels last": (lambda: nn.Conv2D(3, 4, 3, stride=2, data_format="NHWC"), [2, 8, 8, 3]),
        "conv3d": (lambda: nn.Conv3D(2, 3, 2, stride=2, padding=1), [1, 2, 5, 4, 5]),
        "transposed 1d": (lambda: nn.Conv1DTranspose(4, 3, 3, stride=2, output_padding=1), [2, 4, 5]),
        "transposed 2d": (lambda: nn.Conv2DTranspose(4, 6, 3, stride=2, padding=1, groups=2), [2, 4, 5, 4]),
        "transposed 3d": (lambda: nn.Conv3DTranspose(2, 3, 2, stride=2), [1, 2, 3, 2, 3]),
    }


JOINT = {
    "conv2d, padding by name": (lambda: nn.Conv2D(3, 4, 3, padding="SAME"), [2, 3, 7, 7]),
    "conv2d, reflected": (lambda: nn.Conv2D(3, 4, 3, padding=1, padding_mode="reflect"), [2, 3, 7, 7]),
}


def grads_of(layer: nn.Layer, x: Tensor) -> list[Any]:
    tensors = [x, *layer.parameters()]
    return [None if t.grad is None else t.grad.numpy().copy() for t in tensors]


def check_close(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def run_both(layer: nn.Layer, call: Callable[[Tensor], Tensor], x: Tensor, needs: bool, split: bool) -> int:
    """Compare with plain Paddle over two micro-batches; returns how many tensors had no gradient before W."""
    x.stop_gradient = not needs
    expected: list[Any] = []
    late = 0
    for own in (False, True):
        layer.clear_gradients()
        for tensor in (x, *layer.parameters()):
            tensor.clear_gradient(False)
        weight_grads = WeightGrads([layer])
        with weight_grads.installed() if own else contextlib.nullcontext():
            for scale in (1.0, 2.0):
                y = call(x * scale if needs else x)
                loss = (y * paddle.cos(paddle.arange(y.size).astype("float32")).reshape(y.shape)).sum()
                if own and split:
                    with weight_grads.deferred() as pending:
                        loss.backward()
                    if scale == 1.0:
                        late = sum(param.grad is None for param in layer.parameters())
                    pending.compute()
                elif own:
                    loss.backward()
                else:
                    loss.backward()
        if own:
            check_close(grads_of(layer, x), expected)
        expected = grads_of(layer, x)
    assert "forward" not in vars(layer)
    return late


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("needs", [True, False], ids=["input needs it", "input does not"])
@pytest.mark.parametrize("name", conv_cases())
def test_every_layer_that_defers(name: str, needs: bool, split: bool) -> None:
    build, shape = conv_cases()[name]
    paddle.seed(0)
    layer = build()
    late = run_both(layer, layer, paddle.randn(shape), needs, split)
    assert late == (len(layer.parameters()) if split else 0)


@pytest.mark.parametrize("name", JOINT)
def test_what_is_not_known_is_joint(name: str) -> None:
    build, shape = JOINT[name]
    layer = build()
    assert run_both(layer, layer, paddle.randn(shape), True, True) == 0


class Swapped(nn.Layer):
    """Computes the weight of a layer within its own forward, and puts the parameter back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = self.create_parameter([4])

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner
        weight = inner._parameters.pop("weight")
        inner.weight = weight * (self.scale + x.mean(0)).unsqueeze(-1)
        try:
            return inner(x)
        finally:
            vars(inner).pop("weight", None)
            inner._parameters["weight"] = weight


def patched() -> nn.Layer:
    """A low-rank addition, in the manner of LoRA: the forward of one object is replaced."""
    layer = nn.Linear(4, 4)
    layer.lora = layer.create_parameter([4, 4])
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias) + paddle.matmul(x, layer.lora)
    return layer


def hooked() -> nn.Layer:
    """A hook that gives the weight another value for each call."""
    layer = nn.Linear(4, 4)
    layer.twin = layer.create_parameter([4, 4])
    weights = [layer.weight, layer.twin]

    def turn(layer: nn.Layer, inputs: Any) -> None:
        weights.reverse()
        layer.weight = weights[0]

    layer.register_forward_pre_hook(turn)
    return layer


OWN_WAYS: dict[str, Callable[[], nn.Layer]] = {
    "forward of the object": patched,
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
    "weight_norm of a convolution": lambda: nn.Sequential(
        nn.Unflatten(1, [2, 2]), nn.utils.weight_norm(nn.Conv1D(2, 2, 1)), nn.Flatten(1)
    ),
    "swapped": Swapped,
    "hooked": hooked,
}


@pytest.mark.parametrize("name", OWN_WAYS)
def test_layers_with_ways_of_their_own_are_joint(name: str) -> None:
    found = []
    for own in (False, True):
        paddle.seed(3)
        net = nn.Sequential(nn.Linear(4, 4), OWN_WAYS[name]())
        before = vars(net[1]).get("forward")
        weight_grads = WeightGrads([net])
        with weight_grads.installed() if own else contextlib.nullcontext():
            waiting = []
            for scale in (1.0, 2.0):
                loss = F.tanh(net(paddle.randn([3, 4]) * scale)).sum()
                with weight_grads.deferred() if own else contextlib.nullcontext() as pending:
                    loss.backward()
                waiting.append(pending)
            if own:
                assert net[0].weight.grad is None  # the layer before it waits
                waiting[0].compute(), waiting[1].compute()
        assert vars(net[1]).get("forward") is before and (before is not None) == (name == "forward of the object")
        found.append([None if param.grad is None else param.grad.numpy() for param in net.parameters()])
        assert all(grad is not None for grad in found[0])
    check_close(found[1], found[0])


class Net(nn.Layer):
    """Tied weights, a frozen one, a layer used twice, an own forward, and layers that do not defer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.weight.stop_gradient = True
        self.still = nn.Linear(4, 4)
        for param in self.still.parameters():
            param.stop_gradient = True
        self.norm = nn.LayerNorm(4)
        self.unused = nn.Linear(4, 4)

    def block(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.tied(self.first(x))))

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        x = recompute(self.block, x) if again else self.block(x)
        x = self.still(self.frozen(self.first(x)))
        return x + paddle.matmul(x, self.first.weight)


@pytest.mark.parametrize("again", [False, True], ids=["plain", "recompute"])
@pytest.mark.parametrize("split", [True, False])
def test_tied_frozen_and_recomputed(again: bool, split: bool) -> None:
    paddle.seed(0)
    net = Net()
    late = run_both(net, lambda x: net(x, again), paddle.randn([3, 4]), True, split)
    # Biases of first, tied and frozen wait.  Without a gradient at any time are frozen.weight, and all of still and
    # unused.  The tied weight has a part from outside of its layer, and the norm is joint.
    assert late == (3 + 5 if split else 0)


def test_hooks_of_parameters_fire_and_no_grad_is_plain() -> None:
    layer = nn.Linear(3, 2)
    fired: list[str] = []
    layer.weight.register_hook(lambda grad: fired.append("weight"))
    weight_grads = WeightGrads([layer])
    with weight_grads.installed():
        with paddle.no_grad():
            assert layer(paddle.ones([1, 3])).stop_gradient
        with weight_grads.deferred() as pending:
            layer(paddle.ones([1, 3])).sum().backward()
        assert fired == []
        pending.compute()
    assert fired == ["weight"]


def test_nothing_is_kept_afterwards() -> None:
    layer = nn.Linear(64, 64)
    weight_grads = WeightGrads([layer])
    layer.weight.grad, layer.bias.grad = paddle.zeros([64, 64]), paddle.zeros([64])
    x = paddle.ones([1000, 64])
    gc.collect()
    before = allocated_bytes()
    with weight_grads.installed(), weight_grads.deferred() as pending:
        layer(x).sum().backward()
    assert allocated_bytes() > before
    pending.compute()
    assert allocated_bytes() == before
    Pending().compute()

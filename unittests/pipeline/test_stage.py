"""One stage in one process: what it keeps, what it frees, and the gradients that it makes."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_group_sharded.paddle_compat import allocated_bytes
from paddle_group_sharded.pipeline.boundary import pack
from paddle_group_sharded.pipeline.stage import Parcel, Stage
from paddle_group_sharded.pipeline.weight_grad import WeightGrads


def leaf(*shape: int) -> Any:
    tensor = paddle.randn(shape)
    tensor.stop_gradient = False
    return tensor


def test_outputs_are_freed_once_sent_and_leave_their_graph() -> None:
    linear = nn.Linear(4, 250_000)
    stage = Stage(lambda batch, x: linear(x), "stage 0")
    x = leaf(1, 4)
    expected = x.detach().clone()
    expected.stop_gradient = False
    gc.collect()
    before = allocated_bytes()
    made = stage.forward(0, Parcel(*pack(x, "data")))
    assert allocated_bytes() - before >= 1_000_000 and stage.live == 1
    del made
    assert allocated_bytes() - before < 1_000
    (grad,) = stage.backward(0, [paddle.ones([1, 250_000])])
    weights = linear.weight.grad.numpy()
    linear.clear_gradients()
    linear(expected).sum().backward()
    np.testing.assert_array_equal(grad.numpy(), expected.grad.numpy())
    np.testing.assert_array_equal(weights, linear.weight.grad.numpy())
    assert stage.live == 0


def test_gradients_of_several_outputs_some_of_which_none_came_for() -> None:
    scale = paddle.create_parameter([3], "float32", default_initializer=nn.initializer.Constant(2.0))
    unused = paddle.create_parameter([3], "float32")

    def run(batch: int, value: tuple[Any, Any, Any]) -> tuple[Any, ...]:
        a, b, number = value
        return a * scale, b, a * unused, number, a.detach(), b

    stage = Stage(run, "stage 0")
    a, b = leaf(3), leaf(3)
    made = stage.forward(4, Parcel(*pack((a, b, paddle.arange(2)), "data")))
    assert len(made.tensors) == 5, "b stands twice"
    ones = paddle.ones([3])
    grads = stage.backward(4, [ones, ones * 3, None])  # of those that need one: a * scale, b, a * unused
    assert grads[0].tolist() == [2.0] * 3 and grads[1].tolist() == [3.0] * 3 and len(grads) == 2
    np.testing.assert_allclose(scale.grad.numpy(), a.numpy())
    assert unused.grad is None
    again = stage.forward(5, Parcel(*pack((leaf(3), leaf(3), None), "data")))
    assert again.structure[3] is None
    assert stage.backward(5, [None, None, None]) == [None, None]


def test_split_backward_counts_as_live_until_its_weights() -> None:
    linear = nn.Linear(3, 3)
    weight_grads = WeightGrads([linear])
    stage = Stage(lambda batch, x: linear(x), "stage 1", weight_grads)
    with weight_grads.installed():
        for batch in range(2):
            stage.forward(batch, Parcel(*pack(leaf(2, 3), "data")))
        assert stage.live == 2
        (grad,) = stage.backward_inputs(0, [paddle.ones([2, 3])])
        np.testing.assert_allclose(grad.numpy()[0], linear.weight.numpy().sum(1), rtol=1e-6)
        assert stage.live == 2 and linear.weight.grad is None
        stage.backward_weights(0)
        assert stage.live == 1 and linear.bias.grad.tolist() == [2.0] * 3
    stage.reset()
    assert stage.live == 0


def test_a_stage_without_gradients_and_inference() -> None:
    stage = Stage(lambda batch, x: (x * 2, batch), "stage 0")
    made = stage.forward(7, Parcel(*pack(paddle.ones([2]), "data")))
    assert made.structure[1] == 7 and made.tensors[0].stop_gradient
    assert stage.backward(7, []) == []
    doubled, batch = stage.infer(3, Parcel(*pack(paddle.ones([2]), "data")))
    assert doubled.tolist() == [2.0, 2.0] and batch == 3 and stage.live == 0

"""Every private Paddle name of the pipeline does on this version what its docstring says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_group_sharded import paddle_pipeline as compat
from unittests.sharding.dygraph_scaler import enabled_scaler


def linear(grad: float = 1.0) -> nn.Layer:
    layer = nn.Linear(2, 2)
    for param in layer.parameters():
        param.grad = paddle.full(param.shape, grad)
    return layer


def test_every_function_is_tested_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in compat.__all__ if not re.search(rf"compat\.{name}\b", text)] == []


def test_conv_options_call_the_function_of_the_layer() -> None:
    layer = nn.Conv2D(4, 6, 3, stride=2, padding=[1, 0], dilation=1, groups=2)
    x = paddle.randn([1, 4, 7, 7])
    again = nn.functional.conv2d(x, layer.weight, layer.bias, **(compat.conv_options(layer) or {}))
    np.testing.assert_array_equal(again.numpy(), layer(x).numpy())
    assert compat.conv_options(nn.Conv2D(4, 6, 3, padding="SAME")) is None
    assert compat.conv_options(nn.Conv1D(4, 6, 3, padding=1, padding_mode="circular")) is None
    assert compat.conv_options(nn.Conv2D(4, 6, 3, padding=[[0, 0], [0, 0], [1, 1], [1, 1]])) is None


def test_clip_of_looks_through_fleets_wrapper() -> None:
    inner = nn.ClipGradByGlobalNorm(1.0)

    class HybridParallelClipGrad:
        _clip = inner

    assert compat.clip_of(HybridParallelClipGrad()) is inner
    assert compat.clip_of(inner) is inner and compat.clip_of(None) is None


@pytest.mark.parametrize("grouped", [False, True])
def test_without_clips_removes_some_for_a_while(grouped: bool) -> None:
    layer = linear(10.0)
    clip = nn.ClipGradByGlobalNorm(1.0)
    params: Any = layer.parameters()
    if grouped:
        params = [{"params": [param], "grad_clip": clip} for param in params]
    optimizer = paddle.optimizer.SGD(1.0, parameters=params, grad_clip=clip)
    before = [param.numpy().copy() for param in layer.parameters()]
    with pytest.raises(KeyError), compat.without_clips(optimizer, lambda each: each is clip):
        optimizer.step()
        raise KeyError
    for param, old in zip(layer.parameters(), before):
        np.testing.assert_allclose(old - param.numpy(), 10.0, rtol=1e-6)
    before = [param.numpy().copy() for param in layer.parameters()]
    with compat.without_clips(optimizer, lambda each: False):
        optimizer.step()
    moved = max(float(np.abs(old - param.numpy()).max()) for param, old in zip(layer.parameters(), before))
    assert moved <= 1.0


@pytest.mark.parametrize("value", [4.0, float("inf"), float("nan")])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_scaler_steps_by_a_decision_that_was_made_elsewhere(value: float, elsewhere: bool) -> None:
    layer = linear(value)
    optimizer = paddle.optimizer.SGD(1.0, parameters=layer.parameters())
    scaler = enabled_scaler(init_loss_scaling=4.0, incr_every_n_steps=1, decr_every_n_nan_or_inf=1)
    before = layer.weight.numpy().copy()
    mine = compat.unscale_grads(scaler, optimizer)
    assert mine == (not np.isfinite(value))
    compat.step_with_scaler(scaler, optimizer, mine or elsewhere)
    scale = float(scaler._scale.reshape([]).item())
    if mine or elsewhere:
        assert (layer.weight.numpy() == before).all() and scale == 2.0
    else:
        np.testing.assert_allclose(before - layer.weight.numpy(), 1.0, rtol=1e-6)
        assert scale == 8.0
    for param in layer.parameters():
        param.grad = paddle.ones(param.shape)
    assert not compat.unscale_grads(scaler, optimizer), "a new step begins"


@pytest.mark.parametrize("overflow", [False, True])
def test_update_scale_without_anything_to_step(overflow: bool) -> None:
    scaler = enabled_scaler(init_loss_scaling=4.0, incr_every_n_steps=1, decr_every_n_nan_or_inf=1)
    compat.update_scale(scaler, overflow)
    assert float(scaler._scale.reshape([]).item()) == (2.0 if overflow else 8.0)


def test_auto_casts_tells_whether_dtypes_are_changed() -> None:
    from paddle.base import core, framework

    tracer = framework._dygraph_tracer()
    assert not compat.auto_casts()
    with paddle.amp.auto_cast(enable=False):
        assert not compat.auto_casts()
    before = tracer._amp_level
    try:
        for level in (core.AmpLevel.O1, core.AmpLevel.O2):  # auto_cast sets it on accelerators only
            tracer._amp_level = level
            assert compat.auto_casts()
    finally:
        tracer._amp_level = before
    assert not compat.auto_casts()


def test_has_forward_hooks() -> None:
    layer = paddle.nn.Linear(2, 2)
    assert not compat.has_forward_hooks(layer)
    for register in (layer.register_forward_pre_hook, layer.register_forward_post_hook):
        handle = register(lambda *given: None)
        assert compat.has_forward_hooks(layer)
        handle.remove()
        assert not compat.has_forward_hooks(layer)

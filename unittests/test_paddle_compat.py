"""Every function of paddle_compat.py on the Paddle that is installed; run with each supported version."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_group_sharded import paddle_compat as compat
from unittests.harness import Ranks

WORKER = "unittests.dygraph_paddle_compat"


@pytest.fixture(autouse=True)
def _on_cpu() -> None:
    paddle.set_device("cpu")


def ramp(*shape: int) -> Any:
    return paddle.arange(int(np.prod(shape)), dtype="float32").reshape(list(shape))


def linear() -> nn.Linear:
    return nn.Linear(3, 2)


def backward(layer: Any) -> None:
    layer(paddle.ones([4, 3])).sum().backward()


def test_every_function_has_a_test() -> None:
    text = Path(__file__).read_text() + Path(__file__).with_name("dygraph_paddle_compat.py").read_text()
    assert [name for name in compat.__all__ if f"compat.{name}" not in text and f"{name}(" not in text] == []


# -------------------------------------------------------------------------------------------------------------- memory


def test_allocated_and_peak_bytes() -> None:
    before = compat.allocated_bytes()
    tensor = paddle.zeros([1 << 20])
    assert compat.allocated_bytes() - before == 4 << 20
    highest = compat.peak_bytes()
    assert highest >= before + (4 << 20)
    del tensor
    assert compat.allocated_bytes() == before
    assert compat.peak_bytes() == highest


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("float64", 8), ("bfloat16", 2), ("float16", 2), ("bool", 1)]
)
def test_element_size(dtype: str, size: int) -> None:
    assert compat.element_size(paddle.zeros([1]).astype(dtype).dtype) == size


def test_flat_view_shares_memory_and_outlives_its_tensor() -> None:
    tensor = ramp(2, 3)
    whole, part = compat.flat_view(tensor), compat.flat_view(tensor, 2, 5)
    assert whole.shape == [6] and part.numpy().tolist() == [2, 3, 4]
    part.scale_(10.0)
    assert tensor.numpy().tolist() == [[0, 1, 20], [30, 40, 5]]
    del tensor, whole
    gc.collect()
    assert part.numpy().tolist() == [20, 30, 40]
    assert compat.flat_view(paddle.to_tensor(3.0)).shape == [1]


def test_bind_views_cuts_one_buffer_for_many() -> None:
    first, second, nothing = paddle.zeros([2, 3]), paddle.zeros([4]), paddle.zeros([0, 2])
    buffer = paddle.arange(12, dtype="float32")
    compat.bind_views(buffer, [(first, 1, 7, [2, 3]), (nothing, 7, 7, [0, 2]), (second, 8, 12, [4])])
    assert first.tolist() == [[1, 2, 3], [4, 5, 6]] and second.tolist() == [8, 9, 10, 11]
    assert list(nothing.shape) == [0, 2]
    buffer.scale_(2.0)
    assert first.tolist() == [[2, 4, 6], [8, 10, 12]] and second.tolist() == [16, 18, 20, 22]


def test_bind_view_keeps_the_shape_and_is_seen_by_autograd() -> None:
    layer, buffer = linear(), ramp(10)
    compat.bind_view(layer.weight, buffer, 2, 8)
    assert layer.weight.shape == [3, 2] and layer.weight.numpy().tolist() == [[2, 3], [4, 5], [6, 7]]
    x = paddle.ones([1, 3])
    x.stop_gradient = False
    out = layer(x).sum()
    other = ramp(10) + 1
    compat.bind_view(layer.weight, other, 2, 8)  # between forward and backward: the saved tensor sees the new memory
    out.backward()
    assert x.grad.numpy().tolist() == [[3 + 4, 5 + 6, 7 + 8]]
    buffer.scale_(0.0)
    assert layer.weight.numpy().tolist() == [[3, 4], [5, 6], [7, 8]]


def test_release_and_has_memory() -> None:
    layer = linear()
    assert compat.has_memory(layer.weight)
    before = compat.allocated_bytes()
    compat.release(layer.weight)
    assert not compat.has_memory(layer.weight)
    assert layer.weight.shape == [3, 2] and compat.allocated_bytes() < before
    assert compat.with_memory([layer.weight, layer.bias]) == [1]
    with pytest.raises((RuntimeError, ValueError)):
        layer(paddle.ones([1, 3]))


def test_share_memory() -> None:
    source, target = ramp(6), linear().weight
    compat.share_memory(source, target)
    source.scale_(2.0)
    assert target.numpy().reshape(-1).tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64"])
def test_host_view_and_tensor_over(dtype: str) -> None:
    tensor = ramp(2, 3).astype(dtype)
    array = compat.host_view(tensor)
    assert array.shape == (6,) and array.dtype == np.dtype("uint16" if dtype == "bfloat16" else dtype)
    array[1] = array[5]
    assert tensor.astype("float32").numpy().reshape(-1).tolist() == [0, 5, 2, 3, 4, 5]
    again = compat.tensor_over(array)
    assert again.dtype == tensor.dtype
    array[0] = array[5]
    del tensor, array
    gc.collect()
    assert again.astype("float32").numpy().tolist() == [5, 5, 2, 3, 4, 5]


def test_host_memory_knows_who_looks_at_it() -> None:
    before = compat.allocated_bytes()
    memory = compat.HostMemory(1000, paddle.float32)
    assert compat.allocated_bytes() - before >= 4000 and not memory.in_use
    tensor = memory.tensor()
    assert tensor.shape == [1000] and memory.in_use
    view = compat.flat_view(tensor, 10, 20)
    del tensor
    assert memory.in_use
    del view
    gc.collect()
    assert not memory.in_use
    del memory
    gc.collect()
    assert compat.allocated_bytes() == before


# -------------------------------------------------------------------------------------------------------------- layers


def test_layer_params_and_set_layer_params() -> None:
    layer = linear()
    plain = compat.layer_params(layer)
    assert list(plain) == ["weight", "bias"]
    seen: list[str] = []

    class Watched(dict):  # type: ignore[type-arg]
        def __getitem__(self, name: str) -> Any:
            seen.append(name)
            return super().__getitem__(name)

    compat.set_layer_params(layer, Watched(plain))
    assert layer.weight is plain["weight"] and seen == ["weight"]
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"] and seen == ["weight"]


def test_unwrapped_layer() -> None:
    class MixPrecisionLayer(nn.Layer):
        def __init__(self, layers: Any) -> None:
            super().__init__()
            self._layers = layers

    layer = linear()
    assert compat.unwrapped_layer(MixPrecisionLayer(layer)) is layer
    assert compat.unwrapped_layer(layer) is layer


def test_forward_pre_hooks() -> None:
    layer = linear()

    def hook(*_: Any) -> None:
        pass

    handle = layer.register_forward_pre_hook(hook)
    assert compat.forward_pre_hooks(layer) == [hook]
    handle.remove()
    assert compat.forward_pre_hooks(layer) == []


# ----------------------------------------------------------------------------------------------------------- gradients


def test_on_grad_ready_runs_once_after_accumulation() -> None:
    weight = linear().weight
    seen: list[float] = []
    compat.on_grad_ready(weight, lambda *_: seen.append(float(weight.grad.sum().item())))
    (weight * 2 + weight * 3).sum().backward()  # used twice
    assert seen == [30.0]
    weight.sum().backward()
    assert seen == [30.0, 36.0]


def test_on_gradient_runs_before_what_made_the_tensor() -> None:
    layer, events = linear(), []
    compat.on_grad_ready(layer.weight, lambda *_: events.append("weight"))
    for _ in range(2):
        hidden = layer(paddle.ones([1, 3]))
        compat.on_gradient(hidden, lambda grad: events.append(grad.tolist()))
        (hidden * 2).sum().backward()
    assert events == [[[2.0, 2.0]], "weight"] * 2


def test_on_backward_end_runs_once_at_the_end() -> None:
    first, second = linear(), nn.Linear(2, 2)
    events: list[str] = []

    def ready(*_: Any) -> None:
        if not events:
            compat.on_backward_end(lambda: events.append("end"))
        events.append("grad")

    for param in (*first.parameters(), *second.parameters()):
        compat.on_grad_ready(param, ready)
    second(first(paddle.ones([1, 3]))).sum().backward()
    assert events == ["grad"] * 4 + ["end"]


def test_with_grad() -> None:
    layer = linear()
    (layer.weight.sum() + 1).backward()
    assert compat.with_grad([layer.bias, layer.weight]) == [1]
    layer.bias.main_grad = paddle.ones([2])
    compat.drop_grad(layer.weight)
    assert compat.with_grad([layer.bias, layer.weight]) == [0]


def test_gradients_are_seen_and_dropped() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(paddle.to_tensor([1, 3])).sum().backward()
    assert compat.is_sparse(compat.grad_of(embedding.weight))
    layer = linear()
    assert compat.grad_of(layer.weight) is None and not compat.has_grad(layer.weight)
    compat.drop_grad(layer.weight)
    backward(layer)
    grad = compat.grad_of(layer.weight)
    assert not compat.is_sparse(grad) and compat.has_grad(layer.weight)
    flat = compat.flat_grad(grad)
    compat.drop_grad(layer.weight)
    assert flat.numpy().tolist() == [4.0] * 6  # it has outlived the parameter's own
    assert compat.grad_of(layer.weight) is None and not compat.has_grad(layer.weight)
    backward(layer)
    assert layer.weight.grad.numpy().tolist() == [[4.0, 4.0]] * 3  # what was dropped is not added to
    layer.weight.main_grad = ramp(3, 2)
    assert compat.has_grad(layer.weight) and compat.grad_of(layer.weight).shape == [3, 2]
    compat.drop_grad(layer.weight)
    assert layer.weight.main_grad is None and not compat.has_grad(layer.weight)


def test_lazy_parameters() -> None:
    """Filled for good or not, with the values of an ordinary construction."""
    paddle.seed(7)
    expected = nn.Linear(3, 2).weight.numpy()
    with paddle.LazyGuard():
        layer = nn.Linear(3, 2)
    assert compat.is_lazy(layer.weight) and not compat.has_memory(layer.weight)
    for for_good in (False, True):
        paddle.seed(7)
        compat.fill_lazy(layer.weight, for_good)
        assert (layer.weight.numpy() == expected).all()
        assert compat.is_lazy(layer.weight) == (not for_good)


def test_functions_of_params() -> None:
    """Those of an optimizer and of a group, of a parameter and of its name."""
    layer = linear()
    optimizer = paddle.optimizer.AdamW(parameters=layer.parameters(), apply_decay_param_fun=lambda name: ".w_" in name)
    of_group = {"_lr_ratio": lambda param: float(param.size), "weight_decay": 0.1}
    functions = compat.functions_of_params(optimizer, of_group)
    assert [function(layer.weight) for function in functions] == [True, 6.0]
    assert [function(layer.bias) for function in functions] == [False, 2.0]


def test_pending_states_are_added_and_taken() -> None:
    layer = linear()
    optimizer = paddle.optimizer.Momentum(0.1, parameters=layer.parameters())
    key = f"{layer.weight.name}_velocity_0"
    compat.add_pending_states(optimizer, {key: paddle.full([3, 2], 5.0)})
    assert list(compat.pending_states(optimizer)) == [key]
    backward(layer)
    optimizer.step()
    velocity = compat.accumulators(optimizer)["velocity"][layer.weight.name]
    assert velocity.numpy().tolist() == [[0.9 * 5.0 + 4.0] * 2] * 3


def test_flat_grad_of_a_transposed_weight() -> None:
    weight = linear().weight
    x = ramp(2, 1)
    paddle.matmul(x, weight.t(), transpose_x=True).sum().backward()
    assert compat.flat_grad(compat.grad_of(weight)).numpy().tolist() == [0, 1] * 3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_packed(dtype: str) -> None:
    """Three tensors at multiples of 8, one of them transposed, with zeros between them."""
    tensors = [ramp(2, 3).astype(dtype), ramp(2, 6).astype(dtype).t(), paddle.to_tensor(7.0, dtype=dtype)]
    gaps = np.array([6, 7, 20, 21, 22, 23])
    buffer = compat.packed(tensors, 8, gaps)
    expected = [*range(6), 0, 0, *(6 * row + column for column in range(6) for row in range(2)), 0, 0, 0, 0, 7]
    assert buffer.numpy()[:25].tolist() == expected and str(buffer.dtype).endswith(dtype)
    assert tensors[0].numpy().tolist() == [[0, 1, 2], [3, 4, 5]]


# ---------------------------------------------------------------------------------------------------------- optimizers


def test_new_param_and_copy_options() -> None:
    layer = nn.Linear(3, 2, weight_attr=paddle.ParamAttr(name="mine", learning_rate=0.5, need_clip=False))
    layer.weight.extra = "kept"
    param = compat.new_param(layer.weight, [4], paddle.float32)
    assert (param.name, param.shape, param.need_clip, param.extra) == ("mine", [4], False, "kept")
    assert param.optimize_attr["learning_rate"] == 0.5 and not param.stop_gradient and not compat.has_memory(param)
    layer.weight.need_clip = True
    compat.copy_options(layer.weight, param)
    assert param.need_clip is True


@pytest.mark.parametrize("grouped", [False, True])
def test_step_units_and_param_groups(grouped: bool) -> None:
    """Against the optimizer's own step."""
    results = []
    for by_units in (False, True):
        layer = linear()
        for param in layer.parameters():
            param.set_value(paddle.ones(param.shape))
        params: Any = layer.parameters()
        if grouped:
            params = [{"params": [layer.weight], "learning_rate": 0.5}, {"params": [layer.bias], "weight_decay": 0.3}]
        clip = nn.ClipGradByGlobalNorm(0.01)
        grad_clip = clip if by_units else None
        optimizer = paddle.optimizer.AdamW(0.1, parameters=params, weight_decay=0.1, grad_clip=grad_clip)
        backward(layer)
        if by_units:
            plan = [
                {**options, "params": [(param, param.grad) for param in tensors]}
                for options, tensors, _ in compat.param_groups(optimizer)
            ]
            compat.step_units(optimizer, plan, {param.name: param for param in layer.parameters()})
            groups = compat.param_groups(optimizer)
            assert [len(tensors) for _, tensors, _ in groups] == ([1, 1] if grouped else [2])
            assert all(found is clip for _, _, found in groups)
            assert optimizer._grad_clip is clip
        else:
            optimizer.step()
        results.append([param.numpy() for param in layer.parameters()])
    for expected, found in zip(*results):
        assert expected.tobytes() == found.tobytes() and not (found == 1).all()


def test_step_units_gives_the_users_functions_the_users_parameters() -> None:
    layer = linear()
    seen: list[Any] = []

    def exclude(param: Any) -> bool:
        seen.append(param)
        return True

    optimizer = paddle.optimizer.Lamb(0.1, parameters=layer.parameters(), exclude_from_weight_decay_fn=exclude)
    unit = compat.new_param(layer.weight, [6], paddle.float32)
    compat.bind_view(unit, paddle.zeros([6]), 0, 6)
    unit.name = "another name"
    compat.step_units(optimizer, [{"params": [(unit, paddle.ones([6]))]}], {"another name": layer.weight})
    assert all(param is layer.weight for param in seen) and seen
    assert optimizer._exclude_from_weight_decay_fn is exclude
    names: list[str] = []
    by_name = paddle.optimizer.AdamW(parameters=layer.parameters(), apply_decay_param_fun=names.append)
    compat.step_units(by_name, [{"params": [(unit, paddle.ones([6]))]}], {"another name": layer.weight})
    assert names and set(names) == {layer.weight.name}
    assert by_name._apply_decay_param_fun == names.append


def test_forget_fused_params() -> None:
    layer = linear()
    optimizer = paddle.optimizer.Momentum(0.1, parameters=layer.parameters(), use_multi_tensor=True)
    for _ in range(2):
        backward(layer)
        optimizer.step()
        optimizer.clear_grad()
    compat.forget_fused_params(optimizer)
    before = layer.weight.numpy().copy()
    backward(layer)
    optimizer.step()
    assert not (layer.weight.numpy() == before).any()


def test_innermost_optimizer() -> None:
    class Outer:
        def __init__(self, inner: Any) -> None:
            self._inner_opt = inner

    inner = paddle.optimizer.SGD(0.1, parameters=linear().parameters())
    assert compat.innermost_optimizer(Outer(Outer(inner))) is inner and compat.innermost_optimizer(inner) is inner


def test_optimizer_options_lr_scheduler_keeps_masters() -> None:
    params = linear().parameters()
    adam = paddle.optimizer.Adam(0.25, beta1=0.5, parameters=params, multi_precision=True)
    options = compat.optimizer_options(adam)
    assert options["_learning_rate"] == 0.25 and options["_beta1"] == 0.5 and options["_multi_precision"] is True
    assert compat.lr_scheduler(adam) is None and compat.keeps_masters(adam)
    scheduler = paddle.optimizer.lr.StepDecay(0.1, 2)
    sgd = paddle.optimizer.SGD(scheduler, parameters=params)
    assert compat.lr_scheduler(sgd) is scheduler and not compat.keeps_masters(sgd)


def test_overflow_flag() -> None:
    """GradScaler, which does nothing on CPU, leaves and reads it like this."""
    layer = linear()
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    assert compat.overflow_flag(optimizer) is None
    optimizer._set_auxiliary_var("found_inf", paddle.to_tensor([True]))
    assert bool(compat.overflow_flag(optimizer))
    compat.set_overflow_flag(optimizer, False)
    assert optimizer._get_auxiliary_var("found_inf") is False


def test_accumulators_and_create_accumulators() -> None:
    layer = linear()
    optimizer = paddle.optimizer.Adam(0.1, parameters=layer.parameters())
    compat.create_accumulators(optimizer, [layer.weight])
    table = compat.accumulators(optimizer)
    assert {"moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc"} <= set(table)
    assert list(table["moment1"]) == [layer.weight.name] and table["moment1"][layer.weight.name].shape == [3, 2]
    table["moment1"][layer.weight.name].set_value(paddle.ones([3, 2]))
    key = next(name for name in optimizer.state_dict() if "moment1" in name)
    assert optimizer.state_dict()[key].numpy().tolist() == [[1, 1]] * 3
    assert key.startswith(f"{layer.weight.name}_moment1_")


def test_master_weights_and_set_master_weights() -> None:
    layer = linear()
    layer.to(dtype="bfloat16")
    optimizer = paddle.optimizer.Adam(0.1, parameters=layer.parameters(), multi_precision=True)
    assert compat.master_weights(optimizer) == {}
    compat.create_accumulators(optimizer, layer.parameters())
    masters = compat.master_weights(optimizer)
    assert set(masters) == {layer.weight.name, layer.bias.name}
    assert masters[layer.weight.name].dtype == paddle.float32
    assert masters[layer.weight.name].name == f"{layer.weight.name}_fp32_master_0"
    assert set(compat.accumulators(optimizer)["moment1"]) == {master.name for master in masters.values()}
    compat.set_master_weights(optimizer, {})
    assert compat.master_weights(optimizer) == {}
    assert compat.master_weights(SimpleNamespace()) == {}


def test_pending_states_and_take_pending_states() -> None:
    layer = linear()
    optimizer = paddle.optimizer.Momentum(0.1, parameters=layer.parameters())
    state = {f"{layer.weight.name}_velocity_0": ramp(3, 2)}
    optimizer.set_state_dict(state)
    assert list(compat.pending_states(optimizer)) == list(state)
    assert list(compat.take_pending_states(optimizer)) == list(state)
    assert compat.pending_states(optimizer) == {}


@pytest.mark.parametrize("name", ["Adam", "Momentum", "Lamb", "SGD"])
def test_fresh_states_leaves_the_tables_as_they_were(name: str) -> None:
    layer = linear()
    optimizer = getattr(paddle.optimizer, name)(0.1, parameters=layer.parameters())
    backward(layer)
    optimizer.step()
    before = {key: value.numpy().tolist() for key, value in optimizer.state_dict().items()}
    pending = {"x": 1}
    optimizer._accumulators_holder = pending
    param = compat.new_param(layer.weight, [5], paddle.float32)
    compat.bind_view(param, paddle.zeros([5]), 0, 5)
    states = compat.fresh_states(optimizer, param)
    expected = {
        "Adam": {"moment1": [5], "moment2": [5], "beta1_pow_acc": [1], "beta2_pow_acc": [1]},
        "Lamb": {"moment1": [5], "moment2": [5], "beta1_pow_acc": [1], "beta2_pow_acc": [1]},
        "Momentum": {"velocity": [5]},
        "SGD": {},
    }[name]
    assert {key: state.shape for key, state in states.items()} == expected
    assert compat.pending_states(optimizer) == pending
    compat.take_pending_states(optimizer)
    assert {key: value.numpy().tolist() for key, value in optimizer.state_dict().items()} == before


# ------------------------------------------------------------------------------------------------------- communication


def test_current_host_without_a_launch(ranks: Ranks) -> None:
    assert compat.current_host() == "127.0.0.1"


def test_stores_and_host(ranks: Ranks) -> None:
    for found in ranks(2).run(WORKER, "store_and_host"):
        assert found == {"text": b"hello", "sum": 3, "host": "127.0.0.1", "own": 20}


def test_gloo_group(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(2).run(WORKER, "gloo_group")):
        assert found["full"].tolist() == [0, 0, 1, 1]
        assert found["sum"].tolist() == [3] * 3 and found["max"].tolist() == [2] * 3
        assert found["sent"].tolist() == [11, 11]
        assert found["received"].tolist() == ([0, 1, 2, 3] if rank else [0] * 4)

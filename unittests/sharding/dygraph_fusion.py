"""Inside a trainer: models of many small parameters, whose pieces share steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_group_sharded import group_sharded_parallel, unwrap
from unittests.harness import fresh

Tensor = Any
STEPS = 6
UNUSED = "layers.7."


class Stack(nn.Layer):
    """Twenty layers of 64 and 8 elements; one may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(8, 8) for _ in range(20)])

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        for index, layer in enumerate(self.layers):
            if not (skip and index == 7):
                x = layer(x)
        return x


def batch(step: int, rank: int) -> Tensor:
    return paddle.to_tensor(np.random.RandomState(10 * step + rank).randn(4, 8).astype("float32"))


def backward(model: Any, step: int, rank: int, skip: bool) -> None:
    (model(batch(step, rank), skip) ** 2).mean().backward()


def reference(build: Callable[[nn.Layer], Any], skipped: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """One process that averages the gradients of both ranks by hand; weights and states."""
    fresh(0)
    net = Stack()
    optimizer = build(net)
    for step in range(STEPS):
        sums: dict[str, Any] = {}
        for rank in range(dist.get_world_size()):
            backward(net, step, rank, step in skipped)
            for name, param in net.named_parameters():
                if param.grad is not None:
                    sums[name] = sums[name] + param.grad.numpy() if name in sums else param.grad.numpy()
                param.clear_gradient(False)
        for name, param in net.named_parameters():
            if name in sums:
                param.grad = paddle.to_tensor(sums[name] * np.float32(1 / dist.get_world_size()))
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
    return arrays(net.state_dict()), arrays(optimizer.state_dict())


def arrays(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.numpy() for name, value in state.items() if isinstance(value, paddle.Tensor)}


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert set(one) == set(other)
    return max(float(np.abs(one[name].reshape(-1) - other[name].reshape(-1)).max()) for name in one)


class Counting:
    """Counts the parameters that an optimizer steps while the context is open."""

    def __init__(self, optimizer: Any) -> None:
        self.count = 0
        self._class = type(optimizer)
        self._plain = self._class._append_optimize_op

    def __enter__(self) -> Counting:
        def append(optimizer: Any, block: Any, pair: Any) -> Any:
            self.count += 1
            return self._plain(optimizer, block, pair)

        self._class._append_optimize_op = append
        return self

    def __exit__(self, *_: object) -> None:
        self._class._append_optimize_op = self._plain


def cases() -> dict[str, tuple[Callable[[nn.Layer], Any], tuple[int, ...]]]:
    optim = paddle.optimizer

    def own_rate(net: nn.Layer) -> Any:
        net.layers[3].weight.optimize_attr["learning_rate"] = 0.25
        return optim.AdamW(0.01, parameters=net.parameters())

    found: dict[str, tuple[Callable[[nn.Layer], Any], tuple[int, ...]]] = {
        "AdamW alike": (lambda net: optim.AdamW(0.01, parameters=net.parameters(), weight_decay=0.1), ()),
        "AdamW decays by name": (
            lambda net: optim.AdamW(
                0.01, parameters=net.parameters(), weight_decay=0.5, apply_decay_param_fun=lambda name: ".w_" in name
            ),
            (),
        ),
        "AdamW one parameter has its own rate": (own_rate, ()),
        "AdamW a layer is unused in steps 3 and 4": (
            lambda net: optim.AdamW(0.01, parameters=net.parameters()),
            (3, 4),
        ),
        "AdamW groups that end inside a run": (
            lambda net: optim.AdamW(
                0.01,
                parameters=[
                    {"params": [p for layer in net.layers[:4] for p in layer.parameters()], "learning_rate": 0.5},
                    {"params": [p for layer in net.layers[4:] for p in layer.parameters()], "weight_decay": 0.3},
                ],
            ),
            (2,),
        ),
        "Momentum a layer is unused in steps 0 and 1": (
            lambda net: optim.Momentum(0.01, parameters=net.parameters()),
            (0, 1),
        ),
        "Adagrad a layer is unused in step 1": (lambda net: optim.Adagrad(0.01, parameters=net.parameters()), (1,)),
    }
    if hasattr(optim, "NAdam"):
        found["NAdam"] = (lambda net: optim.NAdam(0.01, parameters=net.parameters()), (2,))
        found["ASGD keeps rows of states"] = (lambda net: optim.ASGD(0.01, 3, parameters=net.parameters()), ())
    return found


def grid(level: str) -> dict[str, Any]:
    """For each case: how many parameters each step has stepped here, and the distance from the reference."""
    results: dict[str, Any] = {}
    for name, (build, skipped) in cases().items():
        weights, states = reference(build, skipped)
        fresh(0)
        net = Stack()
        inner = build(net)
        model, optimizer, _ = group_sharded_parallel(net, inner, level)
        kernels = []
        for step in range(STEPS):
            backward(model, step, dist.get_rank(), step in skipped)
            with Counting(inner) as counting:
                optimizer.step()
            kernels.append(counting.count)
            optimizer.clear_grad(set_to_zero=False)
        difference = max(
            distance(arrays(model.state_dict()), weights), distance(arrays(optimizer.state_dict()), states)
        )
        results[name] = {"kernels": kernels, "difference": difference}
    return results


def neighbours_without_states(name: str) -> dict[str, float]:
    """A layer that has never been stepped joins the others: after wrapping, and after states have been loaded."""

    def made() -> tuple[Any, Any]:
        fresh(0)
        net = Stack()
        return net, getattr(paddle.optimizer, name)(0.01, parameters=net.parameters())

    def run(model: Any, optimizer: Any, first: int, last: int, skip: bool) -> None:
        for step in range(first, last):
            backward(model, step, 0, skip)
            optimizer.step()
            optimizer.clear_grad(set_to_zero=False)

    net, plain = made()
    run(net, plain, 0, 2, True)
    run(net, plain, 2, 5, False)
    expected = {**arrays(net.state_dict()), **arrays(plain.state_dict())}
    net, plain = made()
    run(net, plain, 0, 2, True)
    model, optimizer, _ = group_sharded_parallel(net, plain, "os_g")
    run(model, optimizer, 2, 5, False)
    wrapped = {**arrays(model.state_dict()), **arrays(optimizer.state_dict())}
    net, plain = made()
    model, optimizer, _ = group_sharded_parallel(net, plain, "p_g_os")
    run(model, optimizer, 0, 2, True)
    optimizer.set_state_dict(optimizer.state_dict())
    run(model, optimizer, 2, 5, False)
    loaded = {**arrays(model.state_dict()), **arrays(optimizer.state_dict())}
    return {"wrapped": distance(wrapped, expected), "loaded": distance(loaded, expected)}


def states() -> dict[str, float]:
    """Reading, setting, loading and giving back the states of a model whose pieces are stepped together."""

    def adamw(net: nn.Layer) -> Any:
        return paddle.optimizer.AdamW(0.01, parameters=net.parameters())

    def run(optimizer: Any, model: Any, first: int, last: int) -> None:
        for step in range(first, last):
            backward(model, step, 0, False)
            optimizer.step()
            optimizer.clear_grad()

    def plain(first: int, change: Callable[[Any, Any], None]) -> tuple[Any, Any]:
        fresh(0)
        net = Stack()
        optimizer = adamw(net)
        run(optimizer, net, 0, first)
        change(net, optimizer)
        run(optimizer, net, first, 6)
        return net, optimizer

    def wrapped(first: int, change: Callable[[Any, Any], None]) -> tuple[Any, Any]:
        fresh(0)
        net = Stack()
        model, optimizer, _ = group_sharded_parallel(net, adamw(net), "os_g")
        run(optimizer, model, 0, first)
        change(model, optimizer)
        run(optimizer, model, first, 6)
        return model, optimizer

    def both(first: int, in_plain: Callable[[Any, Any], None], in_wrapped: Callable[[Any, Any], None]) -> float:
        net, optimizer = plain(first, in_plain)
        model, sharded = wrapped(first, in_wrapped)
        return max(
            distance(arrays(model.state_dict()), arrays(net.state_dict())),
            distance(arrays(sharded.state_dict()), arrays(optimizer.state_dict())),
        )

    def nothing(model: Any, optimizer: Any) -> None:
        pass

    def halve_in_plain(net: Any, optimizer: Any) -> None:
        moment = optimizer._accumulators["moment1"][net.layers[5].weight.name]
        moment.set_value(moment * 0.5)

    def halve(model: Any, optimizer: Any) -> None:
        moment = optimizer.views.state("layers.5.weight", "moment1")
        optimizer.views.set_state("layers.5.weight", "moment1", moment * 0.5)

    def reload(model: Any, optimizer: Any) -> None:
        state = {name: value for name, value in optimizer.state_dict().items()}
        for name in state:
            if "layers" not in name and "beta1_pow" in name and name.startswith("linear_5.w_0"):
                state[name] = state[name] * 0.5
        optimizer.set_state_dict(state)

    net, inner = plain(3, nothing)
    model, optimizer = wrapped(3, nothing)
    layer, back = unwrap(model, optimizer)
    run(back, layer, 6, 8)
    run(inner, net, 6, 8)
    given = max(
        distance(arrays(layer.state_dict()), arrays(net.state_dict())),
        distance(arrays(back.state_dict()), arrays(inner.state_dict())),
    )
    return {
        "whole": both(3, nothing, lambda model, optimizer: optimizer.state_dict() and None),
        "after set": both(3, halve_in_plain, halve),
        "after load": both(3, reload, reload),
        "given back": given,
    }

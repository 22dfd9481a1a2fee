"""Inside a trainer: every optimizer class against the unsharded run, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn

from paddle_group_sharded import group_sharded_parallel
from unittests.harness import fresh
from unittests.sharding.optim_cases import OptimCase, differences
from unittests.sharding.parity import AVERAGED

Tensor = Any
optim = paddle.optimizer


class ScaledSign(optim.Optimizer):
    """A user's rule that needs the whole tensor: sign descent, scaled by the norm of the whole running gradient."""

    def _create_accumulators(self, block: Any, parameters: Any) -> None:
        for param in parameters:
            self._add_accumulator("running", param)

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> None:
        param, grad = param_and_grad
        running = self._get_accumulator("running", param)
        paddle.assign(running * 0.5 + grad, running)
        step = paddle.sign(running) * paddle.linalg.norm(running) * self.get_lr()
        paddle.assign(param - step, param)


class Factored(optim.Optimizer):
    """A user's rule whose states have other shapes than the parameter: one mean per row and one per column."""

    def _create_accumulators(self, block: Any, parameters: Any) -> None:
        for param in parameters:
            rows, columns = (param.shape[0], param.shape[1]) if len(param.shape) == 2 else (1, int(param.size))
            self._add_accumulator("rows", param, shape=[rows])
            self._add_accumulator("columns", param, shape=[columns])

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> None:
        param, grad = param_and_grad
        rows, columns = self._get_accumulator("rows", param), self._get_accumulator("columns", param)
        square = (grad * grad).reshape([rows.shape[0], columns.shape[0]])
        paddle.assign(rows * 0.9 + square.mean(axis=1) * 0.1, rows)
        paddle.assign(columns * 0.9 + square.mean(axis=0) * 0.1, columns)
        scale = paddle.sqrt(paddle.outer(rows, columns) / rows.mean() + 1e-8).reshape(param.shape)
        paddle.assign(param - grad / scale * self.get_lr(), param)


class Late(optim.Optimizer):
    """A user's rule that makes its states in its first update, of which nothing tells before."""

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> None:
        param, grad = param_and_grad
        self._add_accumulator("mean", param)
        self._add_accumulator("norm", param, shape=[1])
        mean, norm = self._get_accumulator("mean", param), self._get_accumulator("norm", param)
        paddle.assign(mean * 0.5 + grad, mean)
        paddle.assign(norm * 0.5 + paddle.linalg.norm(grad).reshape([1]), norm)
        paddle.assign(param - mean / (norm + 1.0) * self.get_lr(), param)


class Subclassed(optim.Adam):
    """A user's class that adds nothing."""


def builders() -> dict[str, Callable[[nn.Layer], Any]]:
    """Every optimizer that this Paddle has, by a name for messages."""
    found: dict[str, Callable[[nn.Layer], Any]] = {
        "SGD": lambda net: optim.SGD(0.05, parameters=net.parameters(), weight_decay=0.01),
        "Momentum": lambda net: optim.Momentum(0.05, parameters=net.parameters(), weight_decay=0.01),
        "Momentum nesterov": lambda net: optim.Momentum(
            0.05,
            parameters=net.parameters(),
            use_nesterov=True,
            weight_decay=paddle.regularizer.L1Decay(0.01),
            rescale_grad=0.5,
        ),
        "Adam": lambda net: optim.Adam(0.01, parameters=net.parameters(), weight_decay=0.01),
        "Adam lazy": lambda net: optim.Adam(0.01, parameters=net.parameters(), lazy_mode=True, multi_precision=True),
        "AdamW": lambda net: optim.AdamW(0.01, parameters=net.parameters(), weight_decay=0.1),
        "Adamax": lambda net: optim.Adamax(0.01, parameters=net.parameters(), weight_decay=0.01),
        "Adagrad": lambda net: optim.Adagrad(0.05, parameters=net.parameters(), initial_accumulator_value=0.1),
        "Adadelta": lambda net: optim.Adadelta(1.0, parameters=net.parameters(), weight_decay=0.01),
        "RMSProp": lambda net: optim.RMSProp(0.01, parameters=net.parameters(), weight_decay=0.01),
        "RMSProp centered": lambda net: optim.RMSProp(0.01, parameters=net.parameters(), centered=True, momentum=0.9),
        "Lamb": lambda net: optim.Lamb(0.01, parameters=net.parameters()),
        "Lamb excluding": lambda net: optim.Lamb(
            0.01,
            lamb_weight_decay=0.3,
            parameters=net.parameters(),
            exclude_from_weight_decay_fn=lambda p: p is net.out.weight,
        ),
        "ScaledSign": lambda net: ScaledSign(0.001, parameters=net.parameters()),
        "Factored": lambda net: Factored(0.001, parameters=net.parameters()),
        "Late": lambda net: Late(0.01, parameters=net.parameters()),
        "Subclassed": lambda net: Subclassed(0.01, parameters=net.parameters()),
        "Adam multi tensor": lambda net: optim.Adam(0.01, parameters=net.parameters(), use_multi_tensor=True),
        "Momentum multi tensor": lambda net: optim.Momentum(
            0.05, parameters=net.parameters(), use_multi_tensor=True, weight_decay=0.01
        ),
    }
    newer: dict[str, Callable[[nn.Layer], Any]] = {
        "NAdam": lambda net: optim.NAdam(0.01, parameters=net.parameters(), weight_decay=0.01),
        "RAdam": lambda net: optim.RAdam(0.01, parameters=net.parameters(), weight_decay=0.01),
        "ASGD": lambda net: optim.ASGD(0.05, batch_num=3, parameters=net.parameters(), weight_decay=0.01),
        "Rprop": lambda net: optim.Rprop(0.01, parameters=net.parameters()),
    }
    found.update({name: build for name, build in newer.items() if hasattr(optim, name)})
    if hasattr(optim, "NAdam"):  # amsgrad came with the same release
        found["Adam amsgrad"] = lambda net: optim.Adam(0.01, parameters=net.parameters(), amsgrad=True)
        found["AdamW amsgrad"] = lambda net: optim.AdamW(0.01, parameters=net.parameters(), amsgrad=True)
    return found


def grid(levels: tuple[str, ...], names: tuple[str, ...] = ()) -> dict[str, dict[str, float]]:
    """The differences of every optimizer (or of ``names``) from the unsharded run at each level."""
    return {
        name: differences(OptimCase(build), levels) for name, build in builders().items() if not names or name in names
    }


def class_names() -> list[str]:
    """What Paddle offers, without the base class."""
    return [name for name in optim.__all__ if name != "Optimizer"]


NO_ELEMENTS = not paddle.__version__.startswith("2.")  # Paddle 2.6 has no such parameters


class Odd(nn.Layer):
    """A parameter of no dimensions and one of no elements beside a common one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = self.out = nn.Linear(8, 7)
        self.factor = self.create_parameter([], default_initializer=nn.initializer.Constant(0.5))
        zeros = nn.initializer.Constant(0.0)
        self.nothing = self.create_parameter([0 if NO_ELEMENTS else 1, 4], default_initializer=zeros)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor + self.nothing.sum()


def odd_shapes(levels: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Optimizers over parameters of no dimensions and of no elements, against averaged gradients on every rank."""
    # Paddle's own Rprop cannot step a parameter without dimensions; its fused kernels step one without elements, and
    # its ordinary ones leave the states of such a parameter as they are.
    names = ("SGD", "Momentum", "AdamW", "Adamax", "RMSProp centered", "ASGD", "Lamb", "ScaledSign", "Factored")
    return {
        name: differences(OptimCase(build, reference=AVERAGED, net=Odd), levels)
        for name, build in builders().items()
        if name in names
    }


# --------------------------------------------------------------------------------------------------------- refusals


class OwnStep(optim.SGD):
    """A user's class that takes the update into its own hands."""

    @paddle.no_grad()
    def step(self) -> None:
        """Would see no sharded gradient."""


class OwnLBFGS(optim.LBFGS):
    """Derived from what cannot be sharded."""


def refusals() -> dict[str, str]:
    """The messages for optimizers that cannot be exact, and the proof that nothing has been changed."""
    messages = {}
    fresh()
    net = nn.Linear(4, 4)
    before = net.weight.numpy().copy()
    params = net.parameters()
    replaced = optim.SGD(0.1, parameters=params)
    replaced.step = lambda: None
    candidates = {
        "LBFGS": optim.LBFGS(parameters=params),
        "OwnLBFGS": OwnLBFGS(parameters=params),
        "OwnStep": OwnStep(0.1, parameters=params),
        "replaced step": replaced,
        "LookAhead": paddle.incubate.LookAhead(optim.SGD(0.1, parameters=params)),
        "ModelAverage": paddle.incubate.ModelAverage(0.15, parameters=params),
        "not an optimizer": "sgd",
    }
    for name, candidate in candidates.items():
        try:
            group_sharded_parallel(net, candidate, "os")
            messages[name] = "accepted"
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
    assert (net.weight.numpy() == before).all()
    model, optimizer, _ = group_sharded_parallel(net, optim.SGD(0.1, parameters=params), "p_g_os")  # still possible
    for name, call in {
        "wrapped again": lambda: group_sharded_parallel(nn.Linear(2, 2), optimizer, "os"),
        "apply_gradients": lambda: optimizer.apply_gradients([(net.weight, net.weight)]),
        "added parameter": lambda: (optimizer._parameter_list.append(net.weight), optimizer.step()),
    }.items():
        try:
            call()
            messages[name] = "accepted"
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def late_states_reloaded() -> dict[str, Any]:
    """Three steps, then three more in a second pair of model and optimizer that takes over the states."""

    def made() -> tuple[Any, Any]:
        fresh(0)
        net = nn.Linear(6, 5)
        return group_sharded_parallel(net, Late(0.01, parameters=net.parameters()), "os_g")[:2]

    def run(model: Any, optimizer: Any, first: int, last: int) -> None:
        for number in range(first, last):
            model(paddle.full([2, 6], number + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad()

    model, optimizer = made()
    run(model, optimizer, 0, 6)
    unbroken = {**model.state_dict(), **optimizer.state_dict()}
    model, optimizer = made()
    run(model, optimizer, 0, 3)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    states = {name: value.clone() for name, value in optimizer.state_dict().items()}
    model, optimizer = made()
    model.set_state_dict(weights)
    optimizer.set_state_dict(states)
    run(model, optimizer, 3, 6)
    return {"unbroken": unbroken, "resumed": {**model.state_dict(), **optimizer.state_dict()}}

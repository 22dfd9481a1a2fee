"""Inside a trainer: what users set on optimizers, against the unsharded run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.regularizer import L1Decay, L2Decay

from paddle_group_sharded import group_sharded_parallel, unwrap
from unittests.harness import fresh
from unittests.sharding.optim_cases import Net, OptimCase, Outcome, differences, different, outcome, states_of
from unittests.sharding.parity import AVERAGED, Run

Tensor = Any
Build = Callable[[nn.Layer], Any]
optim = paddle.optimizer
lr = paddle.optimizer.lr


def split(net: nn.Layer) -> list[list[Tensor]]:
    """The parameters of ``Net`` in three groups, each with one of another kind."""
    first = [net.inner.weight, net.norm.weight]
    second = [net.out.weight, net.out.bias, net.unused.weight]
    known = {id(param) for param in first + second}
    return [first, second, [param for param in net.parameters() if id(param) not in known]]


def groups(net: nn.Layer, *options: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"params": params, **own} for params, own in zip(split(net), options)]


class NormDecay(paddle.regularizer.WeightDecayRegularizer):
    """A user's regularizer that looks at the whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._regularization_coeff = 0.01

    def __call__(self, param: Tensor, grad: Tensor, block: Any) -> Tensor:
        return param * (paddle.linalg.norm(param) * 0.01)


class Attributed(Net):
    """``Net`` with rates, regularizers and clip flags that come from ``ParamAttr``."""

    def __init__(self) -> None:
        super().__init__()
        attr = paddle.ParamAttr
        self.inner = nn.Linear(
            8, 13, weight_attr=attr(learning_rate=0.5, regularizer=L1Decay(0.1)), bias_attr=attr(learning_rate=3.0)
        )
        self.tied.weight = self.inner.weight
        self.out = nn.Linear(
            13, 8, weight_attr=attr(regularizer=L2Decay(0.2), need_clip=False), bias_attr=attr(learning_rate=0.0)
        )


def with_lr_ratio(net: nn.Layer) -> Any:
    """``lr_ratio`` by the parameter itself.  Paddle's CPU build refuses the argument, its kernel computes it."""
    ratios = {id(param): 0.5 + 0.25 * (index % 3) for index, param in enumerate(net.parameters())}
    optimizer = optim.AdamW(0.01, parameters=net.parameters())
    optimizer._lr_ratio = lambda param: ratios[id(param)]  # KeyError for anything but the user's own parameters
    return optimizer


def by_name(net: nn.Layer) -> Any:
    """Decay chosen by Paddle's automatic name; a name that is not the user's raises."""
    known = {param.name: len(param.shape) > 1 for param in net.parameters()}
    return optim.AdamW(0.01, parameters=net.parameters(), weight_decay=0.3, apply_decay_param_fun=known.__getitem__)


def excluding_in_groups(net: nn.Layer) -> Any:
    own = [
        {"exclude_from_weight_decay_fn": lambda p: p is net.inner.weight},
        {"lamb_weight_decay": 0.5},
        {"beta1": 0.5},
    ]
    return optim.Lamb(0.01, lamb_weight_decay=0.2, parameters=groups(net, *own))


def option_cases() -> dict[str, Any]:
    """Builders of optimizers, or whole cases, by name."""
    decays = {"weight_decay": 0.2}, {"weight_decay": 0.0}, {"weight_decay": L1Decay(0.01)}
    rates = {"learning_rate": 0.5, "weight_decay": 0.2, "beta1": 0.8}, {"learning_rate": 2.0, "beta2": 0.9}, {}
    return {
        "D1 AdamW groups": lambda net: optim.AdamW(0.01, parameters=groups(net, *rates)),
        "D4 Adam groups": lambda net: optim.Adam(0.01, parameters=groups(net, *rates[:2], {"epsilon": 1e-3})),
        "SGD groups": lambda net: optim.SGD(0.05, parameters=groups(net, *decays)),
        "Momentum groups": lambda net: optim.Momentum(
            0.05,
            parameters=groups(
                net, {"momentum": 0.5, "weight_decay": 0.1}, {"use_nesterov": True}, {"learning_rate": 0.1}
            ),
        ),
        "Momentum fused groups": lambda net: optim.Momentum(
            0.05, parameters=groups(net, {"momentum": 0.5}, {"weight_decay": 0.1}, {}), use_multi_tensor=True
        ),
        "R27 Lamb groups": excluding_in_groups,
        "D4 apply_decay_param_fun": by_name,
        "lr_ratio": with_lr_ratio,
        "ParamAttr": OptimCase(
            lambda net: optim.Adam(0.01, parameters=net.parameters(), weight_decay=0.05), net=Attributed
        ),
        "ParamAttr Momentum": OptimCase(
            lambda net: optim.Momentum(0.01, parameters=net.parameters(), weight_decay=L2Decay(0.1)), net=Attributed
        ),
        "L1Decay": lambda net: optim.Adam(0.01, parameters=net.parameters(), weight_decay=L1Decay(0.05)),
        "L2Decay": lambda net: optim.SGD(0.05, parameters=net.parameters(), weight_decay=L2Decay(0.05)),
        "a user's regularizer": lambda net: optim.SGD(0.05, parameters=net.parameters(), weight_decay=NormDecay()),
        "name": lambda net: optim.AdamW(0.01, parameters=net.parameters(), name="mine"),
        "name Momentum": lambda net: optim.Momentum(0.01, parameters=net.parameters(), name="mine"),
        "D6 part of the model": lambda net: optim.AdamW(0.01, parameters=[net.scale, *net.out.parameters()]),
        "a parameter twice": lambda net: optim.SGD(0.01, parameters=[*net.parameters(), net.out.weight]),
        "set_lr": OptimCase(lambda net: optim.AdamW(0.01, parameters=net.parameters()), after_step=change_rate),
        "changed options": OptimCase(
            lambda net: optim.AdamW(0.01, parameters=groups(net, *rates)), after_step=change_options
        ),
        "C5 an empty group": OptimCase(
            lambda net: optim.AdamW(0.01, parameters=groups(net, *rates)), reference=AVERAGED, after_step=freeze_a_group
        ),
    }


def change_rate(run: Run) -> None:
    """Set the rate, then a scheduler, while training goes on."""
    if run.step == 2:
        run.optimizer.set_lr(0.02)
    elif run.step == 4:
        run.optimizer.set_lr_scheduler(lr.StepDecay(0.03, step_size=2))
    elif run.step > 4:
        run.optimizer._learning_rate.step()


def change_options(run: Run) -> None:
    """Change options of a group and of a parameter through the optimizer that the user holds."""
    if run.step == 3:
        run.optimizer._param_groups[0]["weight_decay"] = 0.4
        run.optimizer._param_groups[1]["beta1"] = 0.7
        run.layer.out.weight.optimize_attr = {"learning_rate": 0.25}


def freeze_a_group(run: Run) -> None:
    """Every parameter of the first group is frozen for some steps; the groups stay as they are."""
    if run.step in (3, 7):
        for param in split(run.layer)[0]:
            param.stop_gradient = run.step == 3
    assert [len(group["params"]) for group in run.optimizer._param_groups] == [2, 3, 6]


def options(levels: tuple[str, ...], part: int, parts: int) -> dict[str, dict[str, float]]:
    """The differences of every ``parts``-th case."""
    cases = list(option_cases().items())[part::parts]
    return {name: differences(case if isinstance(case, OptimCase) else OptimCase(case), levels) for name, case in cases}


# ------------------------------------------------------------------------------------------------------- schedulers


def schedulers() -> dict[str, Callable[[], Any]]:
    """One of each class of ``paddle.optimizer.lr``."""
    return {
        "NoamDecay": lambda: lr.NoamDecay(8, 4, 0.1),
        "PiecewiseDecay": lambda: lr.PiecewiseDecay([3, 6], [0.01, 0.02, 0.005]),
        "NaturalExpDecay": lambda: lr.NaturalExpDecay(0.01, 0.1),
        "InverseTimeDecay": lambda: lr.InverseTimeDecay(0.01, 0.1),
        "PolynomialDecay": lambda: lr.PolynomialDecay(0.01, 5),
        "LinearWarmup": lambda: lr.LinearWarmup(lr.CosineAnnealingDecay(0.01, 10), 3, 0.0, 0.01),
        "ExponentialDecay": lambda: lr.ExponentialDecay(0.01, 0.9),
        "MultiStepDecay": lambda: lr.MultiStepDecay(0.01, [2, 5]),
        "StepDecay": lambda: lr.StepDecay(0.01, 3),
        "LambdaDecay": lambda: lr.LambdaDecay(0.01, lambda epoch: 0.9**epoch),
        "ReduceOnPlateau": lambda: lr.ReduceOnPlateau(0.01, patience=0, threshold=0.5),
        "CosineAnnealingDecay": lambda: lr.CosineAnnealingDecay(0.01, 5),
        "MultiplicativeDecay": lambda: lr.MultiplicativeDecay(0.01, lambda epoch: 0.95),
        "OneCycleLR": lambda: lr.OneCycleLR(0.02, 12),
        "CyclicLR": lambda: lr.CyclicLR(0.005, 0.02, 3, 3),
        "LinearLR": lambda: lr.LinearLR(0.01, 6),
        "CosineAnnealingWarmRestarts": lambda: lr.CosineAnnealingWarmRestarts(0.01, 4),
    }


def scheduled(levels: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Training with each scheduler, stepped through the object that the user made."""
    assert set(schedulers()) == set(lr.__all__) - {"LRScheduler"}, "one is not tested"
    result = {}
    for name, make in schedulers().items():
        made: list[Any] = []

        def build(net: nn.Layer, make: Any = make, made: list[Any] = made) -> Any:
            made.append(make())
            return optim.AdamW(made[-1], parameters=net.parameters())

        def step(run: Run, made: list[Any] = made) -> None:
            scheduler = made[-1]
            same_everywhere = paddle.to_tensor(1.0)
            scheduler.step(same_everywhere) if isinstance(scheduler, lr.ReduceOnPlateau) else scheduler.step()
            assert run.optimizer.get_lr() == scheduler()

        result[name] = differences(OptimCase(build, after_step=step), levels)
    return result


# ------------------------------------------------------------------------------------- states before wrapping, views


def train_alone(net: nn.Layer, optimizer: Any, steps: int) -> None:
    """Plain steps, with the same data on every rank."""
    for step in range(steps):
        data = np.random.RandomState(100 + step).randn(4, 8).astype("float32")
        net(paddle.to_tensor(data)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()


def stepped(make: Build) -> Build:
    """An optimizer that has been stepped before it is wrapped."""

    def build(net: nn.Layer) -> Any:
        optimizer = make(net)
        train_alone(net, optimizer, 3)
        return optimizer

    return build


def given_state(make: Build) -> Build:
    """An optimizer that was given a state by ``set_state_dict`` and has not been stepped."""

    def build(net: nn.Layer) -> Any:
        optimizer = make(net)
        train_alone(net, optimizer, 3)
        state = {
            key: value.clone() if hasattr(value, "clone") else value for key, value in optimizer.state_dict().items()
        }
        paddle.utils.unique_name.switch()  # keys as in a new process
        again = make(net)
        again.set_state_dict(state)
        return again

    return build


def given_state_then_stepped(make: Build) -> Build:
    """An optimizer that was stepped, given an old state, and stepped on: Paddle keeps the old state lying about."""

    def build(net: nn.Layer) -> Any:
        optimizer = make(net)
        train_alone(net, optimizer, 1)
        state = {
            key: value.clone() if hasattr(value, "clone") else value for key, value in optimizer.state_dict().items()
        }
        train_alone(net, optimizer, 1)
        optimizer.set_state_dict(state)
        train_alone(net, optimizer, 2)
        return optimizer

    return build


def states_before_wrapping(levels: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Optimizers with a past, by name."""
    makers: dict[str, Build] = {
        "AdamW": lambda net: optim.AdamW(0.01, parameters=net.parameters()),
        "Momentum fused": lambda net: optim.Momentum(0.01, parameters=net.parameters(), use_multi_tensor=True),
        "Lamb": lambda net: optim.Lamb(lr.StepDecay(0.01, 2), parameters=net.parameters()),
        "name": lambda net: optim.Adam(0.01, parameters=net.parameters(), name="mine"),
        "SGD": lambda net: optim.SGD(0.01, parameters=net.parameters()),
    }
    if hasattr(optim, "ASGD"):
        makers["ASGD"] = lambda net: optim.ASGD(0.01, batch_num=3, parameters=net.parameters())
    result = {}
    for name, make in makers.items():
        result[f"{name}, stepped"] = differences(OptimCase(stepped(make)), levels)
        if name in ("AdamW", "ASGD"):
            result[f"{name}, given"] = differences(OptimCase(given_state(make)), levels)
            result[f"{name}, given, then stepped"] = differences(OptimCase(given_state_then_stepped(make)), levels)
    return result


class SameData(OptimCase):
    """Every rank sees the same batch, so the result does not depend on their number (but for roundings)."""

    def batch(self, rank: int, step: int) -> Any:
        return super().batch(0, step)


def resumed(mode: str, start: int, stop: int, past: Any) -> tuple[Any, list[float]]:
    """Train steps ``start`` to ``stop`` under ``mode``, after taking ``past``; returns a past, and losses."""

    def build(net: nn.Layer) -> Any:
        return optim.AdamW(lr.StepDecay(0.02, 3), parameters=net.parameters(), weight_decay=0.1)

    case = SameData(build)
    run = Run(case, mode)
    if past is not None:
        weights, states, scheduler = past
        run.model.set_state_dict(weights)
        state_dict = {key: paddle.to_tensor(value) for key, value in states.items()}
        run.optimizer.set_state_dict({**state_dict, "LR_Scheduler": scheduler})
    for run.step in range(start, stop):
        run.losses.append(case.train_step(run, case.batch(run.rank, run.step)))
        run.optimizer._learning_rate.step()
    state_dict = run.optimizer.state_dict()
    return (run.state(), states_of(state_dict), state_dict["LR_Scheduler"]), run.losses


def continued_after_unwrap(level: str) -> float:
    """Five wrapped steps, five plain ones with averaged gradients, five wrapped ones again: as fifteen plain ones."""
    case = OptimCase(lambda net: optim.AdamW(0.01, parameters=net.parameters()), reference=AVERAGED)
    expected = outcome(case, AVERAGED, 15)
    run = Run(case, level)
    plain = run.layer

    def train(start: int) -> None:
        for run.step in range(start, start + 5):
            run.losses.append(case.train_step(run, case.batch(run.rank, run.step)))

    train(0)
    run.model, run.optimizer = unwrap(run.model, run.optimizer)
    assert run.model is plain and type(run.optimizer) is optim.AdamW
    assert type(plain.inner._parameters) is type(nn.Linear(1, 1)._parameters)
    assert not any(
        layer._forward_pre_hooks or layer._forward_post_hooks or "forward" in vars(layer)
        for layer in plain.sublayers(include_self=True)
    )
    run.mode = AVERAGED
    train(5)
    run.model, run.optimizer, _ = group_sharded_parallel(run.model, run.optimizer, level)
    run.mode = level
    train(10)
    states = states_of(run.optimizer.state_dict())
    weights = run.state()
    found = Outcome(run.losses, weights, states, expected.rate, expected.scheduler)
    return max(
        float(np.max(np.abs(np.subtract(expected.losses, found.losses)))),
        different(expected.weights, found.weights),
        different(expected.states, found.states),
    )


def attributes() -> dict[str, Any]:
    """What users and their tools read and write on the wrapped optimizer."""
    fresh()
    net = Net()
    own = optim.AdamW(0.01, parameters=groups(net, {"learning_rate": 0.5}, {}, {}), weight_decay=0.1)
    lists = [list(group["params"]) for group in own._param_groups]
    _, optimizer, _ = group_sharded_parallel(net, own, "p_g_os")
    seen = {
        "isinstance": isinstance(optimizer, optim.Optimizer),
        "inner": optimizer._optim is own,
        "groups": all(
            a is b for old, group in zip(lists, optimizer._param_groups) for a, b in zip(old, group["params"])
        ),
        "list": optimizer._parameter_list is own._parameter_list,
        "shapes": [list(param.shape) for param in optimizer._param_groups[0]["params"]],
        "read": optimizer._beta1,
        "states": optimizer.state_dict(),
        "names": optimizer.get_opti_var_name_list(),
    }
    optimizer._beta2 = 0.5
    optimizer.something = "new"
    optimizer.set_lr(0.25)
    seen["written"] = (own._beta2, own.something, own.get_lr(), optimizer.get_lr(), optimizer.something)
    try:
        _ = optimizer.not_there
    except AttributeError as error:
        seen["missing"] = str(error)
    return seen

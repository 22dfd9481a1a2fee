"""Inside a trainer: gradient clipping against the unsharded run and against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import numpy as np
import paddle
from paddle import nn

from paddle_group_sharded import group_sharded_parallel
from unittests.harness import fresh
from unittests.sharding.dygraph_optimizer_options import groups, split
from unittests.sharding.dygraph_optimizers import Odd
from unittests.sharding.optim_cases import Net, OptimCase, differences
from unittests.sharding.parity import AVERAGED, LEVELS, Run, average_grads, to_array

Tensor = Any
optim = paddle.optimizer
ByGlobalNorm, ByNorm, ByValue = nn.ClipGradByGlobalNorm, nn.ClipGradByNorm, nn.ClipGradByValue


class NotAllClipped(Net):
    """``Net`` with parameters that ask not to be clipped, the tied one among them."""

    def __init__(self) -> None:
        super().__init__()
        for param in (self.inner.weight, self.out.bias):
            param.need_clip = False


def freeze_in_between(run: Run) -> None:
    """A parameter that had gradients is frozen for some steps."""
    if run.step in (3, 7):
        run.layer.out.weight.stop_gradient = run.step == 3


def swap_clip(run: Run) -> None:
    """The user gives the optimizer another clip object, then none, while training goes on."""
    if run.step == 3:
        run.optimizer._grad_clip = ByNorm(0.01)
    if run.step == 6:
        run.optimizer._grad_clip = None


def clip_cases() -> dict[str, OptimCase]:
    """By name; limits are small enough to clip at every step, but for one."""

    def sgd(clip: Any) -> Callable[[nn.Layer], Any]:
        return lambda net: optim.SGD(0.1, parameters=net.parameters(), grad_clip=clip)

    def adam(clip: Any) -> Callable[[nn.Layer], Any]:
        return lambda net: optim.AdamW(0.01, parameters=net.parameters(), grad_clip=clip)

    def in_groups(net: nn.Layer) -> Any:
        own = [{"grad_clip": ByGlobalNorm(0.01)}, {"grad_clip": ByNorm(0.02)}, {"grad_clip": ByValue(0.003)}]
        return optim.AdamW(0.01, parameters=groups(net, *own))

    def one_group_without(net: nn.Layer) -> Any:
        own: list[dict[str, Any]] = [{"grad_clip": None}, {}, {}]
        return optim.SGD(0.1, parameters=groups(net, *own), grad_clip=ByGlobalNorm(0.05))

    def lamb(net: nn.Layer) -> Any:
        return optim.Lamb(0.01, parameters=net.parameters(), grad_clip=ByGlobalNorm(0.05))

    return {
        "global norm": OptimCase(sgd(ByGlobalNorm(0.05))),
        "global norm, AdamW": OptimCase(adam(ByGlobalNorm(0.05))),
        "global norm, LAMB": OptimCase(lamb),
        "global norm above all": OptimCase(sgd(ByGlobalNorm(1e6))),
        "auto_skip_clip": OptimCase(sgd(ByGlobalNorm(0.05, auto_skip_clip=True))),
        "auto_skip_clip above all": OptimCase(sgd(ByGlobalNorm(1e6, auto_skip_clip=True))),
        "norm": OptimCase(sgd(ByNorm(0.02))),
        "value": OptimCase(sgd(ByValue(0.003))),
        "value, two limits": OptimCase(adam(ByValue(max=0.003, min=-0.001))),
        "need_clip, global norm": OptimCase(sgd(ByGlobalNorm(0.05)), net=NotAllClipped),
        "need_clip, norm": OptimCase(sgd(ByNorm(0.02)), net=NotAllClipped),
        "need_clip, value": OptimCase(sgd(ByValue(0.003)), net=NotAllClipped),
        "groups": OptimCase(in_groups),
        "one group without": OptimCase(one_group_without),
        "frozen in between": OptimCase(sgd(ByGlobalNorm(0.05)), reference=AVERAGED, after_step=freeze_in_between),
        "another clip object": OptimCase(sgd(ByGlobalNorm(0.05)), after_step=swap_clip),
        "E4 offload": OptimCase(sgd(ByGlobalNorm(0.05)), offload=True),
        "part of the model": OptimCase(
            lambda net: optim.SGD(0.1, parameters=split(net)[1], grad_clip=ByGlobalNorm(0.05))
        ),
        "no elements, no dimensions": OptimCase(sgd(ByGlobalNorm(0.05)), reference=AVERAGED, net=Odd),
    }


def clips(levels: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """The differences of every case."""
    return {name: differences(case, levels) for name, case in clip_cases().items()}


# ----------------------------------------------------------------------------------------------------- closed forms


class Weighed(nn.Layer):
    """Gradients that are known: the loss is the sum of ``weight * factor`` over all parameters."""

    def __init__(self, factors: list[Any], dtype: str = "float32") -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [
                self.create_parameter(list(np.shape(f)), dtype=dtype, default_initializer=nn.initializer.Constant(1.0))
                for f in factors
            ]
        )
        self.factors = [paddle.to_tensor(np.asarray(f, "float32")) for f in factors]

    def forward(self) -> Tensor:
        total = paddle.zeros([])
        for weight, factor in zip(self.weights, self.factors):
            total = total + (weight.astype("float32") * factor).sum()
        return total


def one_step(level: str, factors: list[Any], clip: Any, dtype: str = "float32", spoil: Any = None) -> list[np.ndarray]:
    """The weights, all 1 before, after one step of SGD with rate 1."""
    fresh()
    net = Weighed(factors, dtype)
    optimizer = optim.SGD(1.0, parameters=net.parameters(), grad_clip=clip)
    model, optimizer, _ = group_sharded_parallel(net, optimizer, level)
    model().backward()
    if spoil is not None:
        optimizer.views.set_grad(spoil[0], spoil[1])
    optimizer.step()
    return [to_array(value) for value in model.state_dict().values()]


def closed_forms() -> dict[tuple[str, str], list[np.ndarray]]:
    """By level and name; the test knows what they have to be."""
    three_four = [[3.0, 0.0, 0.0], [[0.0, 4.0], [0.0, 0.0]], 0.0]
    large = [[300.0] * 100, [-300.0] * 300]
    nan = "weights.0", np.full([3], np.nan, "float32")
    result = {}
    for level in LEVELS:
        result[level, "E1 E3 global norm"] = one_step(level, three_four, ByGlobalNorm(1.0))
        result[level, "norm"] = one_step(level, three_four, ByNorm(1.0))
        result[level, "value"] = one_step(level, three_four, ByValue(3.5))
        result[level, "E6 float16"] = one_step(level, large, ByGlobalNorm(1.0), "float16")
        result[level, "E5 bfloat16"] = one_step(level, large, ByGlobalNorm(1.0), "bfloat16")
        result[level, "nan"] = one_step(level, three_four, ByGlobalNorm(1.0), spoil=nan)
        result[level, "nan, auto_skip_clip"] = one_step(
            level, three_four, ByGlobalNorm(1.0, auto_skip_clip=True), spoil=nan
        )
    return result


# ------------------------------------------------------------------------------------------------- clip_grad_norm_


class Unclipped(OptimCase):
    """Clips by a call between backward and step, and keeps the norms that the call returns."""

    def __init__(self, limit: float) -> None:
        super().__init__(lambda net: optim.AdamW(0.01, parameters=net.parameters()), reference=AVERAGED)
        self.limit = limit
        self.norms: list[float] = []

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        loss = self.loss(run, batch)
        loss.backward()
        if run.is_reference:
            average_grads(run.layer)
            norm = paddle.nn.utils.clip_grad_norm_(run.layer.parameters(), self.limit)
        else:
            norm = run.optimizer.clip_grad_norm_(self.limit)
        self.norms.append(float(norm))
        run.optimizer.step()
        run.optimizer.clear_grad()
        return float(loss.item())


def clip_grad_norms(levels: tuple[str, ...]) -> dict[float, tuple[dict[str, float], float]]:
    """By limit: the differences by level, and the largest difference of a norm."""
    result = {}
    for limit in (0.05, 1e6):
        case = Unclipped(limit)
        found = differences(case, levels)
        norms = np.array(case.norms).reshape(1 + len(levels), -1)
        result[limit] = (found, float(np.max(np.abs(norms - norms[:1]))))
    return result


# -------------------------------------------------------------------------------------------------------- refusals


class OwnClip(nn.ClipGradByGlobalNorm):
    """A user's rule."""


def foreign_clips() -> list[str]:
    """The messages for clip objects whose rule is not known, at wrapping, in a group, and set later."""
    fresh()
    net = Net()
    messages = []

    def attempt(call: Callable[[], Any]) -> None:
        try:
            call()
            messages.append("accepted")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")

    own = OwnClip(1.0)
    attempt(lambda: group_sharded_parallel(net, optim.SGD(0.1, parameters=net.parameters(), grad_clip=own), "os"))
    in_group = optim.AdamW(0.1, parameters=groups(net, {"grad_clip": own}, {}, {}))
    attempt(lambda: group_sharded_parallel(net, in_group, "p_g_os"))
    net.inner.weight.set_value(net.inner.weight + 1.0)  # untouched by the refusals: a plain parameter
    model, optimizer, _ = group_sharded_parallel(net, optim.SGD(0.1, parameters=net.parameters()), "os")
    optimizer._grad_clip = own
    model(paddle.ones([2, 8])).sum().backward()
    attempt(optimizer.step)
    return messages

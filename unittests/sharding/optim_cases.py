"""Inside a trainer: one small awkward model, trained with any optimizer, and everything that training leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import numpy as np
import paddle
from paddle import nn

from unittests.sharding.parity import AVERAGED, DATA_PARALLEL, Case, Run, different, to_array

__all__ = ["Net", "OptimCase", "Outcome", "differences", "outcome", "states_of"]

Tensor = Any
Build = Callable[[nn.Layer], Any]


class Net(nn.Layer):
    """Odd sizes, a tied weight, a frozen layer, an unused layer, a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 13)
        self.norm = nn.LayerNorm(13)
        self.out = nn.Linear(13, 8)
        self.tied = nn.Linear(8, 13, bias_attr=False)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Linear(8, 8)
        for param in self.frozen.parameters():
            param.stop_gradient = True
        self.unused = nn.Linear(3, 5)
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(paddle.tanh(self.inner(x)) + self.tied(x))
        return self.out(hidden) * self.scale + self.frozen(x)


class OptimCase(Case):
    """``Net`` with the optimizer that ``build`` makes."""

    find_unused = True

    def __init__(
        self,
        build: Build,
        reference: str = DATA_PARALLEL,
        net: Callable[[], nn.Layer] = Net,
        after_step: Optional[Callable[[Run], None]] = None,
        **arguments: Any,
    ) -> None:
        self._build, self.reference, self._net, self._after_step = build, reference, net, after_step
        self.arguments = arguments

    def build(self) -> nn.Layer:
        return self._net()

    def optimizer(self, layer: nn.Layer) -> Any:
        return self._build(layer)

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        loss = super().train_step(run, batch)
        if self._after_step is not None:
            self._after_step(run)
        return loss


class Outcome(NamedTuple):
    """What a training leaves behind; weights by structured name, states by the keys of the optimizer."""

    losses: list[float]
    weights: dict[str, np.ndarray]
    states: dict[str, np.ndarray]
    rate: float
    scheduler: str


def states_of(state_dict: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of an optimizer's ``state_dict()``, master weights among them."""
    flat = {key: value for key, value in state_dict.items() if key not in ("LR_Scheduler", "master_weights")}
    masters = {f"master {key}": value for key, value in state_dict.get("master_weights", {}).items()}
    return {key: to_array(value) for key, value in {**flat, **masters}.items()}


def outcome(case: Case, mode: str, steps: int) -> Outcome:
    """Train ``case`` under ``mode`` (a level or a reference)."""
    run = Run(case, mode)
    for run.step in range(steps):
        loss = case.train_step(run, case.batch(run.rank, run.step))
        if loss is not None:
            run.losses.append(loss)
    state_dict = run.optimizer.state_dict()
    states = states_of(state_dict)
    rate = float(run.optimizer.get_lr())
    weights = run.state()
    if not run.is_reference and different(states, states_of(run.optimizer._optim.state_dict())) != 0.0:
        raise AssertionError("unwrap() leaves other states than state_dict()")
    return Outcome(run.losses, weights, states, rate, repr(sorted(state_dict.get("LR_Scheduler", {}).items())))


def differences(case: Case, levels: tuple[str, ...], steps: int = 10) -> dict[str, float]:
    """The largest absolute difference of each level from the reference; inf where names, shapes or dtypes differ."""
    mode = AVERAGED if paddle.distributed.get_world_size() == 1 else case.reference
    expected = outcome(case, mode, steps)
    return {level: distance(expected, outcome(case, level, steps)) for level in levels}


def distance(expected: Outcome, found: Outcome) -> float:
    """The largest absolute difference between two outcomes."""
    if expected.rate != found.rate or expected.scheduler != found.scheduler:
        return float("inf")
    losses = float(np.max(np.abs(np.subtract(expected.losses, found.losses))))
    return max(losses, different(expected.weights, found.weights), different(expected.states, found.states))

"""Inside a trainer: train one model under a reference and under a level, on the same batches, and compare.

A :class:`Case` says what is trained; :func:`compare` runs it::

    class Tied(Case):
        def build(self): return MyModel()
        def loss(self, run, x): return run.model(x).mean()

    compare(Tied(), levels=("os", "p_g_os"), steps=10)
    # {"os": Difference(losses=0.0, weights=0.0), ...}: the largest absolute differences from the reference

Two references: ``paddle.DataParallel``, and ``"averaged"``, where each rank trains the plain model and this module
averages the gradients with ``paddle.distributed.all_reduce`` between backward and step.  The second is for what
``DataParallel`` itself cannot do; in one process it is the plain model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_group_sharded import group_sharded_parallel, unwrap
from unittests.harness import fresh

__all__ = ["AVERAGED", "DATA_PARALLEL", "LEVELS", "Case", "Difference", "Run", "average_grads", "compare"]

Tensor = Any
LEVELS = ("os", "os_g", "p_g_os")
DATA_PARALLEL = "DataParallel"
AVERAGED = "averaged"


class Difference(NamedTuple):
    """The largest difference of anything that training leaves behind: absolute, but relative for losses above 1.

    Infinite where names, shapes or dtypes differ.
    """

    losses: float
    weights: float


class Run:
    """One training: ``model`` and ``optimizer`` as the user has them, ``layer`` inside, and where it stands."""

    def __init__(self, case: Case, mode: str) -> None:
        """Build ``case``, wrapped as ``mode`` (a level or a reference) says."""
        fresh()
        self.mode = mode
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.arguments = case.arguments
        self.step = 0
        self.losses: list[float] = []
        self.layer = case.build()
        self.optimizer = case.optimizer(self.layer)
        self.model: Any = self.layer
        if mode == DATA_PARALLEL:
            self.model = paddle.DataParallel(self.layer, find_unused_parameters=case.find_unused)
        elif mode != AVERAGED:
            self.model, self.optimizer, _ = group_sharded_parallel(
                self.layer, self.optimizer, mode, **case.arguments
            )

    @property
    def is_reference(self) -> bool:
        """Whether this package takes no part in it."""
        return self.mode in (DATA_PARALLEL, AVERAGED)

    def update(self) -> None:
        """One optimizer step on what the backward passes since the last one have left."""
        if self.mode == AVERAGED:
            average_grads(self.layer)
        self.optimizer.step()
        self.optimizer.clear_grad()
        if self.mode == "p_g_os" and self.world_size > 1 and not self.arguments:
            sharded = [param for param in self.model._engine.params if param.group.placements.param and param.numel]
            whole = [param.name for param in sharded if param.tensor._is_initialized()]
            if whole:
                raise AssertionError(f"not released after the step: {whole}")

    def state(self) -> dict[str, np.ndarray]:
        """Weights and buffers; a sharded model also has to give them back to the plain layer."""
        state = {name: to_array(value) for name, value in self.model.state_dict().items()}
        if not self.is_reference:
            plain, _ = unwrap(self.model, self.optimizer)
            after = {name: to_array(value) for name, value in plain.state_dict().items()}
            if different(state, after) != 0.0:
                raise AssertionError("unwrap() gives other values than state_dict()")
        return state


class Case:
    """What is trained.  Override what differs."""

    reference = DATA_PARALLEL
    find_unused = False
    arguments: dict[str, Any] = {}  # of group_sharded_parallel  # noqa: RUF012

    def build(self) -> nn.Layer:
        """The plain model; called after ``fresh()``."""
        raise NotImplementedError

    def optimizer(self, layer: nn.Layer) -> Any:
        """AdamW by default: one that shows differences in the gradients' sums, not only in their signs."""
        return paddle.optimizer.AdamW(0.01, parameters=layer.parameters(), weight_decay=0.01)

    def batch(self, rank: int, step: int) -> Any:
        """The input of ``rank`` at ``step``."""
        return paddle.to_tensor(np.random.RandomState(1000 * step + rank).randn(4, 8).astype("float32"))

    def loss(self, run: Run, batch: Any) -> Tensor:
        """A forward pass."""
        return run.model(batch).square().mean()

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        """One step; returns the loss."""
        loss = self.loss(run, batch)
        loss.backward()
        run.update()
        return float(loss.item())


def compare(case: Case, levels: Sequence[str] = LEVELS, steps: int = 10) -> dict[str, Difference]:
    """Train ``case`` under its reference and under each level; the largest difference on this rank."""
    mode = AVERAGED if dist.get_world_size() == 1 else case.reference
    losses, state = train(case, mode, steps)
    result = {}
    for level in levels:
        ours, our_state = train(case, level, steps)
        apart = np.abs(np.subtract(losses, ours)) / np.maximum(1.0, np.abs(losses))
        result[level] = Difference(float(np.max(apart)), different(state, our_state))
    return result


def train(case: Case, mode: str, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of ``steps`` steps, and weights and buffers after them."""
    run = Run(case, mode)
    for run.step in range(steps):
        loss = case.train_step(run, case.batch(run.rank, run.step))
        if loss is not None:
            run.losses.append(loss)
    return run.losses, run.state()


def average_grads(layer: nn.Layer) -> None:
    """What ``DataParallel`` does: the mean over the ranks, zeros from those that did not reach a parameter."""
    if dist.get_world_size() == 1:
        return
    params = [param for param in layer.parameters() if not param.stop_gradient]
    reached = paddle.to_tensor([float(param.grad is not None) for param in params])
    if params:
        dist.all_reduce(reached)
    for param, count in zip(params, reached.tolist()):
        if count == 0 or param.size == 0:
            continue
        grad = param.grad.clone() if param.grad is not None else paddle.zeros(param.shape, param.dtype)
        dist.all_reduce(grad)
        grad.scale_(1.0 / dist.get_world_size())
        if param.grad is not None:
            param.clear_gradient(False)
        param.grad = grad


def to_array(value: Tensor) -> np.ndarray:
    """On the host; bfloat16 as float32."""
    return (value.astype("float32") if value.dtype == paddle.bfloat16 else value).numpy()


def different(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> float:
    """The largest absolute difference between arrays by name; infinite where names, shapes or dtypes differ."""
    if {k: (v.shape, v.dtype) for k, v in expected.items()} != {k: (v.shape, v.dtype) for k, v in found.items()}:
        return float("inf")
    largest = [
        np.max(np.abs(value.astype("float64") - found[name].astype("float64")))
        for name, value in expected.items()
        if value.size
    ]
    return float(max(largest, default=0.0))

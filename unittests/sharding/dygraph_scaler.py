"""Cases of test_scaler.py.

Paddle enables its GradScaler on accelerators only, so these scalers are built as if there were one; everything that
they do afterwards runs on CPU.  The reference is Paddle's own scaler on gradients that have been averaged over the
ranks.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Iterator
from typing import Any, Optional
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.amp.auto_cast import amp_global_state

from paddle_group_sharded import group_sharded_parallel, unwrap
from paddle_group_sharded.errors import StateError
from unittests.harness import fresh
from unittests.sharding.parity import average_grads, to_array

Tensor = Any
INF = float("inf")
NAN = float("nan")


def enabled_scaler(cls: type = paddle.amp.GradScaler, **options: Any) -> Any:
    """A scaler as it would be with an accelerator."""
    place = types.SimpleNamespace(is_gpu_place=lambda: True)
    with mock.patch("paddle.amp.grad_scaler._dygraph_tracer", lambda: types.SimpleNamespace(_expected_place=place)):
        return cls(**options)


class PlainScaler(paddle.amp.GradScaler):
    """Paddle's own; with NumPy 2.4 it cannot print a scale of shape [1], which it does when the scale falls."""

    def _update(self) -> None:
        self._scale = self._scale.reshape([])
        super()._update()
        self._scale = self._scale.reshape([1])


def scaled(scaler: Any, loss: Tensor) -> Tensor:
    """``scaler.scale(loss)`` as inside an ``auto_cast`` to float16, which Paddle demands: on accelerators only."""
    with mock.patch.object(amp_global_state(), "amp_dtype", "float16"):
        return scaler.scale(loss)


class Scales(nn.Layer):
    """``count`` parameters of ``size`` elements; the gradient of each element is its input."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.items = nn.ParameterList([self.create_parameter([size]) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        return sum((item * row).sum() for item, row in zip(self.items, x))


class Training:
    """A model, its optimizer and its scaler, plain or wrapped."""

    def __init__(
        self,
        level: Optional[str],
        count: int,
        size: int,
        clip: Any = None,
        arguments: Optional[dict[str, Any]] = None,
        **options: Any,
    ) -> None:
        fresh()
        self.layer = Scales(count, size)
        self.scheduler = paddle.optimizer.lr.StepDecay(0.1, step_size=2)
        self.optimizer = paddle.optimizer.AdamW(
            self.scheduler, parameters=self.layer.parameters(), weight_decay=0.1, grad_clip=clip
        )
        self.scaler = enabled_scaler(PlainScaler if level is None else paddle.amp.GradScaler, **options)
        self.model: Any = self.layer
        self.level = level
        if level is not None:
            given = self.scaler
            self.model, self.optimizer, self.scaler = group_sharded_parallel(
                self.layer, self.optimizer, level, scaler=self.scaler, **(arguments or {})
            )
            if self.scaler is not given:
                raise AssertionError("the scaler that is returned is another object")

    def backward(self, batch: np.ndarray) -> None:
        self.loss = scaled(self.scaler, self.model(paddle.to_tensor(batch)))
        self.loss.backward()

    def average(self) -> None:
        if self.level is None:
            average_grads(self.layer)

    def step(self, way: str) -> None:
        if way == "minimize":
            self.average()
            self.scaler.minimize(self.optimizer, self.loss)
        else:
            self.average()
            if way == "unscale":
                self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def snapshot(self) -> dict[str, Any]:
        """Everything that a skipped step must leave alone; whole, and of the same keys plain or wrapped."""
        found = {name: to_array(value).copy() for name, value in self.model.state_dict().items()}
        for name, value in self.optimizer.state_dict().items():
            found[name] = to_array(value).copy() if isinstance(value, paddle.Tensor) else value
        return found


def batch_of(rank: int, step: int, count: int, size: int) -> np.ndarray:
    return np.random.RandomState(100 * step + rank).randn(count, size).astype("float32")


def train(
    level: Optional[str],
    poison: dict[int, tuple[int, int, int, float]],
    count: int,
    size: int,
    way: str,
    steps: int = 10,
    passes: int = 1,
    clip: Optional[str] = None,
    arguments: Optional[dict[str, Any]] = None,
    **options: Any,
) -> dict[str, Any]:
    """Train; ``poison[step]`` puts (rank, parameter, element, value) into a gradient."""
    clips = {None: None, "norm": nn.ClipGradByNorm(0.5), "global": nn.ClipGradByGlobalNorm(0.5)}
    run = Training(level, count, size, clips[clip], arguments, **options)
    rank = dist.get_rank()
    scales, states, counts = [], [], []
    for step in range(steps):
        for index in range(passes):
            batch = batch_of(rank, 10 * step + index, count, size)
            if step in poison and poison[step][0] == rank and index == passes - 1:
                _, parameter, element, value = poison[step]
                batch[parameter, element] = value
            run.backward(batch)
        skipped = level is not None and step in poison
        before = run.snapshot() if skipped else {}
        run.step(way)
        if skipped:
            after = run.snapshot()
            changed = [name for name in before if not np.array_equal(before[name], after.get(name))]
            if changed or before.keys() != after.keys():
                raise AssertionError(f"a skipped step has changed {changed or after.keys() ^ before.keys()}")
        run.optimizer.clear_grad()
        run.scheduler.step()
        scales.append(float(run.scaler.state_dict()["scale"][0]))
        states.append({key: value for key, value in run.scaler.state_dict().items() if key != "scale"})
        if level is not None:
            counts.append((run.scaler.skipped_steps, run.optimizer.skipped_steps))
    return {"scales": scales, "states": states, "weights": run.snapshot(), "counts": counts}


def parity(cases: list[dict[str, Any]], **arguments: Any) -> list[dict[str, Any]]:
    """For each case and level: do the scale and its counters agree at every step, how far are weights and states."""
    results = []
    for case in cases:
        expected = train(None, **case)
        row: dict[str, Any] = {"scales": expected["scales"]}
        for level in ("os", "os_g", "p_g_os"):
            found = train(level, arguments=arguments, **case)
            same = found["scales"] == expected["scales"] and found["states"] == expected["states"]
            row[level] = (same, _distance(expected["weights"], found["weights"]), found["counts"])
        results.append(row)
    return results


def _distance(expected: dict[str, Any], found: dict[str, Any]) -> float:
    """Of weights and states; Paddle creates states in a skipped first step too, which are not looked at then."""
    if expected.keys() != found.keys():
        return INF
    pairs = [(value, found[name]) for name, value in expected.items() if isinstance(value, np.ndarray)]
    return max(float(np.max(np.abs(a.reshape(-1) - b.reshape(-1)))) for a, b in pairs)


# ----------------------------------------------------------------------------------------------------------- refusals


def not_passed(level: str) -> list[str]:
    """Messages for a scaler that group_sharded_parallel has not seen; the weights stay."""
    messages = []
    for call in ("step", "minimize"):
        fresh()
        layer = Scales(3, 5)
        optimizer = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
        scaler = enabled_scaler(init_loss_scaling=4.0)
        model, optimizer, _ = group_sharded_parallel(layer, optimizer, level)
        before = {name: to_array(value).copy() for name, value in model.state_dict().items()}
        scaled(scaler, model(paddle.ones([3, 5]))).backward()
        try:
            scaler.step(optimizer) if call == "step" else scaler.minimize(optimizer, None)
        except StateError as error:
            messages.append(str(error))
        after = {name: to_array(value) for name, value in model.state_dict().items()}
        if any(not np.array_equal(before[name], after[name]) for name in before):
            raise AssertionError("the weights have changed")
    return messages


def wrong_optimizer() -> str:
    """A shared scaler with an optimizer that is not sharded."""
    layer = Scales(3, 5)
    plain = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
    scaler = enabled_scaler()
    model, _, scaler = group_sharded_parallel(layer, plain, "os", scaler=scaler)
    scaled(scaler, model(paddle.ones([3, 5]))).backward()
    try:
        scaler.step(plain)
    except ValueError as error:
        return str(error)
    return ""


def twice() -> list[str]:
    """unscale_() twice, and after step(): Paddle's errors."""
    run = Training("os_g", 3, 5)
    run.backward(batch_of(0, 0, 3, 5))
    messages = []
    run.scaler.unscale_(run.optimizer)
    for call in (run.scaler.unscale_, run.scaler.step, run.scaler.unscale_, run.scaler.step):
        try:
            call(run.optimizer)
        except RuntimeError as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages


def disabled(level: str) -> tuple[bool, float]:
    """A disabled scaler, passed or not, is as none: (enabled, difference from a run without)."""
    results = []
    for scaler in (None, paddle.amp.GradScaler(enable=False), "not passed"):
        fresh()
        layer = Scales(3, 5)
        optimizer = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
        passed = None if scaler == "not passed" else scaler
        model, optimizer, _ = group_sharded_parallel(layer, optimizer, level, scaler=passed)
        scaler = paddle.amp.GradScaler(enable=False) if scaler == "not passed" else scaler
        for step in range(4):
            loss = model(paddle.to_tensor(batch_of(dist.get_rank(), step, 3, 5)))
            if scaler is None:
                loss.backward()
                optimizer.step()
            elif step % 2:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            else:
                scaled = scaler.scale(loss)
                scaled.backward()
                scaler.minimize(optimizer, scaled)
            optimizer.clear_grad()
        results.append({name: to_array(value).copy() for name, value in model.state_dict().items()})
    return scaler.is_enable(), max(_distance(results[0], other) for other in results[1:])


# ------------------------------------------------------------------------------------------------------------- others


@contextlib.contextmanager
def captured_log() -> Iterator[list[str]]:
    """Messages of the package's loggers."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("paddle_group_sharded")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def persistent(level: str, steps: int) -> tuple[list[str], int, list[int], float]:
    """F6: every step overflows, on rank 0 alone; the log, the count, what the engine keeps, the scale."""
    run = Training(level, 4, 6, init_loss_scaling=2.0**20, decr_every_n_nan_or_inf=1)
    kept = []
    with captured_log() as lines:
        for _ in range(steps):
            batch = np.ones([4, 6], "float32")
            if dist.get_rank() == 0:
                batch[1, 2] = INF
            run.backward(batch)
            run.step("step")
            run.optimizer.clear_grad()
            kept.append(len(run.model._engine.residency._trace) + len(run.model._engine.residency._expected))
    return lines, run.scaler.skipped_steps, kept, float(run.scaler.state_dict()["scale"][0])


class UsersScaler(paddle.amp.GradScaler):
    """A user's own."""

    updates = 0

    def update(self) -> None:
        """Counts."""
        self.updates += 1
        super().update()


def subclass() -> tuple[int, bool, bool]:
    """A user's subclass keeps its methods, and is what it was after unwrap."""
    layer = Scales(3, 5)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
    scaler = enabled_scaler(UsersScaler)
    model, optimizer, scaler = group_sharded_parallel(layer, optimizer, "os_g", scaler=scaler)
    for _ in range(2):
        scaled(scaler, model(paddle.ones([3, 5]))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
    was_user = isinstance(scaler, UsersScaler)
    unwrap(model, optimizer, scaler)
    return scaler.updates, was_user, type(scaler) is UsersScaler


def half(level: str) -> tuple[float, bool]:
    """F5: float16 gradients whose sum over ranks and passes overflows float16, but not their average."""
    layer = nn.Layer()
    layer.weight = layer.create_parameter([6], default_initializer=nn.initializer.Constant(1.0))
    layer.to(dtype="float16")
    optimizer = paddle.optimizer.SGD(2.0**-14, parameters=layer.parameters())
    scaler = enabled_scaler(init_loss_scaling=1.0)
    layer.forward = lambda x: (layer.weight.astype("float32") * x).sum()
    model, optimizer, scaler = group_sharded_parallel(layer, optimizer, level, scaler=scaler)
    model(paddle.full([6], 40960.0)).backward()
    scaler.step(optimizer)
    return float(model.state_dict()["weight"].astype("float32")[0].item()), scaler.skipped_steps == 0

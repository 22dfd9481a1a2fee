"""Cases of test_precision.py.

CPU has no kernels that train 16-bit parameters, so these layers cast their weights to float32 to compute, and the
reference is written out: float32 masters in a plain optimizer, 16-bit weights that are a cast of them, gradients in 16
bits, averaged over the ranks.
"""

from __future__ import annotations

import contextlib
from typing import Any, Optional

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.utils import mix_precision_utils

from paddle_group_sharded import group_sharded_parallel, unwrap
from unittests.harness import fresh
from unittests.sharding.parity import LEVELS, Case, Run, average_grads, compare, to_array

Tensor = Any


class Low(nn.Layer):
    """A linear layer that computes in float32, whatever its weights are."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([inputs, outputs])
        self.bias = self.create_parameter([outputs], is_bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return paddle.tanh(paddle.matmul(x, self.weight.astype("float32")) + self.bias.astype("float32"))


def build(dtype: str) -> nn.Layer:
    """16-bit layers around a float32 one (B8); sizes that ranks do not divide."""
    layer = nn.Sequential(Low(8, 7), nn.LayerNorm(7), Low(7, 5), Low(5, 3))
    for index in (0, 2, 3):
        layer[index].to(dtype=dtype)
    return layer


def batch_of(rank: int, step: int) -> Tensor:
    return paddle.to_tensor(np.random.RandomState(1000 * step + rank).randn(4, 8).astype("float32"))


def optimizer_over(params: Any, name: str, clip: bool, **options: Any) -> Any:
    extra = {"AdamW": {"weight_decay": 0.1}, "Momentum": {"momentum": 0.9}, "Lamb": {"lamb_weight_decay": 0.1}}[name]
    grad_clip = nn.ClipGradByGlobalNorm(0.05) if clip else None
    return getattr(paddle.optimizer, name)(0.01, parameters=params, grad_clip=grad_clip, **extra, **options)


def reference(dtype: str, name: str, clip: bool, passes: int, steps: int, main_grad: bool = False) -> dict[str, Any]:
    """The weights after ``steps`` steps of the rule that the module's docstring describes."""
    fresh()
    layer = build(dtype)
    masters = []
    for param in layer.parameters():
        master = paddle.create_parameter(param.shape, "float32")
        master.name = param.name
        master.set_value(param.astype("float32"))
        masters.append(master)
    optimizer = optimizer_over(masters, name, clip)
    for step in range(steps):
        sums = [paddle.zeros(param.shape) for param in layer.parameters()]
        for number in range(passes):
            layer(batch_of(dist.get_rank(), 10 * step + number)).square().mean().backward()
            if main_grad or number == passes - 1:
                for total, param in zip(sums, layer.parameters()):
                    total.add_(param.grad.astype("float32"))
                    param.clear_gradient(False)
        for total, param, master in zip(sums, layer.parameters(), masters):
            if dist.get_world_size() > 1:
                dist.all_reduce(total)
            grad = total * (1.0 / dist.get_world_size())
            master.grad = grad if main_grad else grad.astype(param.dtype).astype("float32")
        optimizer.step()
        optimizer.clear_grad()
        for param, master in zip(layer.parameters(), masters):
            master.astype(param.dtype)._share_buffer_to(param)
    return {
        "weights": {name: to_array(value).copy() for name, value in layer.state_dict().items()},
        "masters": [master.numpy().copy() for master in masters],
    }


def sharded(
    level: str, dtype: str, name: str, clip: bool, passes: int, steps: int, main_grad: bool, **arguments: Any
) -> dict[str, Any]:
    """The same by this package."""
    fresh()
    plain = layer = build(dtype)
    optimizer: Any = optimizer_over(layer.parameters(), name, clip)
    if main_grad:
        layer = mix_precision_utils.MixPrecisionLayer(plain, dtype=dtype)
        optimizer = mix_precision_utils.MixPrecisionOptimizer(optimizer)
    model, optimizer, _ = group_sharded_parallel(layer, optimizer, level, **arguments)
    for step in range(steps):
        for number in range(passes):
            model(batch_of(dist.get_rank(), 10 * step + number)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    weights = {name: to_array(value).copy() for name, value in model.state_dict().items()}
    masters = optimizer.state_dict().get("master_weights", {})
    result = {
        "weights": weights,
        "masters": [to_array(masters.get(param.name, param)).copy() for param in plain.parameters()]
        if level != "p_g_os"
        else [
            to_array(masters[param.name]).copy() if param.name in masters else weights[key]
            for key, param in plain.named_parameters()
        ],
        "owned": sum(
            int(unit.tensor.size) for param, unit in optimizer._units.items() if unit.is_master
        ),
        "grad_dtypes": sorted(
            {str(group.gradients.dtype) for group in model._engine.groups if str(group.dtype) != "paddle.float32"}
        ),
        "names": list(model.state_dict()),
    }
    unwrapped, _ = unwrap(model, optimizer)
    if unwrapped is not layer:
        raise AssertionError("unwrap gives another layer")
    return result


def low_precision(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The largest differences of weights and of masters from the reference, and what this rank owns."""
    rows = []
    for case in cases:
        case = {"name": "AdamW", "clip": False, "passes": 1, "steps": 10, "main_grad": False, **case}
        arguments = case.pop("arguments", {})
        expected = reference(**case)
        row: dict[str, Any] = {}
        for level in LEVELS:
            found = sharded(level, **case, **arguments)
            if list(expected["weights"]) != found["names"]:
                raise AssertionError(f"names differ: {found['names']}")
            row[level] = (
                max(float(np.abs(expected["weights"][k] - found["weights"][k]).max()) for k in found["names"]),
                max(float(np.abs(a - b).max()) for a, b in zip(expected["masters"], found["masters"])),
                found["owned"],
                found["grad_dtypes"],
            )
        rows.append(row)
    return rows


# --------------------------------------------------------------------------------------------------------------- amp


class Amp(Case):
    """A plain float32 model under auto_cast, decorated where ``level`` says so."""

    def __init__(self, level: str, dtype: str, decorate: bool) -> None:
        self.level, self.dtype, self.decorate = level, dtype, decorate

    def build(self) -> nn.Layer:
        return nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.LayerNorm(7), nn.Linear(7, 3))

    def optimizer(self, layer: nn.Layer) -> Any:
        optimizer = super().optimizer(layer)
        if self.decorate:
            decorated, optimizer = paddle.amp.decorate(layer, optimizer, level=self.level, dtype=self.dtype)
            if decorated is not layer:
                raise AssertionError("decorate gives another layer")
        return optimizer

    def loss(self, run: Run, batch: Any) -> Tensor:
        with paddle.amp.auto_cast(level=self.level, dtype=self.dtype):
            return run.model(batch).astype("float32").square().mean()


def amp() -> dict[str, dict[str, float]]:
    """auto_cast O1 and O2, decorated or not, against paddle.DataParallel; on CPU Paddle computes in float32 then."""
    results = {}
    for level, dtype, decorate in (("O1", "bfloat16", False), ("O2", "bfloat16", True), ("O2", "float16", False)):
        differences = compare(Amp(level, dtype, decorate))
        results[f"{level} {dtype} {decorate}"] = {key: max(value) for key, value in differences.items()}
    return results


def multi_precision() -> dict[str, float]:
    """float32 parameters in an optimizer with multi_precision: no master is kept, and nothing changes."""

    class Multi(Amp):
        def optimizer(self, layer: nn.Layer) -> Any:
            return paddle.optimizer.AdamW(0.01, parameters=layer.parameters(), multi_precision=True)

        def loss(self, run: Run, batch: Any) -> Tensor:
            return run.model(batch).square().mean()

    return {key: max(value) for key, value in compare(Multi("O2", "bfloat16", False)).items()}


# --------------------------------------------------------------------------------------------------------- main_grad


class Plain(Case):
    """float32 parameters: on CPU, main_grad can accumulate these in both versions."""

    def build(self) -> nn.Layer:
        return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))


def main_grad_parity(texts: list[str]) -> dict[str, dict[str, float]]:
    """Differences of fleet's wrappers inside ours from averaged plain gradients."""
    results: dict[str, dict[str, float]] = {}
    for text in texts:
        expected = _main_grad_weights(None, text)
        results[text] = {}
        for level in LEVELS:
            found = _main_grad_weights(level, text)
            results[text][level] = max(float(np.abs(expected[name] - found[name]).max()) for name in expected)
            if list(expected) != list(found):
                raise AssertionError(f"names differ: {list(found)}")
    return results


def _main_grad_weights(level: Optional[str], text: str) -> dict[str, np.ndarray]:
    fresh()
    case = Plain()
    layer: Any = case.build()
    plain = layer
    optimizer: Any = case.optimizer(layer)
    model = layer
    if level is not None:
        layer = mix_precision_utils.MixPrecisionLayer(layer, dtype="bfloat16")
        optimizer = mix_precision_utils.MixPrecisionOptimizer(optimizer)
        model, optimizer, _ = group_sharded_parallel(layer, optimizer, level)
    for step in range(10):
        for number, letter in enumerate(text):
            local = letter == "n" and level is not None
            with model.no_sync() if local else contextlib.nullcontext():
                model(case.batch(dist.get_rank(), 10 * step + number)).square().mean().backward()
        if level is None:
            average_grads(plain)
        optimizer.step()
        optimizer.clear_grad()
    return {name: to_array(value).copy() for name, value in model.state_dict().items()}

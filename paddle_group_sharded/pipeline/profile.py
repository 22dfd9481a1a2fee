"""Time and memory of each layer on a sample input, one layer at a time: the whole model is never in memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import paddle

from ..errors import UsageError
from ..paddle_compat import allocated_bytes
from .build import function_of
from .desc import is_desc
from .naming import own_namespace
from .randomness import derive_seed, seeded

__all__ = ["profile_layers"]

_RUNS = 5  # of forward and backward; the first is not counted


def profile_layers(entries: Sequence[Any], sample_input: Any, base_seed: int) -> list[tuple[float, int]]:
    """Seconds of forward and backward, and bytes kept between them, of every layer; no communication.

    Each layer gets what the one before has returned.  Random states, names and built layers are left as they were.
    """
    measured = []
    x = _detached(sample_input)
    for index, entry in enumerate(entries):
        with own_namespace(), seeded(derive_seed(base_seed, "layer", index)):
            layer = entry.build_layer() if is_desc(entry) else entry if isinstance(entry, paddle.nn.Layer) else None
            run = function_of(entry, layer)
            built = None if is_desc(entry) else layer
            before = {} if built is None else _copies(built)
            try:
                seconds, num_bytes, x = _profile(run, x)
            except Exception as error:
                raise UsageError(f"layer {index} of the list, {entry}, fails on the sample input: {error}") from error
            if built is not None:
                for param in built.parameters():
                    param.clear_gradient(False)
                built.set_state_dict(before)
        measured.append((seconds, num_bytes))
    return measured


def _copies(layer: Any) -> dict[str, Any]:
    """The state of a built layer, of which running changes statistics."""
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def _profile(run: Any, x: Any) -> tuple[float, int, Any]:
    seconds, kept = [], 0
    for _ in range(_RUNS):
        _synchronize()
        gc.collect()
        before, start = _memory(), time.perf_counter()
        output = run(x)
        _synchronize()
        forward, kept = time.perf_counter(), _memory() - before
        outputs = [tensor for tensor in paddle.utils.flatten(output) if _wants_grad(tensor)]
        if outputs:
            paddle.autograd.backward(outputs, [paddle.ones_like(tensor) for tensor in outputs])
            _synchronize()
        seconds.append(time.perf_counter() - start if outputs else forward - start)
        output = _detached(output)
        for tensor in paddle.utils.flatten(x):
            if _wants_grad(tensor):
                tensor.clear_gradient(False)
    return statistics.median(seconds[1:]), max(0, kept), output


def _synchronize() -> None:
    if paddle.get_device() != "cpu":
        paddle.device.synchronize()


def _memory() -> int:
    return allocated_bytes() if paddle.get_device() == "cpu" else int(paddle.device.cuda.memory_allocated())


def _wants_grad(value: Any) -> bool:
    return isinstance(value, paddle.Tensor) and not value.stop_gradient


def _detached(value: Any) -> Any:
    """``value`` with every tensor cut off from its history; float tensors want a gradient, as in a stage."""

    def detach(item: Any) -> Any:
        if not isinstance(item, paddle.Tensor):
            return item
        cut = item.detach()
        cut.stop_gradient = not cut.is_floating_point()
        return cut

    return paddle.utils.map_structure(detach, value)

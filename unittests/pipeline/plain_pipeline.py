"""The reference of the pipeline's tests: one process, plain Paddle, a loop over micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

from paddle import nn

from paddle_group_sharded import LayerDesc, PipelineLayer, SharedLayerDesc
from paddle_group_sharded.pipeline.step_seeds import seed_layer
from unittests.harness import fresh

Tensor = Any


class Plain(nn.Layer):
    """The entries of a pipeline's list, built by hand; functions have no name."""

    def __init__(self, entries: Sequence[Any]) -> None:
        super().__init__()
        self.steps: list[Callable[[Any], Any]] = []
        shared: dict[str, nn.Layer] = {}
        for index, entry in enumerate(entries):
            if isinstance(entry, SharedLayerDesc):
                layer = entry.layer_func(*entry.inputs, **entry.kwargs)
                first = shared.setdefault(entry.layer_name, layer)
                if first is not layer:
                    layer.weight = first.weight
                self.add_sublayer(str(index), layer)
                forward = entry.forward_func
                self.steps.append(layer if forward is None else lambda x, f=forward, a=layer: f(a, x))
            elif isinstance(entry, LayerDesc):
                layer = entry.layer_func(*entry.inputs, **entry.kwargs)
                self.add_sublayer(str(index), layer)
                self.steps.append(layer)
            else:
                self.steps.append(entry)

    def forward(self, x: Any, before_layer: Optional[Callable[[int], None]] = None) -> Any:
        for index, step in enumerate(self.steps):
            if before_layer is not None:
                before_layer(index)
            x = step(x)
        return x


def pair(entries: Callable[[], list[Any]], **options: Any) -> tuple[Plain, PipelineLayer]:
    """A plain model and a pipeline with its weights and names."""
    fresh()
    plain = Plain(entries())
    fresh()
    layer = PipelineLayer(entries(), **options)
    assert layer.set_layer_state_dict(plain.state_dict()) == ([], [])
    return plain, layer


def parts(batch: Any, count: int) -> Iterator[tuple[Any, Any, int]]:
    """Micro-batches and their sizes, as even as possible, the larger first."""
    x, y = batch
    size, larger = divmod(y.shape[0], count)
    start = 0
    for index in range(count):
        stop = start + size + (index < larger)
        yield _cut(x, start, stop), y[start:stop], stop - start
        start = stop


def _cut(x: Any, start: int, stop: int) -> Any:
    if isinstance(x, dict):
        return {key: value[start:stop] for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(value[start:stop] for value in x)
    return x[start:stop]


def accumulate(
    plain: Plain,
    loss_fn: Callable[[Any, Any], Tensor],
    batch: Any,
    count: int,
    *,
    seeds: Optional[tuple[int, int, int]] = None,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    replicas: int = 1,
) -> float:
    """Gradients of a batch, micro-batch by micro-batch; its loss.

    ``seeds``: base seed, step and replica, where random numbers have to be those of a pipeline.
    """
    plain.train()
    total = 0.0
    for number, (x, y, size) in enumerate(parts(batch, count)):
        before = None if seeds is None else functools.partial(seed_layer, *seeds, number)
        loss = loss_fn(plain(x, before), y) * (size / batch[1].shape[0])
        scale(loss / replicas).backward()
        total += float(loss.item())
    return total


def distance(plain: nn.Layer, model: Any) -> float:
    """The largest difference of any parameter or buffer of this rank from the plain model's."""
    expected = plain.state_dict()
    found = model.state_dict()
    assert set(found) <= set(expected)
    pairs = ((value.astype("float64"), expected[name].astype("float64")) for name, value in found.items())
    return max((float((mine - theirs).abs().max().item()) for mine, theirs in pairs), default=0.0)

"""The layers of one virtual stage, run one after the other, with or without recompute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple, Optional

import paddle
from paddle.distributed.fleet.utils import recompute

from .randomness import RandomStates

__all__ = ["BeforeLayer", "Chunk", "SharedForward"]

_BATCH_NORM = ("_mean", "_variance")

BeforeLayer = Optional[Callable[[int], None]]
"""Called with the global number of a layer before it runs, in recompute too."""


class SharedForward(NamedTuple):
    """A shared layer that runs another forward than its own where it stands."""

    layer: Any
    forward_func: Callable[[Any, Any], Any]

    def __call__(self, x: Any) -> Any:
        """What stands in the list as one step."""
        return self.forward_func(self.layer, x)


class Chunk:
    """Layers ``start`` to ``stop - 1`` of the list, on the rank that holds them."""

    def __init__(
        self, virtual_stage: int, start: int, layers: Sequence[Callable[..., Any]], recompute_interval: int = 0
    ) -> None:
        self.virtual_stage = virtual_stage
        self.start = start
        self.stop = start + len(layers)
        self.layers = list(layers)  # each is called with what the one before returned
        self.recompute_interval = recompute_interval  # layers whose activations are computed again together; 0: kept

    def __call__(self, x: Any, before_layer: BeforeLayer = None) -> Any:
        """Run the layers on ``x``, which is whatever the layer before them returned."""
        for start, stop in self._segments():
            run = self._runner(start, stop, before_layer)
            if self.recompute_interval and paddle.is_grad_enabled() and self._has_params(start, stop):
                # Saved tensors are found by hooks, not by their place among the inputs, so the inputs may be nested,
                # and need no gradient.  Random states are ours to keep, see below.
                replay = _Replay(run, self.layers[start:stop])
                x = recompute(replay, x, _wants_grad(), use_reentrant=False, preserve_rng_state=False)
            else:
                x = run(x)
        return x

    def parameters(self) -> list[Any]:
        """Parameters of all layers; one that several of them share stands there once."""
        found = {id(param): param for layer in self.layers for param in _parameters(layer)}
        return list(found.values())

    def _segments(self) -> Iterator[tuple[int, int]]:
        step = self.recompute_interval or len(self.layers)
        for start in range(0, len(self.layers), step):
            yield start, min(start + step, len(self.layers))

    def _runner(self, start: int, stop: int, before_layer: BeforeLayer) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            for position in range(start, stop):
                if before_layer is not None:
                    before_layer(self.start + position)
                x = self.layers[position](x)
            return x

        return run

    def _has_params(self, start: int, stop: int) -> bool:
        """Whether a gradient arises here even if the input needs none; functions alone are not worth a second run."""
        return any(_parameters(layer) for layer in self.layers[start:stop])


class _Replay:
    """Runs layers twice with the same random numbers; the second run leaves all else as if it had not been.

    Paddle's own way restores the generators of the current device only, and lets the statistics of a BatchNorm move
    twice.
    """

    def __init__(self, run: Callable[[Any], Any], layers: Sequence[Any]) -> None:
        self._run = run
        self._layers = layers
        self._states: Optional[RandomStates] = None  # of the first run, once it has begun

    def __call__(self, x: Any, _: Any) -> Any:
        if self._states is None:
            self._states = RandomStates.now()
            return self._run(x)
        now, statistics = RandomStates.now(), [each for layer in self._layers for each in _statistics(layer)]
        self._states.restore()
        try:
            return self._run(x)
        finally:
            now.restore()
            for each in statistics:
                each.restore()


class _Statistic(NamedTuple):
    """A tensor that running a layer may change, and what it holds."""

    holder: Any
    name: str
    tensor: Any
    value: Any

    def restore(self) -> None:
        if getattr(self.holder, self.name) is not self.tensor:  # it was replaced, not written to
            setattr(self.holder, self.name, self.tensor)
        with paddle.no_grad():
            self.tensor.set_value(self.value)


def _statistics(layer: Any) -> Iterator[_Statistic]:
    """Buffers, and what a BatchNorm keeps as frozen parameters."""
    layer = layer.layer if isinstance(layer, SharedForward) else layer
    for holder in layer.sublayers(include_self=True) if isinstance(layer, paddle.nn.Layer) else ():
        names = [name for name, _ in holder.named_buffers(include_sublayers=False)]
        for name in [*names, *_BATCH_NORM]:
            tensor = getattr(holder, name, None)
            if isinstance(tensor, paddle.Tensor) and tensor.stop_gradient:
                yield _Statistic(holder, name, tensor, tensor.clone())


def _wants_grad() -> Any:
    """One more input, without which Paddle warns at every pass of layers whose input needs no gradient."""
    tensor = paddle.zeros([1])
    tensor.stop_gradient = False
    return tensor


def _parameters(layer: Any) -> list[Any]:
    layer = layer.layer if isinstance(layer, SharedForward) else layer
    return list(layer.parameters()) if isinstance(layer, paddle.nn.Layer) else []

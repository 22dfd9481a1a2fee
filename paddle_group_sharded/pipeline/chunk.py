"""The layers of one virtual stage, run one after the other, with or without recompute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple, Optional

import paddle
from paddle.distributed.fleet.utils import recompute

from .randomness import RandomStates

__all__ = ["BeforeLayer", "Chunk", "SharedForward"]

_BATCH_NORM = ("_mean", "_variance")

Place = tuple[int, str]  # id of the layer that holds a buffer, and the buffer's name

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
        self._snapshots = _Snapshots()
        self.recompute_interval = recompute_interval  # layers whose activations are computed again together; 0: kept

    def __call__(self, x: Any, before_layer: BeforeLayer = None) -> Any:
        """Run the layers on ``x``, which is whatever the layer before them returned."""
        for start, stop in self._segments():
            run = self._runner(start, stop, before_layer)
            if self.recompute_interval and paddle.is_grad_enabled() and self._has_params(start, stop):
                # Saved tensors are found by hooks, not by their place among the inputs, so the inputs may be nested,
                # and need no gradient.  Random states are ours to keep, see below.
                replay = _Replay(run, self.layers[start:stop], self._snapshots)
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
    """Runs layers twice, from the same random numbers and buffers; the second run leaves all as if it had not been.

    Paddle's own way restores the generators of the current device only, and lets buffers move twice.
    """

    def __init__(self, run: Callable[[Any], Any], layers: Sequence[Any], snapshots: _Snapshots) -> None:
        self._run = run
        self._layers = layers
        self._snapshots = snapshots
        self._states: Optional[RandomStates] = None  # of the first run, once it has begun
        self._values: dict[Place, Any] = {}  # of the buffers before it

    def __call__(self, x: Any, _: Any) -> Any:
        holders = _holders(self._layers)
        if self._states is None:
            self._states, self._values = RandomStates.now(), self._snapshots.take(holders)
            return self._run(x)
        now, buffers = RandomStates.now(), [*_buffers(holders)]
        statistics = [(tensor, tensor.clone()) for tensor in _statistics(holders)]
        # Other tensors stand in for the buffers, so what this run writes is lost, but stays as its graph needs it.
        stand_ins: dict[int, Any] = {}  # by id, since one tensor may have several names
        for holder, name, tensor in buffers:
            if tensor.stop_gradient:
                stand_ins.setdefault(id(tensor), self._values.get((id(holder), name), tensor).clone())
        self._states.restore()
        try:
            for holder, name, tensor in buffers:
                setattr(holder, name, stand_ins.get(id(tensor), tensor))
            return self._run(x)
        finally:
            now.restore()
            for holder, name, tensor in buffers:
                setattr(holder, name, tensor)
            with paddle.no_grad():
                for tensor, value in statistics:
                    tensor.set_value(value)


class _Snapshots:
    """Copies of buffers; as long as a buffer stays the same, such as a mask, there is one copy of it."""

    def __init__(self) -> None:
        self._last: dict[Place, Any] = {}

    @paddle.no_grad()
    def take(self, holders: Sequence[Any]) -> dict[Place, Any]:
        """The present values."""
        found = {}
        for holder, name, tensor in _buffers(holders):
            if not tensor.stop_gradient:  # a weight that a hook has computed and will compute again
                continue
            place = id(holder), name
            if place not in self._last or not _equal(self._last[place], tensor):
                self._last[place] = tensor.clone()
            found[place] = self._last[place]
        return found


def _equal(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all().item())


def _holders(layers: Sequence[Any]) -> list[Any]:
    """The layers and all their sublayers, each once."""
    own = [layer.layer if isinstance(layer, SharedForward) else layer for layer in layers]
    found = [layer.sublayers(include_self=True) for layer in own if isinstance(layer, paddle.nn.Layer)]
    return list({id(each): each for sublayers in found for each in sublayers}.values())


def _buffers(holders: Sequence[Any]) -> Iterator[tuple[Any, str, Any]]:
    """Holder, name and tensor."""
    for holder in holders:
        for name, tensor in list(holder.named_buffers(include_sublayers=False)):
            if tensor is not None:
                yield holder, name, tensor


def _statistics(holders: Sequence[Any]) -> Iterator[Any]:
    """What a BatchNorm keeps as frozen parameters, which its forward writes, but does not read while it does."""
    for holder in holders:
        own = {id(param) for param in holder.parameters(include_sublayers=False)}
        for name in _BATCH_NORM:
            tensor: Any = getattr(holder, name, None)
            if id(tensor) in own and tensor.stop_gradient:
                yield tensor


def _wants_grad() -> Any:
    """One more input, without which Paddle warns at every pass of layers whose input needs no gradient."""
    tensor = paddle.zeros([1])
    tensor.stop_gradient = False
    return tensor


def _parameters(layer: Any) -> list[Any]:
    layer = layer.layer if isinstance(layer, SharedForward) else layer
    return list(layer.parameters()) if isinstance(layer, paddle.nn.Layer) else []

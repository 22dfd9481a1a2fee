"""Whole values into a sharded model, or into a layer of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

from ..comm.agreement import agree
from ..errors import UsageError
from .matching import fingerprint, values_differ
from .whole import as_tensor, plain_state, state_problems

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["LoadWhole", "load_whole", "set_whole"]

Layer = Any
Tensor = Any


def load_whole(
    engine: Engine, layer: Layer, state_dict: Mapping[str, Any], use_structured_name: bool = True
) -> tuple[list[str], list[str]]:
    """What :meth:`.model.ShardedModel.set_state_dict` says, for ``layer``.  Collective."""
    targets = plain_state(layer)
    if not use_structured_name:
        targets = {tensor.name: tensor for tensor in targets.values()}
    given = {name: state_dict[name] for name in targets if name in state_dict}
    problems = state_problems(targets, given)
    problem = UsageError("the state does not fit the model; " + "; ".join(problems)) if problems else None
    # Buffers, and the statistics of a BatchNorm, which are frozen parameters, are each rank's own.
    shared = {name: value for name, value in given.items() if _is_shared(engine, targets[name])}
    checksum = fingerprint(shared) if problem is None else 0
    agree((engine.comm, engine.dp_comm), "model.set_state_dict", problem, checksum, values_differ)
    set_whole(engine, targets, given)
    missing = [name for name in targets if name not in state_dict]
    return missing, [name for name in state_dict if name not in targets]


def set_whole(engine: Engine, targets: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Set those ``targets`` that have a value, given alike on every rank.  No communication."""
    for name, tensor in targets.items():
        if name not in values:
            continue
        value = as_tensor(values[name])
        if id(tensor) in engine.by_id:
            engine.write_param(engine.by_id[id(tensor)], value)
        else:
            tensor.set_value(value.astype(tensor.dtype))


def _is_shared(engine: Engine, tensor: Tensor) -> bool:
    """Whether the engine keeps ``tensor`` equal on all ranks."""
    param = engine.by_id.get(id(tensor))
    return param is not None and (param.group.placements.param or not tensor.stop_gradient)


class LoadWhole:
    """``set_state_dict`` of a layer with sharded parameters.

    Paddle's own method leaves out parameters without memory, silently on 2.6, or fails at them half-way.
    """

    NAMES = ("set_state_dict", "set_dict", "load_dict")

    def __init__(self, engine: Engine, layer: Layer) -> None:
        """Stand in for the method of ``layer`` until :meth:`remove`."""
        self._engine = engine
        self._layer = layer
        for name in self.NAMES:
            layer.__dict__[name] = self

    def __call__(self, state_dict: Mapping[str, Any], use_structured_name: bool = True) -> Any:
        """As :meth:`.model.ShardedModel.set_state_dict`, for this layer.  Collective."""
        return load_whole(self._engine, self._layer, state_dict, use_structured_name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the layer is not managed: it has Paddle's method."""
        layer = memo[id(self._layer)]
        return MethodType(type(layer).set_state_dict, layer)

    def remove(self) -> None:
        """Give the layer its own method back."""
        for name in self.NAMES:
            self._layer.__dict__.pop(name, None)

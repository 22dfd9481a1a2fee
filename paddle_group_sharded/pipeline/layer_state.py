"""A rank's layers read and written under the names of the one-process model: ``"3.weight"`` of layer 3 of the list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle

from ..errors import UsageError
from .shared import SharedWeights

__all__ = ["as_tensor", "load_layers", "own_names", "shape_problems", "state_of_layers"]

Layer = Any
Tensor = Any


def state_of_layers(layers: Mapping[int, Layer]) -> dict[str, Tensor]:
    """Live parameters and buffers of ``layers``, by number and structured name."""
    in_order = sorted(layers.items())
    return {f"{index}.{name}": tensor for index, layer in in_order for name, tensor in layer.state_dict().items()}


def load_layers(
    layers: Mapping[int, Layer], shared: SharedWeights, num_layers: int, state_dict: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """What :meth:`.layer.PipelineLayer.set_layer_state_dict` says."""
    targets = state_of_layers(layers)
    found: dict[str, Any] = {}
    for name in targets:
        given = next((alias for alias in shared.aliases(name) if alias in state_dict), None)
        if given is not None:
            found[name] = state_dict[given]
    problems = shape_problems(targets, found)
    if problems:
        raise UsageError("the state does not fit the model; " + "; ".join(problems))
    with paddle.no_grad():
        for name, value in found.items():
            targets[name].set_value(as_tensor(value).astype(targets[name].dtype))
    unexpected = [name for name in state_dict if name not in targets and not _of_another_rank(name, layers, num_layers)]
    return [name for name in targets if name not in found], unexpected


def own_names(
    own: Mapping[str, Tensor], layers: Mapping[int, Layer], shared: SharedWeights, state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """``state_dict`` with names of the one-process model replaced by those of ``own``, the rank's ``state_dict()``.

    Where ranks have chunks, a name may mean different tensors in the two (``"4.1.weight"``: of the second layer of a
    chunk, or of a Sequential in the list).  A state that is whole under this rank's own names is taken as it is, any
    other one by the one-process names if it has one of them.
    """
    if all(name in state_dict for name in own):
        return dict(state_dict)
    aliases: dict[int, list[str]] = {}  # one-process names by tensor
    for name, tensor in state_of_layers(layers).items():
        aliases.setdefault(id(tensor), []).extend(shared.aliases(name))
    known = {name: aliases.get(id(tensor), [name]) for name, tensor in own.items()}  # a subclass may add its own
    given = {name: [alias for alias in names if alias in state_dict] for name, names in known.items()}
    found = {name: state_dict[names[0]] for name, names in given.items() if names}
    means_the_same = all(name in names for name, names in known.items() if len(names) == 1)
    if means_the_same or not found:
        found.update((name, state_dict[name]) for name in own if name in state_dict)
    used = {alias for names in given.values() for alias in names}
    return {**found, **{name: value for name, value in state_dict.items() if name not in used and name not in own}}


def shape_problems(targets: Mapping[str, Tensor], values: Mapping[str, Any]) -> list[str]:
    """One sentence for each value that has another shape than its target."""
    return [
        f"{name}: expected shape {list(targets[name].shape)}, got {list(value.shape)}"
        for name, value in values.items()
        if list(value.shape) != list(targets[name].shape)
    ]


def as_tensor(value: Any) -> Tensor:
    """A value of a state dict, which may be an array, as a tensor."""
    return value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)


def _of_another_rank(name: str, layers: Mapping[int, Layer], num_layers: int) -> bool:
    number = name.partition(".")[0]
    return number.isdigit() and int(number) < num_layers and int(number) not in layers

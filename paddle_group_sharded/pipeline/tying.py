"""Layers of one rank that share weights: finding the parameters, and letting all hold the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import paddle

from ..errors import UsageError
from ..paddle_compat import layer_params
from .desc import shared_attrs

__all__ = ["Held", "Report", "check_attr_counts", "check_shapes", "tie"]

Layer = Any
Tensor = Any

_OPTIONS = ("name", "stop_gradient", "optimize_attr", "regularizer", "need_clip")  # of the one parameter that it is


class Report(NamedTuple):
    """What other ranks have to know of :class:`Held`."""

    names: dict[str, int]
    shapes: list[tuple[list[int], str]]
    options: list[dict[str, Any]]


class Held(NamedTuple):
    """What one rank holds of a key."""

    params: tuple[Tensor, ...]  # one per shared attribute
    names: dict[str, int]  # structured name in the one-process model of each owner here -> position in params

    def report(self) -> Report:
        """What the other ranks have to know of it."""
        shapes = [(list(param.shape), str(param.dtype)) for param in self.params]
        options = [{name: getattr(param, name) for name in _OPTIONS if hasattr(param, name)} for param in self.params]
        return Report(self.names, shapes, options)


def check_attr_counts(key: str, indices: Sequence[int], entries: Sequence[Any]) -> None:
    """Raise where the owners at ``indices`` do not share equally many attributes."""
    counts = {index: len(shared_attrs(entries[index])) for index in indices}
    if len(set(counts.values())) > 1:
        raise UsageError(
            f"shared layer {key!r}: expected the same number of shared attributes everywhere, got "
            + ", ".join(f"{count} at layer {index}" for index, count in counts.items())
        )


def tie(key: str, layers: Mapping[int, Layer], entries: Sequence[Any]) -> Held:
    """Let all owners of this rank hold the parameters of the first of them."""
    params: list[Tensor] = []
    names: dict[str, int] = {}
    for index, layer in layers.items():
        for position, attr in enumerate(shared_attrs(entries[index])):
            param = _resolve(key, index, layer, attr)
            places = _places(key, index, layer, attr, param)
            names.update((f"{index}.{name}", position) for name, _, _ in places)
            if position == len(params):
                params.append(param)
            elif list(param.shape) != list(params[position].shape) or param.dtype != params[position].dtype:
                raise UsageError(
                    f"shared layer {key!r}: expected {list(params[position].shape)} {params[position].dtype} for "
                    f"{attr!r} of layer {index}, as at its first owner; got {list(param.shape)} {param.dtype}"
                )
            else:
                for _, holder, local in places:
                    setattr(holder, local, params[position])
    return Held(tuple(params), names)


def _resolve(key: str, index: int, layer: Layer, attr: str) -> Tensor:
    value = layer
    for part in attr.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, paddle.Tensor):
        known = ", ".join(name for name, _ in layer.named_parameters())
        raise UsageError(
            f"shared layer {key!r}: layer {index} ({type(layer).__name__}) has no parameter {attr!r}; its parameters "
            f"are {known or 'none'}"
        )
    return value


def _places(key: str, index: int, layer: Layer, attr: str, param: Tensor) -> list[tuple[str, Layer, str]]:
    """Structured name in ``layer``, the sublayer that holds the parameter, and its name there; of each such place.

    ``attr`` may be a property that leads to a parameter of another name, and a layer may tie weights in itself.
    """
    places = [
        (f"{prefix}.{local}" if prefix else local, holder, local)
        for prefix, holder in layer.named_sublayers(include_self=True)
        for local, found in layer_params(holder).items()
        if found is param
    ]
    if places:
        return places
    raise UsageError(
        f"shared layer {key!r}: {attr!r} of layer {index} ({type(layer).__name__}) is not a parameter of the layer but "
        f"another tensor; share the parameters that it is made of"
    )


def check_shapes(key: str, reports: Sequence[Mapping[str, Report]]) -> None:
    """Raise, on every rank alike, where copies of a weight could not be equal."""
    shapes = {rank: report[key].shapes for rank, report in enumerate(reports) if key in report}
    first, *others = shapes
    for rank in others:
        if shapes[rank] != shapes[first]:
            raise UsageError(
                f"shared layer {key!r} has shapes and types {shapes[first]} on rank {first}, but {shapes[rank]} on "
                f"rank {rank}; shared weights are of one shape"
            )

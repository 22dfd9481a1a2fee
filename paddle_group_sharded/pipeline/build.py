"""Build some layers of the list with the weights and the names that they have in one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import paddle

from ..errors import UsageError
from .chunk import SharedForward
from .desc import is_desc, is_shared_desc
from .naming import LayerNames
from .randomness import derive_seed, seeded
from .segment import Segmentation

__all__ = ["build_layers", "check_built_layers", "function_of"]

Layer = Any


def build_layers(entries: Sequence[Any], indices: Iterable[int], base_seed: int, names: LayerNames) -> dict[int, Layer]:
    """The layers among the entries at ``indices``, by index; functions are left out.

    Random numbers drawn by a constructor depend on ``base_seed`` and the index alone; the generators are left as they
    were.  Automatic names go on after those of the whole list.
    """
    layers: dict[int, Layer] = {}
    for index in indices:
        entry = entries[index]
        if is_desc(entry):
            names.move_to(index)
            with seeded(derive_seed(base_seed, "layer", index)):
                layers[index] = entry.build_layer()
        elif isinstance(entry, paddle.nn.Layer):
            layers[index] = entry
    names.move_to(len(entries))
    return layers


def function_of(entry: Any, layer: Layer) -> Any:
    """What runs where ``entry`` stands, for which ``layer`` was built (None for a function)."""
    if is_shared_desc(entry) and entry.forward_func is not None:
        return SharedForward(layer, entry.forward_func)
    return entry if layer is None else layer


def check_built_layers(entries: Sequence[Any], segmentation: Segmentation) -> None:
    """Refuse parameters of built layers that would stand on two ranks, where they would silently become two."""
    first: dict[int, int] = {}  # id of a parameter to the layer where it stands
    for index, entry in enumerate(entries):
        if is_desc(entry) or not isinstance(entry, paddle.nn.Layer):
            continue
        for name, param in entry.named_parameters():
            other = first.setdefault(id(param), index)
            ranks = [segmentation.rank_of_layer(layer) for layer in (other, index)]
            if ranks[0] != ranks[1]:
                raise UsageError(
                    f"parameter {name!r} of layer {index} ({type(entry).__name__}) also stands in layer {other}, but "
                    f"these are on stages {ranks[1]} and {ranks[0]} and would be trained apart; describe both with "
                    f"SharedLayerDesc, or choose bounds that keep them together"
                )

"""A list of layers as one ordinary layer in one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import paddle
from paddle import nn

from ..comm import LocalComm
from .build import build_layers, function_of
from .chunk import BeforeLayer, Chunk
from .grid import Grid
from .naming import LayerNames
from .segment import Segmentation
from .shared import SharedWeights

__all__ = ["SequentialModel", "sequential_model"]


class SequentialModel(nn.Layer):  # type: ignore[misc]  # Paddle is Any
    """The layers of a pipeline in the order of the list, as sublayers ``"0"``, ``"1"`` ...; functions have no name."""

    def __init__(self, chunk: Chunk, layers: Mapping[int, Any]) -> None:
        super().__init__()
        self._chunk = chunk
        for index, layer in layers.items():
            self.add_sublayer(str(index), layer)

    def forward(self, x: Any, before_layer: BeforeLayer = None) -> Any:
        """Run all layers on ``x``; ``before_layer`` is called with each one's number before it runs."""
        return self._chunk(x, before_layer)


def sequential_model(
    entries: Sequence[Any], base_seed: int, names: LayerNames, recompute_interval: int = 0
) -> SequentialModel:
    """Build all ``entries`` anew, with the weights and names of the pipeline; the names of the process are not used up.

    Built layers among them are copied.
    """
    entries = _with_copies(entries)
    with paddle.utils.unique_name.guard():
        layers = build_layers(entries, range(len(entries)), base_seed, names)
    whole = Segmentation((0, len(entries)))
    SharedWeights(entries, whole, Grid(((0,),), 0), layers, LocalComm())
    functions = [function_of(entry, layers.get(index)) for index, entry in enumerate(entries)]
    return SequentialModel(Chunk(0, 0, functions, recompute_interval), layers)


def _with_copies(entries: Sequence[Any]) -> list[Any]:
    """``entries`` with copies of the built layers; what these share, the copies share, under the same names."""
    built = {index: entry for index, entry in enumerate(entries) if isinstance(entry, nn.Layer)}
    copies = copy.deepcopy(built)
    for index, layer in built.items():
        for param, its_copy in zip(layer.parameters(), copies[index].parameters()):
            its_copy.name = param.name
    return [copies.get(index, entry) for index, entry in enumerate(entries)]

"""Build some layers of the list with the weights and the names that they have in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import paddle

from ..comm import create_comm
from ..errors import UsageError
from .chunk import SharedForward
from .desc import is_desc, is_shared_desc
from .grid import Ranks
from .naming import LayerNames
from .randomness import derive_seed, seeded
from .segment import Segmentation

__all__ = ["build_layers", "check_built_layers", "equalize_built_layers", "function_of"]

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
                try:
                    layers[index] = entry.build_layer()
                except Exception as error:
                    raise UsageError(f"layer {index} of the list, {entry}, cannot be built: {error}") from error
        elif isinstance(entry, paddle.nn.Layer):
            layers[index] = entry
    names.move_to(len(entries))
    return layers


def equalize_built_layers(entries: Sequence[Any], layers: Mapping[int, Layer], ranks: tuple[int, ...]) -> None:
    """Give the built layers among ``layers`` the values that they have on the first of ``ranks``, the replicas.

    Described layers start equal by their seeds, but built ones may have been built from any.  Collective.
    """
    tensors = {
        f"{index}.{name}": tensor
        for index, layer in layers.items()
        if not is_desc(entries[index])
        for name, tensor in layer.state_dict().items()
        if tensor.size
    }
    if len(ranks) == 1 or not tensors:
        return
    comm = create_comm(Ranks(ranks))
    try:
        with paddle.no_grad():
            for name, tensor in tensors.items():
                comm.broadcast(tensor, 0, f"built layer {name}").wait()
    finally:
        comm.close()


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

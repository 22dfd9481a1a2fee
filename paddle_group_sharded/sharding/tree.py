"""The tensors inside whatever a layer returns or keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import paddle

__all__ = ["results_of", "tensors_in"]

_OF_EVERY_LAYER = frozenset(vars(paddle.nn.Layer()))
MAX_ITEMS = 64  # a larger container in an attribute of a layer is a table of some kind, not a list of losses


def results_of(layer: Any, outputs: Any) -> Iterable[Any]:
    """The tensors in what a call of ``layer`` has returned, and in what it keeps: auxiliary losses in attributes."""
    if not type(layer).__module__.startswith("paddle."):
        return chain(tensors_in(outputs), _tensors_kept_by(layer))
    return (outputs,) if isinstance(outputs, paddle.Tensor) else tensors_in(outputs)


def _tensors_kept_by(layer: Any) -> Iterator[Any]:
    """The tensors in the attributes that a user's layer has beside those of every layer."""
    for name, value in vars(layer).items():
        is_small = isinstance(value, (list, tuple, Mapping)) and len(value) <= MAX_ITEMS
        if (is_small or isinstance(value, paddle.Tensor)) and name not in _OF_EVERY_LAYER:
            yield from tensors_in(value)


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield every tensor in ``value``: tuples, lists, dicts, dataclasses and plain objects, nested in any way."""
    stack, seen = [value], set()
    while stack:
        item = stack.pop()
        if isinstance(item, paddle.Tensor):
            if id(item) not in seen:
                seen.add(id(item))
                yield item
            continue
        if item is None or isinstance(item, (str, bytes, int, float, bool, type)) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
        elif dataclasses.is_dataclass(item):
            stack.extend(getattr(item, field.name) for field in dataclasses.fields(item))
        elif not isinstance(item, paddle.nn.Layer) and hasattr(item, "__dict__"):
            stack.extend(vars(item).values())

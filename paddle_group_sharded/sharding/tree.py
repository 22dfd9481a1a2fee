"""The tensors inside whatever a layer returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import paddle

__all__ = ["tensors_in", "tensors_kept_by"]

_OF_EVERY_LAYER = frozenset(vars(paddle.nn.Layer()))
MAX_ITEMS = 64  # a larger container in an attribute of a layer is a table of some kind, not a list of losses


def tensors_kept_by(layer: Any) -> Iterator[Any]:
    """Yield the tensors in the attributes that a user's layer has beside those of every layer: auxiliary losses."""
    if type(layer).__module__.startswith("paddle."):
        return
    for name, value in vars(layer).items():
        is_small = isinstance(value, (list, tuple, Mapping)) and len(value) <= MAX_ITEMS
        if (is_small or isinstance(value, paddle.Tensor)) and name not in _OF_EVERY_LAYER:
            yield from tensors_in(value)


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield every tensor in ``value``: tuples, lists, dicts, dataclasses and plain objects, nested in any way."""
    if isinstance(value, paddle.Tensor):  # as most layers return
        yield value
        return
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

"""What crosses the boundary between two stages: any nesting of tensors and plain values, and gradients going back.

A message is a *structure*, the value with a :class:`Slot` in the place of every tensor, and the tensors.  A tensor that
stands at two places of the value stands in the message once, and is one tensor again on the other side, so its gradient
is one sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Optional

import numpy as np
import paddle

from ..errors import UsageError

__all__ = ["Slot", "needs_grad", "pack", "pack_grads", "slots_with_grad", "unpack", "unpack_grads"]

Tensor = Any

_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, np.ndarray, Enum, range, slice)


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a structure."""

    index: int  # among the tensors of the message
    needs_grad: bool  # whether a gradient may come back for it


def needs_grad(tensor: Tensor) -> bool:
    """Whether a gradient can arise for ``tensor``: it takes part in autograd, and has a dtype that has gradients."""
    return not tensor.stop_gradient and (paddle.is_floating_point(tensor) or paddle.is_complex(tensor))


def pack(value: Any, where: str) -> tuple[Any, list[Tensor]]:
    """Take the tensors out of ``value``: its structure, and the tensors in the order in which they stand.

    ``value`` is any nesting of tensors, tuples (named ones too), lists, dicts, None and plain values.  Raises
    :class:`UsageError` for anything else; ``where`` says who made the value.
    """
    tensors: list[Tensor] = []
    return _packed(value, tensors, {}, where), tensors


def unpack(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """The value of a message, of which ``tensors`` become part, with ``stop_gradient`` as it was."""
    if isinstance(structure, Slot):
        tensor = tensors[structure.index]
        tensor.stop_gradient = not structure.needs_grad
        return tensor
    if isinstance(structure, dict):
        return _like(structure, {key: unpack(each, tensors) for key, each in structure.items()})
    if isinstance(structure, (list, tuple)):
        return _like(structure, [unpack(each, tensors) for each in structure])
    return structure


def slots_with_grad(structure: Any) -> list[int]:
    """Which tensors of a message a gradient may go back for, in order."""
    return sorted(_with_grad(structure))


def _with_grad(structure: Any) -> set[int]:
    if isinstance(structure, Slot):
        return {structure.index} if structure.needs_grad else set()
    if isinstance(structure, dict):
        structure = structure.values()
    elif not isinstance(structure, (list, tuple)):
        return set()
    return set().union(*map(_with_grad, structure))


def pack_grads(grads: Sequence[Optional[Tensor]]) -> tuple[tuple[bool, ...], list[Tensor]]:
    """A message of gradients, one for each tensor that needs one, in order: which there are, and these."""
    return tuple(grad is not None for grad in grads), [grad for grad in grads if grad is not None]


def unpack_grads(present: Sequence[bool], tensors: Sequence[Tensor]) -> list[Optional[Tensor]]:
    """The gradients of a message; None where none arose, which is not the same as zero to an optimizer."""
    left = iter(tensors)
    return [next(left) if there else None for there in present]


def _packed(item: Any, tensors: list[Tensor], slots: dict[int, Slot], where: str) -> Any:
    # Not a function inside pack(): one that calls itself is a cycle, which would keep tensors until it is collected.
    if isinstance(item, paddle.Tensor):
        if id(item) not in slots:
            slots[id(item)] = Slot(len(tensors), needs_grad(item))
            tensors.append(item)
        return slots[id(item)]
    if isinstance(item, dict):
        return _like(item, {key: _packed(each, tensors, slots, where) for key, each in item.items()})
    if isinstance(item, (list, tuple)):
        return _like(item, [_packed(each, tensors, slots, where) for each in item])
    if isinstance(item, _PLAIN):
        return item
    raise UsageError(
        f"{where} returned {_a(item)}, which cannot cross to the next stage; return tensors, None, numbers, texts, and "
        f"tuples, lists or dicts of these"
    )


def _like(container: Any, items: Any) -> Any:
    """``items`` in a container of the type of ``container``."""
    kind = type(container)
    if isinstance(container, tuple) and hasattr(kind, "_make"):  # a named tuple
        return kind._make(items)
    if kind in (list, tuple, dict):
        return items if kind is type(items) else kind(items)
    if isinstance(container, dict):
        return kind(items)  # OrderedDict and the like
    return tuple(items) if isinstance(container, tuple) else list(items)  # Paddle's own kinds of lists


def _a(item: object) -> str:
    kind = type(item)
    return f"an object of type {kind.__module__}.{kind.__qualname__}"

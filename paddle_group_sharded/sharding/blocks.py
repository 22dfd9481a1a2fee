"""Which layers a user would call a block: what is gathered at once where parameters are sharded."""

from __future__ import annotations

from typing import Any

from paddle import nn

__all__ = ["block_of_layers"]

Layer = Any


def block_of_layers(root: Layer) -> dict[int, int]:
    """Number the blocks of ``root``; returns the number of each layer's block by ``id(layer)``.

    A block is an item of the outermost ``LayerList`` or ``Sequential``, or a layer beside them without such a list
    inside; lists inside lists are opened, and so is an item that holds a ``LayerList`` of its own.  Parameters that a
    layer owns directly beside blocks are a block for themselves.
    """
    numbers: dict[int, int] = {}

    def assign(layer: Layer, number: int) -> None:
        for member in layer.sublayers(include_self=True):
            numbers.setdefault(id(member), number)

    def visit(layer: Layer, inside_list: bool) -> None:
        if id(layer) in numbers:
            return
        numbers[id(layer)] = len(set(numbers.values()))
        opens = nn.LayerList if inside_list else (nn.LayerList, nn.Sequential)
        for child in layer.children():
            if id(child) in numbers:
                continue
            is_list = isinstance(child, (nn.LayerList, nn.Sequential))
            if is_list or any(isinstance(member, opens) for member in child.sublayers()):
                visit(child, inside_list or is_list)
            else:
                assign(child, len(set(numbers.values())))

    visit(root, inside_list=False)
    return numbers

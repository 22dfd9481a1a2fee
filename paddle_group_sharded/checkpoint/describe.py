"""A checkpoint as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from ..tables import aligned, size_text
from .contents import Contents, LazyTensor
from .dtypes import itemsize
from .manifest import Manifest

__all__ = ["describe"]


def describe(contents: Contents, files: int, manifest: Optional[Manifest] = None) -> str:
    """Every tensor of the model with its states, then totals and what else is there."""
    states: dict[str, list[str]] = {}
    for key in contents.tensors:
        if key[0] == "optimizer":
            states.setdefault(key[1], []).append(key[2])
    aliases: dict[str, list[str]] = {}
    for alias, name in contents.aliases.items():
        aliases.setdefault(name, []).append(alias)
    rows = [("tensor", "shape", "dtype", "size", "pieces", "optimizer states")]
    for name, tensor in contents.model.items():
        shown = " = ".join([name, *aliases.get(name, [])])
        pieces = str(len(manifest.tensors["model", name].pieces)) if manifest is not None else "1"
        shape = str(list(tensor.shape))
        rows.append((shown, shape, tensor.dtype, size_text(tensor.size), pieces, " ".join(states.get(name, []))))
    return "\n".join([aligned(rows, right=(3, 4)), "", *_totals(contents, files), *_facts(contents)])


def _totals(contents: Contents, files: int) -> list[str]:
    model = list(contents.model.values())
    states = [tensor for key, tensor in contents.tensors.items() if key[0] == "optimizer"]
    numel = sum(tensor.numel for tensor in model)
    return [
        f"{contents.kind}: {len(model)} tensors of the model with {numel} elements, {_sum(model)}; {len(states)} "
        f"optimizer states, {_sum(states)}; in {files} file{'s' if files != 1 else ''}",
    ]


def _sum(tensors: Sequence[LazyTensor]) -> str:
    return size_text(sum(tensor.numel * itemsize(tensor.dtype) for tensor in tensors))


def _facts(contents: Contents) -> list[str]:
    lines = []
    if contents.kind == "checkpoint":
        facts: dict[str, Any] = {"ranks": contents.world_size, **contents.info}
        lines.append("saved by: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    for name, value in (contents.data or {}).items():
        if value is not None:
            text = str(value)
            lines.append(f"{name}: {text if len(text) <= 200 else text[:197] + '...'}")
    return lines

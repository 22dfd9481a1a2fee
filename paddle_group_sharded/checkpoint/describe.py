"""A checkpoint as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from .contents import Contents, LazyTensor
from .dtypes import itemsize
from .manifest import Manifest

__all__ = ["describe", "size_text", "table"]


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
    return "\n".join([table(rows, right=(3, 4)), "", *_totals(contents, files), *_facts(contents)])


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


def size_text(size: int) -> str:
    """Bytes for people.

    >>> size_text(1000), size_text(3 * 2**20)
    ('1000 B', '3.0 MiB')
    """
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):  # noqa: B007 - the last one is used
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns side by side; those in ``right`` end at the same place."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)

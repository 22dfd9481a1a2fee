"""Numbers as people read them, in aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Optional

__all__ = ["aligned", "bytes_text", "count_text", "size_text"]


def bytes_text(number: float) -> str:
    """Decimal units, four digits: ``"51.59 MB"``.

    >>> bytes_text(51_593_216), bytes_text(999), bytes_text(7e9)
    ('51.59 MB', '999 B', '7.000 GB')
    """
    return _scaled(number, ("B", "kB", "MB", "GB", "TB", "PB"))


def count_text(number: float) -> str:
    """Of elements: ``"12.90 M"``.

    >>> count_text(12_898_304), count_text(0), count_text(7e9)
    ('12.90 M', '0', '7.000 G')
    """
    return _scaled(number, ("", "k", "M", "G", "T", "P")).rstrip()


def _scaled(number: float, units: Sequence[str]) -> str:
    for power, unit in enumerate(units):
        if power == 0 and number < 999.5:
            return f"{number:.0f} {unit}"
        if power and (number < 999.95 or unit == units[-1]):
            digits = 3 if number < 9.9995 else 2 if number < 99.995 else 1
            return f"{number:.{digits}f} {unit}"
        number /= 1000
    raise ValueError("no units")


def size_text(size: Any) -> str:
    """Bytes in binary units, as files and tensors are counted.

    >>> size_text(1000), size_text(3 * 2**20)
    ('1000 B', '3.0 MiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = next(power for power, unit in enumerate(units) if size < 1024 ** (power + 1) or unit == units[-1])
    return f"{float(size) / 1024**power:.{1 if power else 0}f} {units[power]}"


def aligned(rows: Sequence[Sequence[str]], right: Optional[Collection[int]] = None) -> str:
    """Columns side by side; those in ``right``, by default all but the first, end at the same place.

    >>> print(aligned([["level", "peak"], ["os", "1.5 GB"], ["p_g_os", "996.0 MB"]]))
    level       peak
    os        1.5 GB
    p_g_os  996.0 MB
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    to_the_right = range(1, len(widths)) if right is None else right
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths))
        padded = (cell.rjust(width) if column in to_the_right else cell.ljust(width) for column, (cell, width) in cells)
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)

"""Numbers as people read them, in aligned columns."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["aligned", "bytes_text", "count_text"]


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


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right.

    >>> print(aligned(["level", "peak"], [["os", "1.5 GB"], ["p_g_os", "996.0 MB"]]))
    level       peak
    os        1.5 GB
    p_g_os  996.0 MB
    """
    lines = [headings, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    texts = []
    for line in lines:
        cells = [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]
        texts.append("  ".join(cells))
    return "\n".join(texts)

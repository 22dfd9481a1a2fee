"""Plans and timelines as text: a grid of time steps.  Pictures are in :mod:`.picture`, CSV is with the types."""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from math import gcd, lcm
from typing import Optional, Union

from .action import Plan
from .simulate import Costs, timeline
from .timeline import Number, Timeline

__all__ = ["grid", "side_by_side", "summary"]

_MOST_COLUMNS = 1000  # of an exact grid; beyond it, as for measured times, a column is as long as the shortest action


def grid(what: Union[Plan, Timeline], costs: Optional[Costs] = None) -> str:
    """Draw one line per rank, one column per unit of time.

    A plan is drawn as the simulator predicts it for ``costs`` (by default a forward takes one unit and a backward two).
    An action's name stands in its first column, ``---`` in its others, ``.`` where the rank waits.

    >>> print(grid(Plan.parse("rank 0: 0F0 0B0\\nrank 1: 1F0 1I0 1W0")))
    rank 0 | 0F0  .   .  0B0 ---
    rank 1 |  .  1F0 1I0 1W0  .
    """
    time = timeline(what, costs) if isinstance(what, Plan) else what
    step = _column_length(time)
    rows = [_cells(time, rank, step) for rank in range(time.num_ranks)]
    width = max(len(cell) for row in rows for cell in row)
    margin = len(str(time.num_ranks - 1))
    lines = []
    for rank, row in enumerate(rows):
        cells = [cell * width if cell == "-" else cell.center(width) for cell in row]
        lines.append(f"rank {rank:>{margin}} | {' '.join(cells)}".rstrip())
    return "\n".join(lines)


def summary(time: Timeline) -> str:
    """Duration, bubble and live activations of a timeline, in two lines."""
    live = " ".join(_short(time.peak_live(rank)) for rank in range(time.num_ranks))
    return (
        f"duration {_short(time.duration)}, bubble {100 * float(time.bubble_fraction):.2f} % of all ranks' time\n"
        f"live activations, at most, by rank, in micro-batches: {live}"
    )


def side_by_side(planned: Timeline, measured: Timeline) -> str:
    """Bubble and live activations of each rank, planned and measured."""
    lines = ["rank     bubble planned  measured     most live planned  measured"]
    for rank in range(planned.num_ranks):
        bubbles = [100 * float(time.bubble(rank)) for time in (planned, measured)]
        live = [_short(time.peak_live(rank)) for time in (planned, measured)]
        lines.append(f"{rank:>4} {bubbles[0]:>16.2f} % {bubbles[1]:>7.2f} % {live[0]:>21} {live[1]:>9}")
    both = [100 * float(time.bubble_fraction) for time in (planned, measured)]
    lines.append(f" all {both[0]:>16.2f} % {both[1]:>7.2f} %")
    return "\n".join(lines)


def _cells(time: Timeline, rank: int, step: Number) -> list[str]:
    """One rank's row: an action's name where it starts, ``-`` where it goes on, ``.`` where the rank waits."""
    spans = deque(time.compute(rank))
    cells, shown = [], None
    for column in range(max(1, round(time.duration / step))):
        middle = time.start + step * (2 * column + 1) / 2
        while spans and spans[0].stop <= middle:
            spans.popleft()
        if not spans or spans[0].start > middle:
            cells.append(".")
        else:
            cells.append("-" if spans[0] is shown else str(spans[0].action))
            shown = spans[0]
    return cells


def _column_length(time: Timeline) -> Number:
    """The longest time that divides all times, if the grid stays drawable with it."""
    exact = [Fraction(value - time.start) for span in time.compute() for value in (span.start, span.stop)]
    denominator = lcm(*(value.denominator for value in exact))
    step = Fraction(gcd(*(int(value * denominator) for value in exact)), denominator)
    if step and time.duration / step <= _MOST_COLUMNS:
        return step
    return min((span.stop - span.start for span in time.compute() if span.stop > span.start), default=1)


def _short(value: Number) -> str:
    return f"{float(value):.4g}"

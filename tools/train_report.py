"""What train_gpt.py shows: a progress bar, lines above it, and the table at the end."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm
from zero_formula import formula, state_bytes

__all__ = ["Measured", "progress_bar", "say", "table"]

RECENT = 50  # steps over which the final training loss is averaged


@dataclass
class Measured:
    """What this rank has measured; a step's loss is the mean over the ranks."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    states_bytes: int = 0  # live after a backward: weights, gradients and optimizer states, no activations


class _Lines:
    """Where tqdm writes under a launcher, whose log shows every redraw: whole lines, and few of them."""

    def write(self, text: str) -> None:
        """Write the bar, without what redraws it."""
        if text.strip():
            sys.stderr.write(text.strip() + "\n")

    def flush(self) -> None:
        """Let the launcher see it."""
        sys.stderr.flush()


def progress_bar(start: int, stop: int, disable: bool) -> tqdm:
    """A bar of steps, redrawn in place on a terminal and every few seconds elsewhere."""
    terminal = sys.stderr.isatty()
    return tqdm(
        total=stop,
        initial=start,
        disable=disable,
        mininterval=0.2 if terminal else 5.0,
        file=sys.stderr if terminal else _Lines(),
        bar_format="{percentage:3.0f}% |{bar:20}| {n}/{total} {elapsed}<{remaining}{postfix}",
    )


def say(bar: tqdm, line: str) -> None:
    """A line above the bar, if this rank shows one."""
    if bar.disable:
        return
    if sys.stderr.isatty():
        bar.write(line)
    else:
        print(line, flush=True)


def table(
    *,
    level: str,
    parameters: int,
    tokens: int,
    measured: Measured,
    validation: float,
    states: Sequence[float],
    peaks: Sequence[float],
    sixteen_bit: bool,
    stages: int = 1,
) -> str:
    """The result; ``tokens`` are those of a step, ``states`` and ``peaks`` the bytes of each rank."""
    ranks = len(states)
    seconds = statistics.median(measured.seconds)
    rows = [
        ("loss, last steps", f"{statistics.fmean(measured.losses[-RECENT:]):.4f}"),
        ("validation loss", f"{validation:.4f}"),
        ("step time, median", f"{seconds * 1e3:.1f} ms, {tokens / seconds:,.0f} tokens/s"),
        ("model states, MB per rank", _megabytes(states)),
        *[
            (
                f"ZeRO formula, {formula(level, sixteen_bit)} bytes a parameter",
                _megabytes([state_bytes(level, parameters, ranks, sixteen_bit)]),
            )
        ]
        * (stages == 1),
        ("peak, MB per rank (with activations)", _megabytes(peaks)),
    ]
    width = max(len(name) for name, _ in rows)
    kind = f"level {level}" if stages == 1 else f"{stages} stages"
    title = f"{kind}, {ranks} rank{'s' * (ranks > 1)}, {parameters:,} parameters"
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _megabytes(values: Sequence[float]) -> str:
    return ", ".join(f"{value / 1e6:.2f}" for value in values)

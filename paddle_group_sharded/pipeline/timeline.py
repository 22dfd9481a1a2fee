"""When each action of a plan ran.  The simulator predicts a :class:`Timeline`, the runner measures one."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from numbers import Rational
from typing import NamedTuple, Optional, Union

from ..errors import UsageError
from .action import Action, Kind

__all__ = ["Number", "Span", "Timeline"]

Number = Union[int, float, Fraction]  # time: exact while it is int or Fraction


class Span(NamedTuple):
    """One action of one rank, from ``start`` to ``stop`` (seconds when measured, units of cost when predicted)."""

    rank: int
    action: Action
    start: Number
    stop: Number


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks.  Times of a prediction made of exact numbers are exact, and so is what follows."""

    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        """Prove that time goes forward."""
        if not self.spans:
            raise UsageError("a timeline needs at least one span")
        for span in self.spans:
            if span.stop < span.start:
                raise UsageError(f"{span.action} of rank {span.rank} starts at {span.start}, but stops at {span.stop}")

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return max(span.rank for span in self.spans) + 1

    @property
    def start(self) -> Number:
        """Start of the first compute of any rank."""
        return min(span.start for span in self.compute())

    @property
    def stop(self) -> Number:
        """End of the last compute of any rank."""
        return max(span.stop for span in self.compute())

    @property
    def duration(self) -> Number:
        """Time from the first to the last compute, over all ranks."""
        return self.stop - self.start

    def compute(self, rank: Optional[int] = None) -> Sequence[Span]:
        """Spans that compute, in the order of their starts, of one rank or of all, rank after rank."""
        return list(chain.from_iterable(self._by_rank)) if rank is None else self._by_rank[rank]

    @cached_property
    def _by_rank(self) -> list[list[Span]]:
        rows: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            if span.action.kind.is_compute:
                rows[span.rank].append(span)
        for row in rows:
            row.sort(key=lambda span: span.start)
        return rows

    @property
    def busy(self) -> Number:
        """Computing time of all ranks together."""
        return sum(span.stop - span.start for span in self.compute())

    def scaled(self, factor: Number) -> Timeline:
        """The same timeline with all times multiplied, such as a prediction in the seconds of a measurement."""
        return Timeline(tuple(s._replace(start=s.start * factor, stop=s.stop * factor) for s in self.spans))

    def to_csv(self) -> str:
        """Header ``rank,action,start,stop`` and one row per span; exact times stay exact (``1/3``)."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(Span._fields)
        writer.writerows(self.spans)
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> Timeline:
        """Read the form of :meth:`to_csv`."""
        header, *rows = csv.reader(io.StringIO(text))
        if tuple(header) != Span._fields:
            raise UsageError(f"a timeline's CSV starts with {','.join(Span._fields)}; got {','.join(header)}")
        return cls(tuple(Span(int(r), Action.parse(a), _number(t0), _number(t1)) for r, a, t0, t1 in rows))

    def bubble(self, rank: int) -> Number:
        """Share of the duration in which ``rank`` computes nothing, between 0 and 1."""
        return _share_left(sum(s.stop - s.start for s in self.compute(rank)), self.duration)

    @property
    def bubble_fraction(self) -> Number:
        """Share of all ranks' time in which they compute nothing, between 0 and 1: the mean of :meth:`bubble`."""
        return _share_left(self.busy, self.duration * self.num_ranks)

    def live(self, rank: int) -> tuple[tuple[Number, Fraction], ...]:
        """Steps ``(time, micro-batches alive from then on)`` of one rank.

        A forward keeps the activations of one chunk of one micro-batch, that is ``1 / chunks`` of a micro-batch,
        from its start until its backward has ended: the end of ``B``, or of ``W`` where the backward is split.
        """
        spans = self.compute(rank)
        weight = Fraction(1, max(1, len({span.action.stage for span in spans})))
        # the last span of each (stage, micro-batch) frees what its forward kept; a dict keeps the later entry
        last = {(s.action.stage, s.action.micro_batch): s for s in spans}
        steps, alive = [], Fraction(0)
        for span in spans:
            if span.action.kind is Kind.F:
                alive += weight
                steps.append((span.start, alive))
            if span is last[span.action.stage, span.action.micro_batch]:
                alive -= weight
                steps.append((span.stop, alive))
        return tuple(steps)

    def peak_live(self, rank: int) -> Fraction:
        """Largest number of micro-batches whose activations ``rank`` keeps at a time, each weighted by 1/chunks."""
        return max((alive for _, alive in self.live(rank)), default=Fraction(0))


def _number(text: str) -> Number:
    try:
        value = Fraction(text)
    except ValueError:
        return float(text)  # nan and inf
    if value.denominator == 1 and "." not in text and "e" not in text:
        return int(value)
    return value if "/" in text else float(text)


def _share_left(busy: Number, total: Number) -> Number:
    if not total:
        return Fraction(0)
    if isinstance(busy, Rational) and isinstance(total, Rational):
        return 1 - Fraction(busy) / Fraction(total)
    return 1 - busy / total

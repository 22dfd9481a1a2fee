"""The segment printer: a :class:`~.segment.Segmentation` as text, in the classic form and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional

from ..errors import UsageError
from ..tables import aligned, size_text
from .partition import Number
from .segment import Segmentation, by_weight

__all__ = ["LayerFacts", "classic", "table"]


def classic(
    segmentation: Segmentation, entries: Sequence[object], *, global_rank: int = 0, losses: Sequence[str] = ()
) -> str:
    """The form that Paddle's users and their scripts read, to the letter.

    ``entries`` is what stands in the list of layers; each is printed as its ``str()``.  ``global_rank`` is the rank
    that prints.  ``losses`` are the names of the loss functions.
    """
    _check_length(segmentation, entries, "entry")
    interleaved = segmentation.num_chunks > 1
    lines = ["start segment network for interleave scheduler" if interleaved else "start segment network.."]
    lines.append(f"segment with method: {segmentation.method}; result: {', '.join(map(str, segmentation.bounds))}")
    for stage, part in enumerate(segmentation.parts):
        lines.append(f"stage={stage}, global_rank={global_rank} ,layer_number={len(part)}")
        lines += [f"{index}: {entries[index]}" for index in part]
    if interleaved:
        for rank in range(segmentation.num_stages):
            held = " ".join(f"{stage}," for stage in segmentation.virtual_stages_of(rank))
            lines.append(f"stage {rank} contains virtual stages:  {held}")
    if losses:
        lines.append(f"loss: {', '.join(losses)}")
    return "\n".join(lines)


@dataclass(frozen=True)
class LayerFacts:
    """What is known of one layer of the list; None where it has not been counted or measured."""

    name: str
    parameters: Optional[int] = None  # elements
    frozen: int = 0  # of these, elements that are not trained
    size_bytes: Optional[int] = None  # of parameters and buffers
    time: Optional[float] = None  # seconds of forward and backward of one micro-batch
    memory_bytes: Optional[int] = None  # kept from forward to backward of one micro-batch
    shared: Optional[str] = None  # key that ties it to other layers
    weight: Optional[Number] = None  # in any other unit


def table(segmentation: Segmentation, layers: Sequence[LayerFacts]) -> str:
    """One row per stage and chunk with what is known of it, then the balance, then better bounds where there are any.

    ``balance`` is the heaviest stage over the mean of the stages, all chunks of a stage together.  Better bounds are
    those of :func:`.segment.by_weight`; they are a list that can be given as ``seg_method``.
    """
    _check_length(segmentation, layers, "LayerFacts")
    known = [measure for measure in _MEASURES if all(measure.of(layer) is not None for layer in layers)]
    frozen, shared = any(layer.frozen for layer in layers), any(layer.shared for layer in layers)
    rows = [["", "layers", *(m.title for m in known), *["frozen"] * frozen, *["shared"] * shared]]
    for label, parts in _groups(segmentation):
        held = [layers[index] for part in parts for index in part]
        row = [label, ", ".join(f"{part[0]}-{part[-1]}" for part in parts) + f" ({len(held)})"]
        row += [m.show(sum(m.values(held)), sum(m.values(layers))) for m in known]
        row += [f"{sum(layer.frozen for layer in held):,}"] * frozen
        row += [", ".join(dict.fromkeys(layer.shared for layer in held if layer.shared)) or "-"] * shared
        rows.append(row)
    balances = [("layers", segmentation.balance([1] * segmentation.num_layers))]
    balances += [(m.title, segmentation.balance(m.values(layers))) for m in known]
    lines = [f"segment with method: {segmentation.method}; bounds: {list(segmentation.bounds)}", aligned(rows)]
    lines.append("balance (max/mean): " + ", ".join(f"{title} {value:.2f}" for title, value in balances))
    lines += filter(None, (_better_bounds(segmentation, m, m.values(layers)) for m in known if m.advise))
    return "\n".join(lines)


class _Measure(NamedTuple):
    title: str
    of: Callable[[LayerFacts], Optional[Number]]
    unit: Callable[[Number], str]
    share: bool = False  # show the share of the whole beside the number
    advise: bool = True  # offer bounds that balance it

    def values(self, layers: Sequence[LayerFacts]) -> list[Number]:
        return [self.of(layer) or 0 for layer in layers]

    def show(self, value: Number, whole: Number) -> str:
        if not self.share:
            return self.unit(value)
        return f"{self.unit(value)} ({100 * float(value) / float(whole) if whole else 0:.1f} %)"


_MEASURES = (
    _Measure("parameters", lambda layer: layer.parameters, lambda value: f"{value:,}"),
    _Measure("bytes", lambda layer: layer.size_bytes, size_text, advise=False),
    _Measure("time", lambda layer: layer.time, lambda value: f"{1000 * float(value):.2f} ms", share=True),
    _Measure("memory", lambda layer: layer.memory_bytes, size_text),
    _Measure("weight", lambda layer: layer.weight, lambda value: f"{float(value):g}", share=True),
)


def _groups(segmentation: Segmentation) -> Iterator[tuple[str, Sequence[range]]]:
    """Rows of the table: the virtual stages in model order, then, if stages have several, each stage as a whole."""
    ranks = range(segmentation.num_stages)
    if segmentation.num_chunks == 1:
        yield from ((f"stage {rank}", segmentation.layers_of(rank)) for rank in ranks)
        return
    for virtual, part in enumerate(segmentation.parts):
        chunk, rank = divmod(virtual, segmentation.num_stages)
        yield f"stage {rank} chunk {chunk}", [part]
    yield from ((f"stage {rank} in all", segmentation.layers_of(rank)) for rank in ranks)


def _better_bounds(segmentation: Segmentation, measure: _Measure, weights: Sequence[Number]) -> str:
    best = by_weight(weights, segmentation.num_stages, segmentation.num_chunks)
    now, then = (max(sum(weights[i] for i in part) for part in s.parts) for s in (segmentation, best))
    if then >= now:
        return ""
    part = "stage" if segmentation.num_chunks == 1 else "chunk"
    return (
        f"better bounds by {measure.title}: {list(best.bounds)} "
        f"(largest {part} {measure.unit(then)} instead of {measure.unit(now)})"
    )


def _check_length(segmentation: Segmentation, entries: Sequence[object], what: str) -> None:
    if len(entries) != segmentation.num_layers:
        raise UsageError(f"expected one {what} for each of {segmentation.num_layers} layers, got {len(entries)}")

"""Pictures of plans and timelines: one layout, written as SVG or drawn as PNG by matplotlib (extra ``plot``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Optional, Union
from xml.sax.saxutils import escape

from ..errors import UsageError
from .action import Kind, Plan
from .simulate import Costs, timeline
from .timeline import Number, Timeline

__all__ = ["save_picture", "svg"]

_COLOURS: Mapping[Kind, str] = MappingProxyType(
    {Kind.F: "#3f76bf", Kind.B: "#3d9a6b", Kind.I: "#7a5fb0", Kind.W: "#d98a29"}
)
_MEANING: Mapping[Kind, str] = MappingProxyType(
    {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
)
_IDLE, _INK, _FAINT = "#eceef1", "#22262b", "#6b727b"

# pixels
_LEFT, _RIGHT, _TOP = 70, 150, 54  # margins: names of ranks, numbers of ranks, title
_ROW, _GAP, _FOOT = 26, 8, 60  # height of a row, between ranks, of axis and legend together
_NAME = 34  # more margin on the left where rows have names
_CELL, _WIDEST, _NARROWEST = 24, 1100, 260  # width of the shortest action, and of the time axis at most and at least
_FONT, _LETTER = 11, 6.2  # size of a letter and the width that it is taken to have
_TITLE, _TITLE_LETTER = 14, 8.4


class Box(NamedTuple):
    """A filled rectangle with a label inside and a hint shown on hovering."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    label: str = ""
    hint: str = ""


class Text(NamedTuple):
    """A line of text; ``anchor`` is the side of it that stands at ``x``: ``start``, ``middle`` or ``end``."""

    x: float
    y: float  # of the middle of the letters
    text: str
    anchor: str = "start"
    size: int = _FONT
    colour: str = _INK
    bold: bool = False


@dataclass
class Layout:
    """Everything that is drawn, in pixels from the top left corner."""

    width: float
    height: float
    left: float  # where time 0 is
    scale: float  # width of one unit of time
    boxes: list[Box] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)


def svg(
    what: Union[Plan, Timeline], *, title: str = "", costs: Optional[Costs] = None, measured: Optional[Timeline] = None
) -> str:
    """Draw a plan or a timeline as SVG; ranks are rows, labels are micro-batches, later chunks are lighter.

    A plan is drawn as the simulator predicts it for ``costs``.  With ``measured``, each rank has two rows: the plan,
    scaled to take as much computing time as was measured, and under it what was measured.
    """
    return _to_svg(_layout(what, title, costs, measured))


def save_picture(
    path: Union[str, Path],
    what: Union[Plan, Timeline],
    *,
    title: str = "",
    costs: Optional[Costs] = None,
    measured: Optional[Timeline] = None,
) -> None:
    """Write the picture of :func:`svg` to ``path``: SVG or, with matplotlib, PNG, as the name ends."""
    path = Path(path)
    layout = _layout(what, title, costs, measured)
    if path.suffix.lower() == ".svg":
        path.write_text(_to_svg(layout), encoding="utf-8")
    elif path.suffix.lower() == ".png":
        _to_png(layout, path)
    else:
        raise UsageError(f"pictures are written to names that end in .svg or .png; got {path.name!r}")


def _layout(what: Union[Plan, Timeline], title: str, costs: Optional[Costs], measured: Optional[Timeline]) -> Layout:
    planned = timeline(what, costs) if isinstance(what, Plan) else what
    if measured is not None and measured.num_ranks != planned.num_ranks:
        raise UsageError(f"the plan has {planned.num_ranks} ranks, but the measured timeline has {measured.num_ranks}")
    rows = [("", planned)]
    if measured is not None:
        rows = [("plan", planned.scaled(measured.busy / planned.busy)), ("run", measured)]
    longest = float(max(time.duration for _, time in rows))
    shortest = min(float(s.stop - s.start) for s in rows[0][1].compute() if s.stop > s.start)
    left = _LEFT + _NAME * (measured is not None)
    narrowest = max(_NARROWEST, (len(title) + 32) * _TITLE_LETTER - left - _RIGHT)  # the title has room for the bubble
    axis = max(min(longest * _CELL / shortest, _WIDEST), narrowest)
    lane = len(rows) * _ROW + _GAP
    bottom = _TOP + planned.num_ranks * lane
    layout = Layout(left + axis + _RIGHT, bottom + _FOOT, left, axis / longest)
    _add_head(layout, title, rows)
    for rank in range(planned.num_ranks):
        layout.texts.append(Text(12, _TOP + rank * lane + (lane - _GAP) / 2, f"rank {rank}", bold=True))
        for index, (name, time) in enumerate(rows):
            _add_row(layout, _TOP + rank * lane + index * _ROW, rank, name, time)
    _add_axis(layout, bottom, longest, " s" if measured is not None else "")
    _add_legend(layout, bottom + 44, planned)
    return layout


def _add_head(layout: Layout, title: str, rows: Sequence[tuple[str, Timeline]]) -> None:
    layout.texts.append(Text(12, 18, title, size=_TITLE, bold=True))
    bubbles = [f"{name} {100 * float(time.bubble_fraction):.2f} %".strip() for name, time in rows]
    layout.texts.append(Text(layout.width - 12, 18, f"bubble {', '.join(bubbles)}", "end", size=13))
    x = layout.width - _RIGHT
    layout.texts.append(Text(x + 58, _TOP - 10, "idle", "end", colour=_FAINT))
    layout.texts.append(Text(layout.width - 12, _TOP - 10, "most live", "end", colour=_FAINT))


def _add_row(layout: Layout, y: float, rank: int, name: str, time: Timeline) -> None:
    height = _ROW - 2
    middle = y + height / 2
    layout.boxes.append(Box(layout.left, y, float(time.duration) * layout.scale, height, _IDLE))
    spans = time.compute(rank)
    chunk_of = {stage: chunk for chunk, stage in enumerate(sorted({span.action.stage for span in spans}))}
    label_width = _LETTER * len(str(max(span.action.micro_batch or 0 for span in time.compute()))) + 3
    for span in spans:
        x = layout.left + float(span.start - time.start) * layout.scale
        width = float(span.stop - span.start) * layout.scale - 1
        fill = _shade(_COLOURS[span.action.kind], chunk_of[span.action.stage], len(chunk_of))
        label = str(span.action.micro_batch) if width >= label_width else ""
        hint = f"{span.action}: {_brief(span.start - time.start)} to {_brief(span.stop - time.start)}"
        layout.boxes.append(Box(x, y, max(width, 0.5), height, fill, label, hint))
    if name:
        layout.texts.append(Text(layout.left - 8, middle, name, "end", colour=_FAINT))
    x = layout.width - _RIGHT
    layout.texts.append(Text(x + 58, middle, f"{100 * float(time.bubble(rank)):.1f} %", "end"))
    layout.texts.append(Text(layout.width - 12, middle, _brief(time.peak_live(rank)), "end"))


def _add_axis(layout: Layout, y: float, longest: float, unit: str) -> None:
    step = 10.0 ** floor(log10(longest))
    step = next(s for s in (step / 5, step / 2, step) if longest / s <= 12)
    for tick in range(int(longest / step) + 1):
        x = layout.left + tick * step * layout.scale
        layout.boxes.append(Box(x, y - _GAP + 2, 1, 5, _FAINT))
        layout.texts.append(Text(x, y + 8, _brief(tick * step) + unit, "middle", size=10, colour=_FAINT))


def _add_legend(layout: Layout, y: float, time: Timeline) -> None:
    used = {span.action.kind for span in time.compute()}
    num_chunks = len({span.action.stage for span in time.compute(0)})
    x = layout.left
    for kind in (kind for kind in Kind if kind in used):
        for chunk in range(num_chunks):
            layout.boxes.append(Box(x, y - 7, 14, 14, _shade(_COLOURS[kind], chunk, num_chunks)))
            x += 15
        layout.texts.append(Text(x + 5, y, _MEANING[kind]))
        x += 5 + len(_MEANING[kind]) * _LETTER + 18
    layout.boxes.append(Box(x, y - 7, 14, 14, _IDLE))
    layout.texts.append(Text(x + 20, y, "waits"))
    if num_chunks > 1:
        layout.texts.append(Text(x + 20 + 5 * _LETTER + 18, y, "later chunks are lighter", colour=_FAINT))


def _shade(colour: str, chunk: int, num_chunks: int) -> str:
    """The colour, mixed with up to 60 % of white for the last chunk."""
    white = 0.6 * chunk / max(1, num_chunks - 1)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def _ink_on(fill: str) -> str:
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return _INK if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "#ffffff"


def _brief(value: Number) -> str:
    return f"{float(value):.4g}"


def _to_svg(layout: Layout) -> str:
    width, height = ceil(layout.width), ceil(layout.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="{_FONT}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    texts = list(layout.texts)
    for box in layout.boxes:
        shape = f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" fill="{box.fill}"'
        lines.append(f"{shape}><title>{escape(box.hint)}</title></rect>" if box.hint else f"{shape}/>")
        texts += _labels(box)
    for text in texts:
        weight = ' font-weight="bold"' if text.bold else ""
        lines.append(
            f'<text x="{text.x:g}" y="{text.y:g}" dy="0.35em" text-anchor="{text.anchor}" font-size="{text.size}" '
            f'fill="{text.colour}"{weight}>{escape(text.text)}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _to_png(layout: Layout, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise UsageError("PNG pictures need matplotlib: pip install matplotlib, or write SVG") from error
    figure = Figure(figsize=(layout.width / 100, layout.height / 100), dpi=200)
    FigureCanvasAgg(figure)  # no window, no global state of pyplot
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, layout.width)
    axes.set_ylim(layout.height, 0)
    texts = list(layout.texts)
    for box in layout.boxes:
        axes.add_patch(Rectangle((box.x, box.y), box.width, box.height, facecolor=box.fill, linewidth=0))
        texts += _labels(box)
    side = {"start": "left", "middle": "center", "end": "right"}
    for text in texts:
        axes.text(
            text.x,
            text.y,
            text.text,
            fontsize=0.72 * text.size,  # pixels at 100 per inch, in points
            color=text.colour,
            ha=side[text.anchor],
            va="center_baseline",
            weight="bold" if text.bold else "normal",
        )
    figure.savefig(path)


def _labels(box: Box) -> list[Text]:
    if not box.label:
        return []
    return [Text(box.x + box.width / 2, box.y + box.height / 2, box.label, "middle", colour=_ink_on(box.fill))]

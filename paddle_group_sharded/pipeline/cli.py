"""The commands ``segment`` and ``schedule`` of ``python -m paddle_group_sharded``."""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path
from typing import Any, Optional

from ..errors import UsageError
from .action import Plan
from .lowering import add_grad_reduce, add_transfers
from .partition import Number
from .picture import save_picture
from .render import grid, side_by_side, summary
from .report import LayerFacts, table
from .schedules import SCHEDULES, make_plan
from .segment import by_bounds, by_weight, segment
from .simulate import Cost, Costs, timeline
from .timeline import Timeline

__all__ = ["register"]

_COSTS = ("forward", "input_grad", "weight_grad")


def register(commands: Any) -> None:
    """Add the commands to argparse's sub-parsers; each sets ``run``, a function of the parsed arguments."""
    _register_schedule(commands)
    _register_segment(commands)


def _register_schedule(commands: Any) -> None:
    parser = commands.add_parser(
        "schedule",
        help="print or draw a pipeline schedule, with its bubble and live activations",
        description="Prove that a schedule can run, and show when each rank does what. Without a name, compare all.",
    )
    parser.add_argument("name", nargs="?", help=f"one of {', '.join(SCHEDULES)}, or the path of a plan (.txt, .csv)")
    parser.add_argument("--stages", type=int, required=True, help="ranks of the pipeline")
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--chunks", type=int, default=1, help="virtual stages per rank (default: 1)")
    for cost in _COSTS:
        parser.add_argument(
            f"--{cost.replace('_', '-')}",
            type=_cost,
            default=1,
            metavar="COST",
            help="time of one micro-batch on one rank, or comma-separated times on each virtual stage (default: 1)",
        )
    parser.add_argument("--transfer", type=_number, default=0, metavar="COST", help="time of one transfer (default: 0)")
    parser.add_argument("--format", choices=("grid", "text", "csv", "timeline"), default="grid", help="what is printed")
    parser.add_argument("--lower", action="store_true", help="with the sends, receives and reductions")
    parser.add_argument("--measured", type=Path, help="CSV of a measured timeline, drawn under the plan")
    parser.add_argument("--output", type=Path, help="also write a picture (.svg, .png) or the plan (.txt, .csv)")
    parser.set_defaults(run=_schedule)


def _register_segment(commands: Any) -> None:
    parser = commands.add_parser(
        "segment",
        help="cut layers into stages and print the balance",
        description="Cut layers into stages, so that the heaviest stage is as light as can be, and print the balance.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--weights", type=_number, nargs="+", help="weight of each layer, in any unit")
    what.add_argument("--classes", nargs="+", help="class name of each layer")
    what.add_argument("--layers", type=int, help="number of layers")
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--chunks", type=int, default=1, help="virtual stages per rank (default: 1)")
    parser.add_argument("--method", help="uniform or layer:<regex>; default: by weight where weights are given")
    parser.add_argument("--bounds", type=int, nargs="+", help="first layer of each stage, instead of a method")
    parser.set_defaults(run=_segment)


def _schedule(args: argparse.Namespace) -> str:
    if args.name is None:
        return _compare(args)
    plan = make_plan(args.name, args.stages, args.micro_batches, args.chunks)
    predicted = timeline(plan, _costs(args, args.chunks))
    if args.lower:
        plan = add_grad_reduce(plan if plan.has_transfers else add_transfers(plan))
    measured = Timeline.from_csv(args.measured.read_text(encoding="utf-8")) if args.measured else None
    if args.output is not None:
        _write(args, plan, predicted, measured)
    if args.format == "text":
        return str(plan)
    if args.format == "csv":
        return plan.to_csv().rstrip("\n")
    if args.format == "timeline":
        return predicted.to_csv().rstrip("\n")
    return "\n".join([grid(predicted), summary(predicted) if measured is None else side_by_side(predicted, measured)])


def _write(args: argparse.Namespace, plan: Plan, predicted: Timeline, measured: Optional[Timeline]) -> None:
    kind = args.output.suffix.lower()
    if kind in (".txt", ".csv"):
        args.output.write_text(plan.to_csv() if kind == ".csv" else f"{plan}\n", encoding="utf-8")
        return
    chunks = f" x {args.chunks} chunks" if args.chunks > 1 else ""
    title = f"{args.name}, {args.stages} stages{chunks}, {args.micro_batches} micro-batches"
    save_picture(args.output, predicted, title=title, measured=measured)


def _compare(args: argparse.Namespace) -> str:
    if args.output is not None or args.measured is not None:
        raise UsageError("--output and --measured need the name of one schedule")
    lines = ["schedule     chunks  duration   bubble  live activations at most, by rank, in micro-batches"]
    for name in (name for name in SCHEDULES if name != "forward_only"):
        chunks = max(2, args.chunks) if name == "interleaved" else 1
        time = timeline(make_plan(name, args.stages, args.micro_batches, chunks), _costs(args, chunks))
        live = " ".join(f"{float(time.peak_live(rank)):g}" for rank in range(time.num_ranks))
        bubble = 100 * float(time.bubble_fraction)
        lines.append(f"{name:<12} {chunks:>6}  {float(time.duration):>8.4g}  {bubble:>5.2f} %  {live}")
    return "\n".join(lines)


def _segment(args: argparse.Namespace) -> str:
    names = args.classes or ["layer"] * (args.layers or len(args.weights or ()))
    if args.bounds is not None:
        result = by_bounds(args.bounds, len(names), args.stages, args.chunks)
    elif args.method is None and args.weights:
        result = by_weight(args.weights, args.stages, args.chunks)
    else:
        result = segment(names, args.stages, args.method or "uniform", args.chunks)
    weights = args.weights or [None] * len(names)
    return table(result, [LayerFacts(name, weight=weight) for name, weight in zip(names, weights)])


def _costs(args: argparse.Namespace, num_chunks: int) -> Costs:
    return Costs.per_rank(num_chunks, args.forward, args.input_grad, args.weight_grad, args.transfer)


def _cost(text: str) -> Cost:
    numbers = tuple(_number(part) for part in text.split(","))
    return numbers[0] if len(numbers) == 1 else numbers


def _number(text: str) -> Number:
    """A whole number, a fraction such as 1/3, or a decimal, all exact."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
    return value.numerator if value.denominator == 1 else value

"""How the cost of a step grows: time with layers and with parameters, memory with steps, collectives with parameters.

    python tools/bench_scaling.py                     a few minutes; prints the fitted lines
    python tools/bench_scaling.py --plot scaling.svg  draws them as well (needs matplotlib)

Each level runs on 2 ranks.  A straight line through the points, time = a + b * size, is fitted by least squares; R²
says how straight they are.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from launching import launch

LEVELS = ("os", "os_g", "p_g_os")
LAYERS = (100, 200, 400, 800)  # of width 32
WIDTHS = (256, 512, 768, 1024)  # of 4 layers
STEPS = (100, 250, 500, 1000)  # of 6 layers of width 64
RANKS = 2


# ------------------------------------------------------------------------------------------------------ on every rank


def job(level: str, layers: int, width: int) -> tuple[Any, Any, Any]:
    """A stack of linear layers at ``level``: the model, its optimizer, and a function that takes one step."""
    import paddle
    from paddle import nn

    from paddle_group_sharded import group_sharded_parallel

    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    plain = paddle.optimizer.AdamW(1e-4, parameters=net.parameters())
    model, optimizer, _ = group_sharded_parallel(net, plain, level)
    x = paddle.ones([2, width])

    def step() -> float:
        started = time.perf_counter()
        model(x).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        return time.perf_counter() - started

    return model, optimizer, step


def step_seconds(level: str, layers: int, width: int, repeats: int) -> float:
    """Median of ``repeats`` steps."""
    _, _, step = job(level, layers, width)
    taken = [step() for _ in range(repeats + 3)]
    return statistics.median(taken[3:])


def collectives(level: str, layers: int, width: int) -> int:
    """Operations of one step."""
    model, _, step = job(level, layers, width)
    step()
    step()
    seen: list[Any] = []
    model._engine.comm.on_run = lambda request, serving: seen.append(request)
    step()
    return len(seen)


def sweep(repeats: int) -> dict[str, Any]:
    """Every measurement, by level and kind."""
    from paddle_group_sharded.paddle_compat import allocated_bytes

    found: dict[str, Any] = {}
    for level in LEVELS:
        gc.collect()  # the models before this one
        base = allocated_bytes()
        _, _, step = job(level, 6, 64)
        live: list[int] = []
        for number in range(1, STEPS[-1] + 1):
            step()
            if number in STEPS:
                live.append(allocated_bytes() - base)
        found[level] = {
            "layers": [step_seconds(level, count, 32, repeats) for count in LAYERS],
            "parameters": [step_seconds(level, 4, width, repeats) for width in WIDTHS],
            "collectives": [collectives(level, 4, width) for width in WIDTHS],
            "live": live,
        }
    return found


def run_rank(output: str, repeats: int) -> None:
    """The body of one rank; rank 0 writes what it found."""
    import paddle.distributed as dist
    from paddle.distributed import fleet

    fleet.init(is_collective=True, log_level="WARNING")
    found = sweep(repeats)
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


# --------------------------------------------------------------------------------------------------------- the parent


def parameters(width: int) -> int:
    """Of the four layers of the sweep over widths."""
    return 4 * width * (width + 1)


def fitted(sizes: list[int], seconds: list[float]) -> tuple[float, float, float]:
    """Intercept and slope of the line, and R²."""
    slope, intercept = np.polyfit(sizes, seconds, 1)
    residues = np.asarray(seconds) - (intercept + slope * np.asarray(sizes))
    return float(intercept), float(slope), float(1 - residues.var() / np.var(seconds))


def table(found: dict[str, Any]) -> str:
    """The lines as the documentation shows them."""
    lines = [
        "| level | per layer | R² | per million parameters | R² | collectives, by width | live bytes after "
        + ", ".join(str(count) for count in STEPS)
        + " steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for level, by_kind in found.items():
        _, per_layer, straight = fitted(list(LAYERS), by_kind["layers"])
        _, per_parameter, also = fitted([parameters(width) for width in WIDTHS], by_kind["parameters"])
        lines.append(
            f"| `{level}` | {1e6 * per_layer:.0f} µs | {straight:.4f} | {1e9 * per_parameter:.2f} ms | {also:.4f} "
            f"| {', '.join(map(str, by_kind['collectives']))} | {', '.join(map(str, by_kind['live']))} |"
        )
    return "\n".join(lines)


def draw(found: dict[str, Any], path: str) -> None:
    """Points and lines, beside each other for layers and parameters."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    kinds = (("layers", "layers of width 32", list(LAYERS)), ("parameters", "parameters", [*map(parameters, WIDTHS)]))
    for place, (kind, label, sizes) in enumerate(kinds, start=1):
        axes = figure.add_subplot(1, 2, place)
        for level, by_kind in found.items():
            intercept, slope, _ = fitted(sizes, by_kind[kind])
            points = axes.plot(sizes, [1e3 * value for value in by_kind[kind]], "o", label=level)
            ends = np.array([0, sizes[-1]])
            axes.plot(ends, 1e3 * (intercept + slope * ends), "-", color=points[0].get_color(), linewidth=1)
        axes.set_xlabel(label)
        axes.set_ylabel("ms per step")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    """Parse, then be the parent or a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=11, help="timed steps of each point")
    parser.add_argument("--plot", metavar="FILE", help="an SVG or PNG file")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output:
        return run_rank(options.output, options.repeats)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "found.json")
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        arguments = ["--output", str(output), "--repeats", str(options.repeats)]
        status, text = launch(Path(__file__), *arguments, ranks=RANKS, log_dir=Path(folder), env=environment)
        if status:
            sys.exit(f"bench_scaling.py: ended with status {status}: {text[-4000:]}")
        found = json.loads(output.read_text(encoding="utf-8"))
    print(table(found))
    if options.plot:
        draw(found, options.plot)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

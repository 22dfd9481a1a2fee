"""Step time and memory of every sharding level beside paddle.DataParallel, the formula and plan(): the README's table.

    python tools/bench_levels.py                  a minute, on a small GPT
    python tools/bench_levels.py --large          101 M parameters; some minutes, 12 GB of memory
    python tools/bench_levels.py --large --memory --ranks 4
    python tools/bench_levels.py --offload        p_g_os with offload=True as well

Times are measured with all models alive in the same two processes, a step of each in turn, so that whatever else the
machine does hits all of them alike; memory is measured with each model in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional

from launching import launch
from zero_formula import LEVELS, formula, state_bytes

OFFLOAD = "p_g_os, offload"  # on CPU the host is the device: the copies of the pieces and their moves still cost


@dataclass(frozen=True)
class Size:
    """A model, and the batch of one rank."""

    layers: int
    width: int
    heads: int
    seq: int
    windows: int  # of a rank
    rounds: int  # steps of each level that are timed


SMALL = Size(layers=6, width=256, heads=4, seq=64, windows=2, rounds=30)
LARGE = Size(layers=8, width=1024, heads=16, seq=16, windows=1, rounds=12)
WARMUP = 3


# ------------------------------------------------------------------------------------------------------ on every rank


class Job:
    """A model at one level, and its optimizer."""

    def __init__(self, level: Optional[str], size: Size) -> None:
        """``level`` None: not wrapped."""
        import paddle
        from gpt import GPT, GPTConfig

        from paddle_group_sharded import group_sharded_parallel

        paddle.seed(0)
        net = GPT(GPTConfig(size.layers, size.width, size.heads, size.seq))
        self.parameters = sum(int(parameter.size) for parameter in net.parameters())
        self.tokens = paddle.randint(0, 256, [size.windows, size.seq + 1])
        self.optimizer: Any = paddle.optimizer.AdamW(1e-4, parameters=net.parameters(), weight_decay=0.01)
        self.model: Any = net
        if level == "none":
            self.model = paddle.DataParallel(net)
        elif level is not None:
            self.model, self.optimizer, _ = group_sharded_parallel(
                net, self.optimizer, level.split(",")[0], offload=level == OFFLOAD
            )

    def loss(self) -> Any:
        """Of the forward pass."""
        from paddle.nn.functional import cross_entropy

        return cross_entropy(self.model(self.tokens[:, :-1]), self.tokens[:, 1:])

    def step(self, after_backward: Callable[[], None] = lambda: None) -> float:
        """One step; its seconds, which ``after_backward`` is part of."""
        started = time.perf_counter()
        self.loss().backward()
        after_backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        return time.perf_counter() - started


def measure_times(size: Size, levels: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of ``size.rounds`` steps of each level, taken in turn."""
    import paddle.distributed as dist

    jobs = {level: Job(level, size) for level in levels}
    seconds: dict[str, list[float]] = {level: [] for level in levels}
    for step in range(WARMUP + size.rounds):
        for level, job in jobs.items():
            dist.barrier()  # nobody pays for what a rank is behind in the level before
            taken = job.step()
            if step >= WARMUP:
                seconds[level].append(taken)
    return seconds


def measure_memory(level: str, size: Size) -> dict[str, float]:
    """Parameters, live bytes between backward and step, and the peak since the process started."""
    from paddle_group_sharded.paddle_compat import allocated_bytes, peak_bytes

    job = Job(level, size)
    live: list[int] = []
    for _ in range(WARMUP):
        job.step(lambda: live.append(allocated_bytes()))
    return {"parameters": job.parameters, "states": live[-1] - int(job.tokens.size) * 8, "peak": peak_bytes()}


def predict_peaks(size: Size, ranks: int) -> dict[str, int]:
    """Bytes of each level, by ``plan()``."""
    from paddle_group_sharded import plan

    job = Job(None, size)
    found = plan(job.model, job.optimizer, world_size=ranks, sample=job.loss)
    return {level: found.row(level, ranks).peak for level in LEVELS}


def work(task: str, size: Size, options: argparse.Namespace) -> None:
    """The body of one rank: a level's memory, all levels' times, or the plan; rank 0 writes what it found."""
    import paddle.distributed as dist

    found: Any
    if task == "plan":
        found = predict_peaks(size, options.ranks)
    else:
        dist.init_parallel_env()  # not fleet.init: each group that it makes on gloo is one more chance to fail
        found = measure_times(size, levels_of(options)) if task == "times" else measure_memory(task, size)
    if dist.get_rank() == 0:
        Path(options.output).write_text(json.dumps(found), encoding="utf-8")


# --------------------------------------------------------------------------------------------------------- the parent


def levels_of(options: argparse.Namespace) -> list[str]:
    """The rows of the table."""
    return [*LEVELS, *[OFFLOAD] * options.offload]


def measure(task: str, options: argparse.Namespace) -> Any:
    """What rank 0 of a launch of ``task`` found; SystemExit with the end of its output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        arguments = ["--task", task, "--output", str(found), "--ranks", str(options.ranks)]
        arguments += ["--large"] * options.large + ["--offload"] * options.offload
        ranks = 1 if task == "plan" else options.ranks
        status, output = launch(Path(__file__), *arguments, ranks=ranks, log_dir=Path(folder))
        if status:
            sys.exit(f"bench_levels.py: {task} ended with status {status}: {output[-4000:]}")
        return json.loads(found.read_text(encoding="utf-8"))


def summarize(
    times: dict[str, list[float]], memory: dict[str, dict[str, float]], peaks: dict[str, int], ranks: int
) -> list[dict[str, Any]]:
    """A row for each level of ``memory``; a ratio is that of the medians, None where no times were taken."""
    rows = []
    for level, found in memory.items():
        known = level.split(",")[0]
        rows.append(
            {
                "level": level,
                "ranks": ranks,
                "step_ms": 1e3 * statistics.median(times[level]) if times else None,
                "ratio": statistics.median(times[level]) / statistics.median(times["none"]) if times else None,
                "states_mb": found["states"] / 1e6,
                "formula_mb": state_bytes(known, int(found["parameters"]), ranks) / 1e6,
                "peak_mb": found["peak"] / 1e6,
                "planned_mb": peaks[known] / 1e6,
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as the README shows them."""
    lines = [
        "| level | ranks | step | ratio | model states | ZeRO formula (bytes a parameter) | peak | `plan()` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        level, *offload = row["level"].split(",")
        name = "`paddle.DataParallel`" if level == "none" else f"`{level}`{' with offload' if offload else ''}"
        time_ = "- | -" if row["step_ms"] is None else f"{row['step_ms']:.0f} ms | {row['ratio']:.2f}"
        lines.append(
            f"| {name} | {row['ranks']} | {time_} | {row['states_mb']:.1f} MB "
            f"| {row['formula_mb']:.1f} MB ({formula(level)}) | {row['peak_mb']:.1f} MB | {row['planned_mb']:.1f} MB |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse, then be the parent or a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="8 blocks of width 1024, 16 tokens a rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--memory", action="store_true", help="take no times")
    parser.add_argument("--offload", action="store_true", help="a row for p_g_os with offload=True")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = LARGE if options.large else SMALL
    if options.task:
        return work(options.task, size, options)
    memory = {level: measure(level, options) for level in levels_of(options)}
    times = {} if options.memory else measure("times", options)
    rows = summarize(times, memory, measure("plan", options), options.ranks)
    parameters = memory["none"]["parameters"]
    print(f"{options.ranks} ranks, {parameters:,} parameters, {size.windows * size.seq} tokens a rank and step,")
    timed = f"; medians of {size.rounds} steps" if times else ""
    print(f"fp32, AdamW, {os.environ.get('OMP_NUM_THREADS', '1')} thread a rank{timed}\n")
    print(markdown(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Step time and memory of every sharding level beside paddle.DataParallel: the table of the README.

    python tools/bench_levels.py                  a minute, on a small GPT
    python tools/bench_levels.py --large          101 M parameters; some minutes, 12 GB of memory

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from launching import launch
from zero_formula import LEVELS, formula, state_bytes

RANKS = 2


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

    def __init__(self, level: str, size: Size) -> None:
        import paddle
        from gpt import GPT, GPTConfig

        from paddle_group_sharded import group_sharded_parallel

        paddle.seed(0)
        net = GPT(GPTConfig(size.layers, size.width, size.heads, size.seq))
        self.parameters = sum(int(parameter.size) for parameter in net.parameters())
        self.tokens = paddle.randint(0, 256, [size.windows, size.seq + 1])
        self.optimizer: Any = paddle.optimizer.AdamW(1e-4, parameters=net.parameters(), weight_decay=0.01)
        if level == "none":
            self.model: Any = paddle.DataParallel(net)
        else:
            self.model, self.optimizer, _ = group_sharded_parallel(net, self.optimizer, level)

    def step(self, after_backward: Callable[[], None] = lambda: None) -> float:
        """One step; its seconds, which ``after_backward`` is part of."""
        from paddle.nn.functional import cross_entropy

        started = time.perf_counter()
        cross_entropy(self.model(self.tokens[:, :-1]), self.tokens[:, 1:]).backward()
        after_backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        return time.perf_counter() - started


def measure_times(size: Size) -> dict[str, list[float]]:
    """Seconds of ``size.rounds`` steps of each level, taken in turn."""
    import paddle.distributed as dist

    jobs = {level: Job(level, size) for level in LEVELS}
    seconds: dict[str, list[float]] = {level: [] for level in LEVELS}
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


def work(task: str, size: Size, output: str) -> None:
    """The body of one rank: a level's memory, or all levels' times; rank 0 writes what it found."""
    import paddle.distributed as dist
    from paddle.distributed import fleet

    fleet.init(is_collective=True, log_level="WARNING")
    found = measure_times(size) if task == "times" else measure_memory(task, size)
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(found), encoding="utf-8")


# --------------------------------------------------------------------------------------------------------- the parent


def measure(task: str, large: bool) -> Any:
    """What rank 0 of a launch of ``task`` found; SystemExit with the end of its output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        arguments = ["--task", task, "--output", str(found), *["--large"] * large]
        status, output = launch(Path(__file__), *arguments, ranks=RANKS, log_dir=Path(folder))
        if status:
            sys.exit(f"bench_levels.py: {task} ended with status {status}: {output[-4000:]}")
        return json.loads(found.read_text(encoding="utf-8"))


def summarize(times: dict[str, list[float]], memory: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """A row for each level; a ratio is that of the medians."""
    rows = []
    for level in LEVELS:
        rows.append(
            {
                "level": level,
                "step_ms": 1e3 * statistics.median(times[level]),
                "ratio": statistics.median(times[level]) / statistics.median(times["none"]),
                "states_mb": memory[level]["states"] / 1e6,
                "formula_mb": state_bytes(level, int(memory[level]["parameters"]), RANKS) / 1e6,
                "peak_mb": memory[level]["peak"] / 1e6,
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as the README shows them."""
    lines = [
        "| level | step | ratio | model states | ZeRO formula (bytes a parameter) | peak |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = "`paddle.DataParallel`" if row["level"] == "none" else f"`{row['level']}`"
        lines.append(
            f"| {name} | {row['step_ms']:.0f} ms | {row['ratio']:.2f} | {row['states_mb']:.1f} MB "
            f"| {row['formula_mb']:.1f} MB ({formula(row['level'])}) | {row['peak_mb']:.1f} MB |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse, then be the parent or a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="8 blocks of width 1024, 16 tokens a rank")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = LARGE if options.large else SMALL
    if options.task:
        return work(options.task, size, options.output)
    memory = {level: measure(level, options.large) for level in LEVELS}
    rows = summarize(measure("times", options.large), memory)
    print(
        f"{RANKS} ranks, {memory['none']['parameters']:,} parameters, {size.windows * size.seq} tokens a rank and step,"
    )
    print(f"fp32, AdamW, {os.environ.get('OMP_NUM_THREADS', '1')} thread a rank; medians of {size.rounds} steps\n")
    print(markdown(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

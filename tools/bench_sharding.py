"""Step time of each sharding level beside paddle.DataParallel, where it goes, and how far it is from the floor.

    python tools/bench_sharding.py                          all works on 2 ranks; some minutes, 12 GB of memory
    python tools/bench_sharding.py --work layers            one of them: large, compute, layers
    python tools/bench_sharding.py --work large --ranks 4
    python tools/bench_sharding.py --profile os_g           the Python functions that a level spends its time in
    python tools/bench_sharding.py --peer torch             the same works with PyTorch's DDP and FSDP2 as well

All levels live in the same processes and take turns, so that whatever else the machine does hits all of them alike.
A ratio is the median over the turns of (median step of the level / median step of DataParallel in the same turn).

*floor*: forward and backward of the bare model + the same collectives on warm buffers + the optimizer's share
(1/ranks of the bare optimizer's step), each measured alone in the same run.  Nothing overlaps in it, so a level that
hides communication behind backward can be below it.

*peer*: PyTorch runs in a launch of its own after ours, so its milliseconds are of another moment; what compares is
FSDP2 / DDP beside p_g_os / DataParallel, each a ratio within one launch.  On AMD processors set MKL_DEBUG_CPU_TYPE=5:
without it Paddle's matrix products take several times as long as PyTorch's, and hide what a level costs.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from launching import launch, launch_torch, require_torch

LEVELS = ("none", "os", "os_g", "p_g_os")
PHASES = ("forward", "backward", "step", "clear")
WARMUP = 3


@dataclass(frozen=True)
class Work:
    """A model, the batch of one rank, and what limits a step."""

    bound: str
    layers: int
    width: int
    heads: int = 0  # 0: plain Linear layers one after the other
    seq: int = 0
    windows: int = 0


WORKS = {
    "large": Work("communication and optimizer", layers=8, width=1024, heads=16, seq=16, windows=1),
    "compute": Work("compute", layers=4, width=512, heads=8, seq=128, windows=4),
    "layers": Work("Python", layers=1000, width=8),
}


# ------------------------------------------------------------------------------------------------------ on every rank


class Job:
    """A model at one level (None: bare), and its optimizer."""

    def __init__(self, level: Optional[str], work: Work) -> None:
        import paddle
        from gpt import GPT, GPTConfig
        from paddle import nn

        from paddle_group_sharded import group_sharded_parallel

        paddle.seed(0)
        if work.heads:
            net: Any = GPT(GPTConfig(work.layers, work.width, work.heads, work.seq))
            tokens = paddle.randint(0, 256, [work.windows, work.seq + 1])
            self.inputs = tokens[:, :-1]
            self.loss = lambda output: nn.functional.cross_entropy(output, tokens[:, 1:])
        else:
            net = nn.Sequential(*(nn.Linear(work.width, work.width) for _ in range(work.layers)))
            self.inputs = paddle.randn([4, work.width])
            self.loss = lambda output: (output * output).mean()
        self.parameters = sum(int(parameter.size) for parameter in net.parameters())
        self.optimizer: Any = paddle.optimizer.AdamW(1e-4, parameters=net.parameters(), weight_decay=0.01)
        self.model = net
        if level == "none":
            self.model = paddle.DataParallel(net)
        elif level is not None:
            self.model, self.optimizer, _ = group_sharded_parallel(net, self.optimizer, level)

    def step(self) -> list[float]:
        """One step; the seconds of each phase."""
        marks = [time.perf_counter()]
        loss = self.loss(self.model(self.inputs))
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        marks.append(time.perf_counter())
        self.optimizer.clear_grad()
        marks.append(time.perf_counter())
        return [after - before for before, after in zip(marks, marks[1:])]


class Meters:
    """Seconds spent inside some functions of the package while the context is open."""

    def __init__(self) -> None:
        from paddle_group_sharded.comm import worker
        from paddle_group_sharded.sharding import gradients, group, optimizer

        self.seconds = dict.fromkeys(("communication", "waiting", "copies", "optimizer"), 0.0)
        self._places: list[tuple[Any, str, str]] = [
            (worker.Task, "run", "communication"),  # in the communicator's thread
            (worker.Task, "wait", "waiting"),
            *((gradients, name, "copies") for name in ("accumulate", "copy_into", "scale_into", "pack")),
            (group, "copy_into", "copies"),
            (optimizer, "step_units", "optimizer"),
        ]

    def __enter__(self) -> dict[str, float]:
        self._plain = [getattr(place, name) for place, name, _ in self._places]
        for (place, name, meter), plain in zip(self._places, self._plain):
            setattr(place, name, self._timed(plain, meter))
        return self.seconds

    def __exit__(self, *_: object) -> None:
        for (place, name, _), plain in zip(self._places, self._plain):
            setattr(place, name, plain)

    def _timed(self, plain: Callable[..., Any], meter: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                self.seconds[meter] += time.perf_counter() - started

        return timed


def collectives_alone(numel: int, group: Any) -> tuple[float, float]:
    """Seconds of one all-reduce of ``numel`` float32 elements, and of one all-gather to them, on warm buffers."""
    import paddle
    import paddle.distributed as dist

    from paddle_group_sharded.comm import create_comm

    comm = create_comm(group)
    full = paddle.zeros([-(-numel // comm.world_size) * comm.world_size])
    shard = full[: full.shape[0] // comm.world_size].clone()

    def median(call: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(7):
            dist.barrier()
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[2:])

    reduced = median(lambda: comm.all_reduce(full, "floor").wait())
    gathered = median(lambda: comm.all_gather(full, shard, "floor").wait())
    comm.close()
    return reduced, gathered


def measure(work: Work, steps: int, turns: int, levels: Sequence[str]) -> dict[str, Any]:
    """Everything the parent needs, from one rank."""
    import paddle.distributed as dist

    jobs: dict[str, Job] = {level: Job(level, work) for level in levels}
    bare = Job(None, work)
    phases: dict[str, list[list[list[float]]]] = {name: [] for name in (*levels, "bare")}
    for _ in range(turns):
        for name, job in (*jobs.items(), ("bare", bare)):
            dist.barrier()
            taken = [job.step() for _ in range(steps + WARMUP)]
            phases[name].append(taken[WARMUP:])
    parts = {}
    for level in levels:
        dist.barrier()
        with Meters() as seconds:
            taken = [sum(jobs[level].step()) for _ in range(steps)]
        parts[level] = {"all": sum(taken) / steps, **{name: value / steps for name, value in seconds.items()}}
    reduced, gathered = collectives_alone(bare.parameters, None)
    return {
        "parameters": bare.parameters,
        "phases": phases,
        "parts": parts,
        "all_reduce": reduced,
        "all_gather": gathered,
    }


def profile(work: Work, level: str, steps: int) -> str:
    """The functions with the most time of their own, of one rank."""
    job = Job(level, work)
    for _ in range(WARMUP):
        job.step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        job.step()
    profiler.disable()
    with tempfile.TemporaryFile("w+") as text:
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(30)
        text.seek(0)
        return text.read()


def run_rank(options: argparse.Namespace) -> None:
    """The body of one rank; rank 0 writes what it found."""
    import paddle.distributed as dist

    dist.init_parallel_env()  # the one group that is needed: fleet makes more, in which 4 ranks often miss each other
    work = WORKS[options.work]
    if options.profile:
        found: Any = profile(work, options.profile, options.steps)
    else:
        found = measure(work, options.steps, options.turns, options.levels)
    if dist.get_rank() == 0:
        Path(options.output).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


# --------------------------------------------------------------------------------------------------------- the parent


def measured(name: str, options: argparse.Namespace, peer: Optional[str] = None) -> Any:
    """What rank 0 of a launch, of ours or of ``peer``, found; SystemExit with the end of its output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        arguments = ["--output", str(found), "--work", name, "--steps", str(options.steps)]
        arguments += ["--turns", str(options.turns)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        if peer:
            script = Path(__file__).with_name(f"peer_{peer}.py")
            status, output = launch_torch(script, *arguments, ranks=options.ranks, env=environment)
        else:
            arguments += ["--levels", *options.levels]
            arguments += ["--profile", options.profile] if options.profile else []
            status, output = launch(
                Path(__file__), *arguments, ranks=options.ranks, log_dir=Path(folder), env=environment
            )
        if status:
            launched = f"{name} with {peer}" if peer else name
            sys.exit(f"bench_sharding.py: {launched} ended with status {status}: {output[-4000:]}")
        return json.loads(found.read_text(encoding="utf-8"))


def rows_of(found: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """A row per level: milliseconds of each phase and in all, the ratio with its spread, and the floor."""
    phases = found["phases"]

    def medians(name: str) -> list[float]:
        steps = [step for turn in phases[name] for step in turn]
        return [1e3 * statistics.median(column) for column in zip(*steps)]

    def turns(name: str) -> list[float]:
        return [statistics.median(sum(step) for step in turn) for turn in phases[name]]

    forward, backward, step, clear = medians("bare")
    rows = []
    for level in (name for name in phases if name != "bare"):
        gathers = {"none": 0, "os": 1, "os_g": 1, "p_g_os": 2}[level]
        communication = 1e3 * (found["all_reduce"] + gathers * found["all_gather"])
        floor = forward + backward + clear + communication + step / (1 if level == "none" else ranks)
        ratios = [ours / theirs for ours, theirs in zip(turns(level), turns("none"))] if "none" in phases else [1.0]
        total = 1e3 * statistics.median(turns(level))
        rows.append(
            {
                "level": level,
                "total_ms": total,
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "floor_ms": floor,
                "over_floor": total / floor - 1,
                **{f"{phase}_ms": value for phase, value in zip(PHASES, medians(level))},
                **parts_of(found["parts"][level], forward + backward),
            }
        )
    return rows


def parts_of(parts: dict[str, float], compute_ms: float) -> dict[str, float]:
    """Where the milliseconds of a step go, beside forward and backward of the bare model, which take ``compute_ms``."""
    ms = {name: 1e3 * value for name, value in parts.items()}
    known = compute_ms + ms["waiting"] + ms["copies"] + ms["optimizer"]
    return {
        "compute_ms": compute_ms,
        "communication_ms": ms["communication"],  # in a thread of its own, beside everything else
        "waiting_ms": ms["waiting"],
        "copies_ms": ms["copies"],
        "optimizer_ms": ms["optimizer"],
        "other_ms": ms["all"] - known,  # Python, and what a busy machine adds
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of one work as a table."""
    lines = ["| level | step | ratio (min to max) | floor | over it | forward | backward | step() | clear |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        name = "`paddle.DataParallel`" if row["level"] == "none" else f"`{row['level']}`"
        phases = " | ".join(f"{row[f'{phase}_ms']:.1f}" for phase in PHASES)
        ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
        lines.append(
            f"| {name} | {row['total_ms']:.1f} ms | {ratio} | {row['floor_ms']:.1f} "
            f"| {100 * row['over_floor']:+.0f} % | {phases} |"
        )
    lines += ["", "| level | compute | communication | waited for it | optimizer | copies | Python and the rest |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        if row["level"] != "none":
            names = ("compute", "communication", "waiting", "optimizer", "copies", "other")
            lines.append(f"| `{row['level']}` | " + " | ".join(f"{row[f'{name}_ms']:.1f}" for name in names) + " |")
    return "\n".join(lines)


def peer_row(found: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a step of PyTorch's DDP and FSDP2, and the ratio of the two with its spread over the turns."""
    plain, sharded = ([statistics.median(turn) for turn in found["seconds"][way]] for way in ("DDP", "FSDP2"))
    ratios = [ours / theirs for ours, theirs in zip(sharded, plain)]
    return {
        "version": found["torch"],
        "parameters": found["parameters"],
        "ddp_ms": 1e3 * statistics.median(plain),
        "fsdp2_ms": 1e3 * statistics.median(sharded),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def peer_markdown(row: dict[str, Any]) -> str:
    """What PyTorch takes for one work as a table."""
    return "\n".join(
        [
            f"| torch {row['version']} | DDP | FSDP2 | FSDP2 / DDP (min to max) |",
            "|---|---|---|---|",
            f"| {row['parameters']:,} parameters | {row['ddp_ms']:.1f} ms | {row['fsdp2_ms']:.1f} ms "
            f"| {row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f}) |",
        ]
    )


def main() -> None:
    """Parse, then be the parent or a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORKS, help="one of the works (default: all)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of a turn")
    parser.add_argument("--turns", type=int, default=5, help="turns of each level")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--profile", choices=LEVELS, help="print where this level spends its time instead")
    parser.add_argument("--peer", choices=["torch"], help="time DDP and FSDP2 of PyTorch 2.6 or newer as well")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output:
        return run_rank(options)
    if options.peer and options.profile:
        parser.error("--profile looks into one of our levels: leave out --peer")
    if options.peer:
        require_torch(parser)
    results: dict[str, Any] = {options.peer: {}} if options.peer else {}
    for name in [options.work] if options.work else list(WORKS):
        work = WORKS[name]
        found = measured(name, options)
        if options.profile:
            print(found)
            continue
        rows = results[name] = rows_of(found, options.ranks)
        print(f"\n{name}: {found['parameters']:,} parameters, bound by {work.bound}; {options.ranks} ranks")
        print(f"alone: all-reduce {1e3 * found['all_reduce']:.1f} ms, all-gather {1e3 * found['all_gather']:.1f} ms\n")
        print(markdown(rows), flush=True)
        if options.peer:
            row = results[options.peer][name] = peer_row(measured(name, options, options.peer))
            print(f"\n{peer_markdown(row)}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

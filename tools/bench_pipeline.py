"""Step time of every schedule on two stages, beside what one process takes and what the machine can give.

    python tools/bench_pipeline.py                 both widths, some minutes
    python tools/bench_pipeline.py --width 512 --schedules 1f1b zb_h1
    python tools/bench_pipeline.py --peer torch    the same work with PyTorch's schedules of the same kind as well

The *ideal* is (m + p - 1) / (m p) of the time that one process takes for the same micro-batches: no communication, and
the bubble of 1F1B.  A schedule with a smaller bubble may go beyond 100 %.  One process and all schedules take turns,
step by step, in the same two processes, so that whatever else the machine does hits all of them alike; while one
process is timed the other one waits.  A time ends when both processes are done.

The *floor* is what the machine gives when both processes compute: each takes its own stage through all micro-batches,
nothing is sent, and the bubble of 1F1B is added.  Cores that share memory and power are slower together than alone, so
it lies above the ideal.  *at best* compares the fastest steps instead of the medians: what is left without noise.

*peer*: torch.distributed.pipelining runs in a launch of its own after ours, so its milliseconds are of another moment
and of other kernels; what compares is how near each comes to its own ideal and floor, measured in its own launch.
On AMD processors set MKL_DEBUG_CPU_TYPE=5: without it Paddle's matrix products take several times as long as PyTorch's,
and hide what a schedule costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

from launching import launch, launch_torch, require_torch

STAGES = 2
MICRO_BATCHES = 8
BLOCKS = 6
SEQ, SAMPLES = 64, 2  # of a micro-batch
WARMUP = 2
SCHEDULES = {"1f1b": 1, "zb_h1": 1, "gpipe": 1, "interleaved": 3}  # chunks of each


# ------------------------------------------------------------------------------------------------------ on every rank


def turns(
    jobs: dict[str, Callable[[], Any]], rounds: int, barrier: Callable[[str], Any]
) -> Iterator[tuple[str, float]]:
    """The name of each job, and the seconds that the slower process took for it, in each round after the warm-up."""
    for turn in range(WARMUP + rounds):
        for name, job in jobs.items():
            barrier(name)
            started = time.perf_counter()
            job()
            barrier(name)
            if turn >= WARMUP:
                yield name, time.perf_counter() - started


def entries(width: int) -> list[Any]:
    """Transformer blocks, all alike."""
    import paddle
    from paddle import nn

    from paddle_group_sharded import LayerDesc

    class Block(nn.Layer):  # type: ignore[misc]
        """Attention and two dense layers, each added to its input: float [batch, seq, width] to the same shape."""

        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            batch, seq, _ = x.shape
            heads = self.qkv(self.norm1(x)).reshape([batch, seq, 3, 4, width // 4]).transpose([2, 0, 3, 1, 4])
            query, key, value = heads.unbind(0)
            scores = paddle.matmul(query, key, transpose_y=True) * (width // 4) ** -0.5
            mixed = paddle.matmul(nn.functional.softmax(scores), value).transpose([0, 2, 1, 3])
            x = x + self.out(mixed.reshape([batch, seq, width]))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate=True))

    return [LayerDesc(Block) for _ in range(BLOCKS)]


def measure(width: int, rounds: int, schedules: list[str]) -> dict[str, Any]:
    """Seconds of each step of one process and of every schedule, in turn, and the reports of the last ones."""
    import paddle
    from paddle import nn

    from paddle_group_sharded import PipelineLayer, pipeline_parallel

    def optimizer_of(layer: Any) -> Any:
        return paddle.optimizer.SGD(1e-4, parameters=layer.parameters())

    models = {}
    for schedule in schedules:
        chunks = SCHEDULES[schedule]
        layer = PipelineLayer(
            entries(width), num_stages=STAGES, loss_fn=nn.MSELoss(), num_virtual_pipeline_stages=chunks, seed=0
        )
        models[schedule] = pipeline_parallel(layer, optimizer_of(layer), MICRO_BATCHES, schedule)
    comm = layer.comm
    whole = layer.to_sequential()
    whole_optimizer = optimizer_of(whole)
    x = paddle.randn([SAMPLES * MICRO_BATCHES, SEQ, width])
    y = paddle.randn([SAMPLES * MICRO_BATCHES, SEQ, width])
    stage = nn.Sequential(*(entry.build_layer() for entry in entries(width)[: BLOCKS // STAGES]))
    stage_optimizer = optimizer_of(stage)

    def accumulate(layer: Any, optimizer: Any, inputs_expect_grad: bool = False) -> None:
        for start in range(0, len(x), SAMPLES):
            inputs = x[start : start + SAMPLES].detach()
            inputs.stop_gradient = not inputs_expect_grad
            loss = nn.functional.mse_loss(layer(inputs), y[start : start + SAMPLES])
            (loss / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.clear_grad()

    def one_process() -> None:
        if comm.rank == 0:
            accumulate(whole, whole_optimizer)

    def stages_alone() -> None:
        accumulate(stage, stage_optimizer, inputs_expect_grad=comm.rank > 0)

    def of(schedule: str) -> Any:
        model, optimizer = models[schedule]
        return lambda: model.train_batch([x, y], optimizer)

    jobs = {"one process": one_process, "stages alone": stages_alone, **{name: of(name) for name in schedules}}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    bubbles: dict[str, list[float]] = {name: [] for name in schedules}
    for name, taken in turns(jobs, rounds, comm.barrier):
        seconds[name].append(taken)
        if name in models:
            bubbles[name].append(float(models[name][0].gather_timeline().bubble_fraction))
    facts = {}
    for schedule, (model, _) in models.items():
        planned, measured = model.planned_timeline, model.gather_timeline()
        chunks = SCHEDULES[schedule]
        facts[schedule] = {
            "planned_bubble": float(planned.bubble_fraction),
            "measured_bubble": statistics.median(bubbles[schedule]),
            "live": [float(measured.peak_live(rank)) for rank in range(STAGES)],
            "planned_live": [float(planned.peak_live(rank)) for rank in range(STAGES)],
            "chunks": chunks,
        }
    return {"seconds": seconds, "facts": facts}


def work(width: int, rounds: int, schedules: list[str], output: str) -> None:
    """The body of one rank; rank 0 writes what it found."""
    import paddle.distributed as dist

    dist.init_parallel_env()
    found = measure(width, rounds, schedules)
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(found), encoding="utf-8")


# --------------------------------------------------------------------------------------------------------- the parent


def rows_of(width: int, found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each schedule; times are medians, an efficiency is the median of those of each turn's pair of times."""
    one, alone = found["seconds"]["one process"], found["seconds"]["stages alone"]
    share = (MICRO_BATCHES + STAGES - 1) / (MICRO_BATCHES * STAGES)
    share_of_stage = share * STAGES
    rows = []
    for schedule, facts in found["facts"].items():
        taken = found["seconds"][schedule]
        rows.append(
            {
                "width": width,
                "library": f"torch {found['torch']}" if "torch" in found else "paddle_group_sharded",
                "schedule": schedule,
                "one_process_ms": 1e3 * statistics.median(one),
                "ideal_ms": 1e3 * share * statistics.median(one),
                "floor_ms": 1e3 * share_of_stage * statistics.median(alone),
                "step_ms": 1e3 * statistics.median(taken),
                "efficiency": statistics.median(share * whole / each for whole, each in zip(one, taken)),
                "efficiency_at_best": share * min(one) / min(taken),
                "of_floor": statistics.median(share_of_stage * stage / each for stage, each in zip(alone, taken)),
                "seconds": {"one process": one, "stages alone": alone, schedule: taken},
                **facts,
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = [
        "| width | schedule | one process | ideal | floor | step | of the ideal | at best | of the floor "
        "| bubble planned | measured | live, by rank |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "live" in row:
            live = ", ".join(f"{value:g}" for value in row["live"])
            name = f"`{row['schedule']}`"
            facts = f"{100 * row['planned_bubble']:.1f} % | {100 * row['measured_bubble']:.1f} % | {live}"
        else:  # a peer's
            name = f"`{row['schedule']}`, {row['library']}"
            facts = "- | - | -"
        lines.append(
            f"| {row['width']} | {name} | {row['one_process_ms']:.0f} ms | {row['ideal_ms']:.0f} ms "
            f"| {row['floor_ms']:.0f} ms | {row['step_ms']:.0f} ms | {100 * row['efficiency']:.1f} % "
            f"| {100 * row['efficiency_at_best']:.1f} % | {100 * row['of_floor']:.1f} % | {facts} |"
        )
    return "\n".join(lines)


def run(width: int, rounds: int, schedules: list[str], peer: Optional[str] = None) -> list[dict[str, Any]]:
    """Launch ours or ``peer``, and summarize what rank 0 found; SystemExit with the end of its output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "found.json")
        arguments = ["--width", str(width), "--rounds", str(rounds), "--output", str(output)]
        arguments += ["--schedules", *schedules]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        if peer:
            script = Path(__file__).with_name(f"peer_{peer}_pipeline.py")
            status, text = launch_torch(script, *arguments, ranks=STAGES, env=environment)
        else:
            status, text = launch(Path(__file__), *arguments, ranks=STAGES, log_dir=Path(folder), env=environment)
        if status:
            launched = f" with {peer}" if peer else ""
            sys.exit(f"bench_pipeline.py{launched} ended with status {status}: {text[-4000:]}")
        return rows_of(width, json.loads(output.read_text(encoding="utf-8")))


def main() -> None:
    """Parse, then be the parent or a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="*", default=[256, 512])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each that are timed")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--peer", choices=["torch"], help="time the schedules of PyTorch 2.6 or newer as well")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output:
        return work(options.width[0], options.rounds, options.schedules, options.output)
    if options.peer:
        require_torch(parser)
    peers = [None, options.peer] if options.peer else [None]
    rows = [
        row for width in options.width for peer in peers for row in run(width, options.rounds, options.schedules, peer)
    ]
    print(
        f"{STAGES} stages, {MICRO_BATCHES} micro-batches of {SAMPLES} x {SEQ} tokens, {BLOCKS} blocks, fp32, "
        f"{os.environ.get('OMP_NUM_THREADS', '1')} thread a rank; medians of {options.rounds} steps\n"
    )
    print(markdown(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

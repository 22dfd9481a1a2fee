"""What ``bench_pipeline.py --peer torch`` starts on each rank: its work with torch.distributed.pipelining.

Blocks, batches and optimizer are those of the Paddle side, and so are the turns.  Paddle is not imported here.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_pipeline import BLOCKS, MICRO_BATCHES, SAMPLES, SCHEDULES, SEQ, STAGES, turns
from peer_torch import run_rank
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

KINDS: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "zb_h1": ScheduleInterleavedZeroBubble,  # with one chunk a rank: weight gradients apart, no more live than 1F1B
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
}


class Block(nn.Module):
    """The block of bench_pipeline.py, operation by operation: [batch, seq, width] to the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what attention, then what the two dense layers find."""
        batch, seq, width = x.shape
        heads = self.qkv(self.norm1(x)).reshape(batch, seq, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        scores = query @ key.transpose(-1, -2) * (width // 4) ** -0.5
        mixed = (F.softmax(scores, dim=-1) @ value).transpose(1, 2)
        x = x + self.out(mixed.reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def blocks(width: int, count: int) -> nn.Sequential:
    """``count`` blocks, one after the other."""
    return nn.Sequential(*(Block(width) for _ in range(count)))


class Trained:
    """Layers with their optimizer, trained in one process."""

    def __init__(self, width: int, count: int) -> None:
        self.layers = blocks(width, count)
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=1e-4)

    def step(self, x: torch.Tensor, y: torch.Tensor, inputs_expect_grad: bool = False) -> None:
        """One optimizer step over all micro-batches."""
        for inputs, targets in zip(x.split(SAMPLES), y.split(SAMPLES)):
            inputs = inputs.detach().requires_grad_(inputs_expect_grad)
            (F.mse_loss(self.layers(inputs), targets) / MICRO_BATCHES).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Pipeline:
    """This rank's part of all blocks under the schedule that ``bench_pipeline.py`` calls ``name``."""

    def __init__(self, name: str, width: int) -> None:
        self.rank, chunks = dist.get_rank(), SCHEDULES[name]
        parts = nn.ModuleList(blocks(width, BLOCKS // (STAGES * chunks)) for _ in range(chunks))
        self.optimizer = torch.optim.SGD(parts.parameters(), lr=1e-4)
        stages = [
            PipelineStage(part, self.rank + chunk * STAGES, STAGES * chunks, torch.device("cpu"))
            for chunk, part in enumerate(parts)
        ]
        kind = KINDS[name]
        held = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        self.schedule = kind(held, MICRO_BATCHES, loss_fn=F.mse_loss)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """One optimizer step over all micro-batches."""
        self.schedule.step(*([x] if self.rank == 0 else []), target=y if self.rank == STAGES - 1 else None)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(width: int, rounds: int, schedules: list[str]) -> dict[str, Any]:
    """Seconds of each step of one process, of stages that send nothing and of every schedule, in turn."""
    torch.manual_seed(0)
    pipelines = {KINDS[name].__name__: Pipeline(name, width) for name in schedules}
    whole, stage = Trained(width, BLOCKS), Trained(width, BLOCKS // STAGES)
    rank = dist.get_rank()
    x, y = torch.randn(2, SAMPLES * MICRO_BATCHES, SEQ, width)
    jobs: dict[str, Any] = {
        "one process": lambda: whole.step(x, y) if rank == 0 else None,
        "stages alone": lambda: stage.step(x, y, inputs_expect_grad=rank > 0),
        **{name: partial(pipeline.step, x, y) for name, pipeline in pipelines.items()},
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for name, taken in turns(jobs, rounds, lambda name: dist.barrier()):
        seconds[name].append(taken)
    return {"seconds": seconds, "facts": {KINDS[name].__name__: {"chunks": SCHEDULES[name]} for name in schedules}}


def main() -> None:
    """The body of one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--schedules", nargs="+", choices=KINDS, required=True)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    run_rank(options.output, lambda: measure(options.width, options.rounds, options.schedules))


if __name__ == "__main__":
    main()

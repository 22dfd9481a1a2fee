"""What ``bench_sharding.py --peer torch`` starts on each rank: its works with PyTorch's own DDP and FSDP2.

Models, batches and optimizer are those of the Paddle side, and so are the turns: both ways live in the same processes.
Paddle is not imported here, so that neither library runs with the threads or the allocator of the other.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_sharding import WARMUP, WORKS, Work
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

CHUNK = 500  # Linear layers that FSDP2 gathers together: two groups, as many as p_g_os makes of the 1,000


class Attention(nn.Module):
    """Causal multi-head self-attention of gpt.py, operation by operation: [batch, seq, width] to the same shape."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.heads = work.heads
        self.qkv = nn.Linear(work.width, 3 * work.width)
        self.out = nn.Linear(work.width, work.width)
        slopes = 2.0 ** (-8.0 * torch.arange(work.heads) / work.heads)
        self.slopes = slopes.reshape(-1, 1, 1)  # no buffer, which DDP would broadcast in every forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix each position with those before it."""
        batch, seq, width = x.shape
        qkv = self.qkv(x).reshape(batch, seq, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        place = torch.arange(seq, dtype=x.dtype)
        distance = place.unsqueeze(1) - place
        bias = torch.where(distance < 0, -1e9, -self.slopes * distance)
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads)
        mixed = F.softmax(scores + bias, dim=-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    """One pre-norm transformer block: [batch, seq, width] to the same shape."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(work.width), nn.LayerNorm(work.width)
        self.attention = Attention(work)
        self.mlp = nn.Sequential(
            nn.Linear(work.width, 4 * work.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * work.width, work.width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what attention, then what the two dense layers find."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The GPT of gpt.py: tokens [batch, seq] to logits, with the embedding's weight as the output head's."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, work.width)
        self.blocks = nn.ModuleList(Block(work) for _ in range(work.layers))
        self.norm = nn.LayerNorm(work.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * work.layers) if residual else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed, run the blocks, and compare with every row of the embedding."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding.weight.T


def linear(width: int) -> nn.Linear:
    """A Linear that starts as Paddle's does: with PyTorch's own start, gradients vanish within 1,000 layers."""
    layer = nn.Linear(width, width)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Job:
    """A model under "DDP" or "FSDP2", and its optimizer."""

    def __init__(self, way: str, work: Work) -> None:
        torch.manual_seed(0)
        if work.heads:
            net: Any = GPT(work)
            units = net.blocks
            tokens = torch.randint(0, 256, [work.windows, work.seq + 1])
            self.inputs = tokens[:, :-1]
            self.loss = lambda output: F.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten())
        else:
            layers = [linear(work.width) for _ in range(work.layers)]
            units = net = nn.Sequential(
                *(nn.Sequential(*layers[start : start + CHUNK]) for start in range(0, work.layers, CHUNK))
            )
            self.inputs = torch.randn(4, work.width)
            self.loss = lambda output: (output * output).mean()
        self.parameters = sum(parameter.numel() for parameter in net.parameters())
        self.model = net
        if way == "DDP":
            self.model = DistributedDataParallel(net)
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for unit in (*units, net):  # the whole model last: it takes what no unit holds
                fully_shard(unit, mesh=mesh)
        # Fused: the default is a dozen operations a parameter, which FSDP2 pays for many times over in Python.  Its
        # first step takes long, half a minute for 1,000 layers, and is part of the warm-up.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def step(self) -> float:
        """The seconds of one step."""
        started = time.perf_counter()
        self.loss(self.model(self.inputs)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started


def measure(work: Work, steps: int, turns: int) -> dict[str, Any]:
    """Seconds of each step of each turn, by way."""
    jobs = {way: Job(way, work) for way in ("DDP", "FSDP2")}
    seconds: dict[str, list[list[float]]] = {way: [] for way in jobs}
    for _ in range(turns):
        for way, job in jobs.items():
            dist.barrier()
            taken = [job.step() for _ in range(steps + WARMUP)]
            seconds[way].append(taken[WARMUP:])
    return {"parameters": jobs["DDP"].parameters, "seconds": seconds}


def run_rank(output: str, measuring: Callable[[], dict[str, Any]]) -> None:
    """Measure on a rank that ``launch_torch`` started; rank 0 writes to the file ``output`` what it found."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    found = measuring()
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps({"torch": torch.__version__, **found}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """The body of one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    run_rank(options.output, lambda: measure(WORKS[options.work], options.steps, options.turns))


if __name__ == "__main__":
    main()

"""Throughput of save_checkpoint and load_checkpoint beside the safetensors library on the same bytes.

    python tools/bench_checkpoint.py             a GPT of 101 M parameters at p_g_os on 2 ranks: 1.2 GB a checkpoint
    python tools/bench_checkpoint.py --layers 2  a smaller one

Every rank writes what it holds; the library writes the same arrays from the same processes, each into one file, then
fsync, since a file that is not on the disk is not saved.  Both take turns, and each writes into a new folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launching import launch

RANKS = 2


# ------------------------------------------------------------------------------------------------------ on every rank


def timed(call: Callable[[], Any]) -> float:
    """Seconds from when all ranks begin until all have ended."""
    import paddle.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - started


def save_by_library(path: Path, tensors: dict[str, Any]) -> None:
    """One file of this rank, on the disk when this returns."""
    from safetensors.numpy import save_file

    save_file(tensors, str(path))
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def measure(folder: Path, layers: int, rounds: int) -> dict[str, Any]:
    """Seconds of each way, and the bytes of all ranks."""
    import paddle
    import paddle.distributed as dist
    from gpt import GPT, GPTConfig
    from safetensors.numpy import load_file

    from paddle_group_sharded import group_sharded_parallel, load_checkpoint, save_checkpoint

    paddle.seed(0)
    net = GPT(GPTConfig(layers, 1024, 16, 16))
    plain = paddle.optimizer.AdamW(1e-4, parameters=net.parameters())
    model, optimizer, _ = group_sharded_parallel(net, plain, "p_g_os")
    tokens = paddle.randint(0, 256, [1, 17])
    paddle.nn.functional.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.clear_grad()

    rank = dist.get_rank()
    ours, library = folder / "ours", folder / f"library_{rank}.safetensors"
    save_checkpoint(ours, model, optimizer)
    size = sum(path.stat().st_size for path in ours.rglob("*") if path.is_file())
    own = next(iter(sorted(path for path in ours.rglob("*.safetensors"))[rank : rank + 1]))
    tensors = {name: value.copy() for name, value in load_file(str(own)).items()}
    seconds: dict[str, list[float]] = {"save": [], "library save": [], "load": [], "library load": []}
    for _ in range(rounds):
        if rank == 0:
            shutil.rmtree(ours)
        seconds["save"].append(timed(lambda: save_checkpoint(ours, model, optimizer)))
        library.unlink(missing_ok=True)
        seconds["library save"].append(timed(lambda: save_by_library(library, tensors)))
        seconds["load"].append(timed(lambda: load_checkpoint(ours, model, optimizer)))
        seconds["library load"].append(timed(lambda: load_file(str(library))))
    return {"bytes": size, "seconds": seconds}


def run_rank(options: argparse.Namespace) -> None:
    """The body of one rank; rank 0 writes what it found."""
    import paddle.distributed as dist
    from paddle.distributed import fleet

    fleet.init(is_collective=True, log_level="WARNING")
    found = measure(Path(options.folder), options.layers, options.rounds)
    if dist.get_rank() == 0:
        Path(options.output).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


# --------------------------------------------------------------------------------------------------------- the parent


def table(found: dict[str, Any]) -> str:
    """Medians, and how the ways compare."""
    lines = ["| | save_checkpoint, load_checkpoint | safetensors | ratio of throughput |", "|---|---|---|---|"]
    for kind in ("save", "load"):
        ours, theirs = (statistics.median(found["seconds"][name]) for name in (kind, f"library {kind}"))
        megabytes = found["bytes"] / 1e6
        lines.append(f"| {kind} | {megabytes / ours:.0f} MB/s | {megabytes / theirs:.0f} MB/s | {theirs / ours:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Parse, then be the parent or a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="blocks of 12.6 M parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--output", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output:
        return run_rank(options)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        output = Path(folder, "found.json")
        arguments = ["--output", str(output), "--folder", folder, "--layers", str(options.layers)]
        arguments += ["--rounds", str(options.rounds)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        status, text = launch(Path(__file__), *arguments, ranks=RANKS, log_dir=Path(folder), env=environment)
        if status:
            sys.exit(f"bench_checkpoint.py: ended with status {status}: {text[-4000:]}")
        found = json.loads(output.read_text(encoding="utf-8"))
    print(f"{found['bytes'] / 1e6:.0f} MB from {RANKS} ranks, medians of {options.rounds} rounds\n\n{table(found)}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

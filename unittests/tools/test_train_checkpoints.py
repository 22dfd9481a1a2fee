"""The main job, killed while it trains and started again by the same command."""

# ctest: timeout=900

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from unittests.harness.ports import PortLease
from unittests.tools import TOOLS

SMALL = "--layers 2 --width 16 --heads 2 --seq 16 --batch 8 --lr 0.001 --sample 8".split()
STEPS = "--steps 60 --warmup 2 --eval-every 0 --checkpoint-every 5 --level p_g_os".split()


def start(folder: Path, ranks: int, port: int) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "paddle.distributed.launch", "--log_level", "ERROR", "--log_dir", str(folder / "log")]
    launcher += ["--nproc_per_node", str(ranks), "--ips", "127.0.0.1", "--start_port", str(port)]
    arguments = ["--save", str(folder / "model"), "--checkpoint", str(folder / "checkpoints"), *SMALL, *STEPS]
    return subprocess.Popen(
        [sys.executable, *(launcher if ranks > 1 else []), str(TOOLS / "train_gpt.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TOOLS.parent), "OMP_NUM_THREADS": "1"},
    )


def run(folder: Path, ranks: int) -> dict[str, Any]:
    """Let it come to its end; the weights."""
    lease = PortLease(1)
    try:
        job = start(folder, ranks, lease.ports[0])
        output, _ = job.communicate(timeout=240)
    finally:
        lease.release()
    assert job.returncode == 0, output
    entries = pickle.loads((folder / "model" / "model.pdmodel").read_bytes())
    return {name: value for name, value in entries.items() if isinstance(value, np.ndarray)}


def kill(folder: Path) -> int:
    """Start it on two ranks, kill one of them after a checkpoint; the step of the newest one."""
    lease = PortLease(1)
    try:
        job = start(folder, 2, lease.ports[0])
        deadline = time.monotonic() + 120
        while not list(folder.glob("checkpoints/step-*/manifest.json")) and time.monotonic() < deadline:
            time.sleep(0.02)
        pids = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(pids[-1]), signal.SIGKILL)
        output, _ = job.communicate(timeout=120)
    finally:
        lease.release()
    assert job.returncode != 0, output
    return max(int(path.parent.name[5:]) for path in folder.glob("checkpoints/step-*/manifest.json"))


def test_a_killed_run_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    """It goes on by itself on the same number of ranks, and on another."""
    unbroken = run(tmp_path / "unbroken", 2)
    broken = tmp_path / "broken"
    assert 0 < kill(broken) < 60
    shutil.copytree(broken, tmp_path / "elsewhere")
    again = run(broken, 2)
    assert set(again) == set(unbroken)
    assert [name for name in unbroken if unbroken[name].tobytes() != again[name].tobytes()] == []
    elsewhere = run(tmp_path / "elsewhere", 1)
    assert max(float(np.abs(unbroken[name] - elsewhere[name]).max()) for name in unbroken) <= 1e-5

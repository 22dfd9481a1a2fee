"""Tests of the scripts in ``tools/``, whose modules import each other by their plain names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from unittests.harness.ports import PortLease

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))


def run_tool(name: str, folder: Path, ranks: int, *arguments: str, timeout: float) -> tuple[int, str]:
    """Run a script of ``tools/`` on ``ranks`` ranks in ``folder``; its exit status and what rank 0 printed."""
    from launching import launch

    folder.mkdir(parents=True, exist_ok=True)
    lease = PortLease(1)
    try:
        return launch(
            TOOLS / name,
            *arguments,
            ranks=ranks,
            log_dir=folder / "log",
            port=lease.ports[0],
            timeout=timeout,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(TOOLS.parent), "OMP_NUM_THREADS": "1"},
        )
    finally:
        lease.release()

"""Start a script on several ranks from Python, and leave none of them behind."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

__all__ = ["launch", "launch_torch", "require_torch"]

GRACE_SECONDS = 15  # that a launcher gets to end its trainers, which nobody else would


def launch(
    script: Path,
    *arguments: str,
    ranks: int,
    log_dir: Path,
    port: Optional[int] = None,
    timeout: Optional[float] = None,
    **popen: Any,
) -> tuple[int, str]:
    """Run ``script`` under Paddle's launcher, or as it is on one rank; its exit status, and what rank 0 printed.

    ``port`` is where the ranks meet on this machine; None: the launcher picks one, which another process may take
    before it is used.
    Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds, when every rank has been ended.
    """
    launcher = ["-m", "paddle.distributed.launch", "--log_level", "ERROR", "--log_dir", str(log_dir)]
    launcher += ["--nproc_per_node", str(ranks)]
    if port is not None:
        launcher += ["--ips", "127.0.0.1", "--start_port", str(port)]
    return _ended([*(launcher if ranks > 1 else []), str(script), *arguments], timeout, **popen)


def launch_torch(script: Path, *arguments: str, ranks: int, **popen: Any) -> tuple[int, str]:
    """Run ``script`` under PyTorch's launcher; its exit status, and what all ranks printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return _ended([*launcher, "--nproc-per-node", str(ranks), str(script), *arguments], None, **popen)


def require_torch(parser: argparse.ArgumentParser) -> None:
    """End with ``parser``'s error, which says what to install, where ``launch_torch`` would find no PyTorch."""
    if importlib.util.find_spec("torch") is None:
        parser.error(
            f"--peer torch expects PyTorch 2.6 or newer beside Paddle, and {sys.executable} finds none: "
            "pip install torch"
        )


def _ended(arguments: list[str], timeout: Optional[float], **popen: Any) -> tuple[int, str]:
    """Run this Python with ``arguments`` to its end; its exit status and its output."""
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **popen)
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException:
        process.terminate()  # not kill(): the launcher would end without its trainers
        try:
            process.communicate(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    return process.returncode, output

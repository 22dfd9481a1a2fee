"""The environment variables of a trainer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["REPOSITORY", "trainer_environment"]

REPOSITORY = Path(__file__).resolve().parents[2]


def trainer_environment(rank: int, ports: list[int]) -> dict[str, str]:
    """The environment of a trainer: what ``fleetrun`` sets for it on one machine, with one thread, on CPU and gloo."""
    world_size = len(ports)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "FLAGS_selected_"))}
    env.pop("PYTEST_CURRENT_TEST", None)
    env.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONUNBUFFERED="1")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH", "")]))
    if world_size == 1:
        return env
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    env.update(
        PADDLE_MASTER=endpoints[0],
        PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
        PADDLE_CURRENT_ENDPOINT=endpoints[rank],
        PADDLE_TRAINER_ID=str(rank),
        PADDLE_TRAINERS_NUM=str(world_size),
        PADDLE_GLOBAL_RANK=str(rank),
        PADDLE_GLOBAL_SIZE=str(world_size),
        PADDLE_LOCAL_RANK=str(rank),
        PADDLE_LOCAL_SIZE=str(world_size),
        PADDLE_RANK_IN_NODE=str(rank),
        PADDLE_NNODES="1",
        PADDLE_DISTRI_BACKEND="gloo",
    )
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env

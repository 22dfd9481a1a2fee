"""Inside a trainer: files of layers written and read."""

from __future__ import annotations

import os
from typing import Any

import paddle
from paddle import nn

from paddle_group_sharded import LayerDesc, PipelineLayer
from unittests.harness import fresh
from unittests.pipeline.layer_models import message_of, rich_descs


def save(folder: str, num_stages: int, num_chunks: int, seed: int = 3) -> dict[str, Any]:
    layer = PipelineLayer(rich_descs(), num_stages, num_virtual_pipeline_stages=num_chunks, seed=seed)
    layer.save_state_dict(folder)
    return layer.layer_state_dict()


def load(folder: str, num_stages: int, num_chunks: int) -> dict[str, Any]:
    layer = PipelineLayer(rich_descs(), num_stages, num_virtual_pipeline_stages=num_chunks, seed=77)
    layer.set_state_dir(folder)
    return layer.layer_state_dict()


def read_plainly(folder: str) -> dict[str, Any]:
    """One process: what plain Paddle reads, by layer number and name."""
    values = {}
    for name in sorted(os.listdir(folder)):
        for entry, value in paddle.load(os.path.join(folder, name)).items():
            values[f"{int(name.split('_')[1].split('-')[0])}.{entry}"] = value
    return values


def write_plainly(folder: str, with_head: bool) -> dict[str, Any]:
    """One process: files as those of Paddle's own pipeline, which has none for a shared layer with a forward_func."""
    fresh(9)
    state = PipelineLayer(rich_descs()).to_sequential()
    os.makedirs(folder, exist_ok=True)
    for index in (0, 1, 3, 4, 5, 7, 9, 10, *[11] * with_head):
        held = getattr(state, str(index))
        paddle.save(held.state_dict(), os.path.join(folder, f"layer_{index:02d}-tensor_00-model_states.pdparams"))
    return state.state_dict()


def _flip(path: str) -> None:
    with open(path, "rb+") as file:
        file.seek(200)
        byte = file.read(1)
        file.seek(200)
        file.write(bytes([byte[0] ^ 1]))


def damage(folder: str, kind: str) -> dict[str, Any]:
    """Two stages load a folder that rank 0 has damaged; what both are told, and whether a weight has changed."""
    layer = PipelineLayer(rich_descs(), 2, seed=5)
    layer.save_state_dict(folder)
    last = os.path.join(folder, "layer_10-tensor_00-model_states.pdparams")
    if paddle.distributed.get_rank() == 0:
        if kind == "missing":
            os.remove(last)
        elif kind == "truncated":
            os.truncate(last, os.path.getsize(last) // 2)
        elif kind == "flipped":
            _flip(last)
        elif kind == "foreign":
            paddle.save(nn.Linear(8, 9).state_dict(), last)
        elif kind == "not a file of Paddle":
            with open(last, "w") as file:
                file.write("hello")
        elif kind == "twice":
            os.link(last, last.replace("-tensor", "-virtual_pp_stage_01-tensor"))
        elif kind == "deeper":
            os.link(last, last.replace("layer_10", "layer_12"))
    other = PipelineLayer([LayerDesc(nn.Linear, 2, 2)] * 2, 2)  # also a barrier: nobody reads before the damage is done
    if kind == "mixed":
        again = PipelineLayer(rich_descs(), 2, seed=6)
        again.save_state_dict(folder + "-again")
        if paddle.distributed.get_rank() == 0:
            os.replace(last.replace(folder, folder + "-again"), last)
        again.comm.barrier("mixed")
    if kind == "absent":
        folder += "-nowhere"
    for tensor in layer.layer_state_dict().values():
        tensor.set_value(paddle.full_like(tensor, 4.0))
    message = message_of(lambda: layer.set_state_dir(folder))
    unchanged = all(bool((tensor == 4.0).all()) for tensor in layer.layer_state_dict().values())
    del other
    return {"message": message, "unchanged": unchanged}


def _times(folder: str) -> dict[str, int]:
    return {name: os.stat(os.path.join(folder, name)).st_mtime_ns for name in os.listdir(folder)}


def _full_disk() -> Any:
    raise OSError(28, "No space left on device")


def failing_saves(folder: str) -> dict[str, Any]:
    """A save that one rank cannot finish leaves the earlier files as they were, and no others."""
    layer = PipelineLayer(rich_descs(), 2, seed=5)
    layer.save_state_dict(folder)
    before = _times(folder)
    for tensor in layer.layer_state_dict().values():
        tensor.set_value(tensor.astype("float32") + 1.0)
    if paddle.distributed.get_rank() == 1:
        _, held = list(layer.named_layers())[2]  # two files have been written under temporary names by then
        held.state_dict = _full_disk
    failed = message_of(lambda: layer.save_state_dict(folder))
    layer.comm.barrier("every rank has removed what it had begun")
    after = _times(folder)
    file = os.path.join(folder, sorted(before)[0])
    return {
        "failed": failed,
        "same": before == after and len(before) == 9,
        "a file": message_of(lambda: layer.save_state_dict(file)),
        "a number": message_of(lambda: layer.set_state_dir(3)),  # type: ignore[arg-type]
        "below a file": message_of(lambda: layer.save_state_dict(os.path.join(file, "below"))),
    }

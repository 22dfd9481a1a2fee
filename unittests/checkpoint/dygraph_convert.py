"""Inside a trainer: checkpoints, and files of other kinds, for the command line to work on; and what came of them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_group_sharded import (
    LayerDesc,
    PipelineLayer,
    group_sharded_parallel,
    load_checkpoint,
    load_group_sharded_model,
    save_checkpoint,
    save_group_sharded_model,
)
from unittests.checkpoint.dygraph_matrix import SAVED_AT, build, make
from unittests.checkpoint.whole import differing, whole_state
from unittests.harness import fresh
from unittests.sharding.plain_paddle import train


def write_all(folder: str) -> None:
    """On 2 ranks: ``rich`` and ``half`` as checkpoints and as whole files, and a later step of ``rich``."""
    for name, kind in (("rich", "AdamW"), ("half", "half")):
        fresh()
        model, optimizer = make(kind, "p_g_os")
        train(model, optimizer, 0, SAVED_AT)
        save_checkpoint(f"{folder}/{name}", model, optimizer, extra={"step": SAVED_AT, "where": [1, 2]})
        save_group_sharded_model(model, f"{folder}/{name}_whole", optimizer)
        expected = whole_state(model, optimizer)
        if dist.get_rank() == 0:
            Path(f"{folder}/{name}.pickle").write_bytes(pickle.dumps(expected))
        train(model, optimizer, SAVED_AT, SAVED_AT + 1)
        save_checkpoint(f"{folder}/{name}_later", model, optimizer)
    save_checkpoint(f"{folder}/weights", model)


def write_layers(folder: str) -> dict[str, Any]:
    """On 2 ranks: per-layer files, as a pipeline writes them; what they hold."""
    descs = [LayerDesc(nn.Linear, 3, 4), nn.functional.relu, LayerDesc(nn.Linear, 4, 2, bias_attr=False)]
    layer = PipelineLayer(descs, num_stages=2, loss_fn=nn.MSELoss())
    layer.save_state_dict(f"{folder}/layers")
    return {name: tensor.numpy() for name, tensor in layer.layer_state_dict().items()}


def write_plain(folder: str) -> None:
    """What a user of plain Paddle has."""
    model, optimizer = build("AdamW")
    train(model, optimizer, 0, SAVED_AT)
    paddle.save(model.state_dict(), f"{folder}/plain.pdparams")
    paddle.save(optimizer.state_dict(), f"{folder}/plain.pdopt")
    Path(f"{folder}/plain.pickle").write_bytes(pickle.dumps(whole_state(model, optimizer)))


def read(folder: str, kind: str, name: str, expected: str) -> list[str]:
    """Load what the command line has written, wrapped where plain Paddle cannot step it; the names that differ."""
    state = pickle.loads(Path(f"{folder}/{expected}.pickle").read_bytes())
    fresh()
    build(kind)
    model, optimizer = build(kind)
    if kind == "half":
        model, optimizer, _ = group_sharded_parallel(model, optimizer, "os")
    path = Path(folder, name)
    if (path / "manifest.json").exists():
        load_checkpoint(path, model, optimizer)
    else:
        load_group_sharded_model(model, path, optimizer)
    return differing(state, whole_state(model, optimizer))


def read_weights_by_paddle(path: str) -> dict[str, Any]:
    return {name: value.astype("float32").numpy() for name, value in paddle.load(path).items()}

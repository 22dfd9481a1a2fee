"""Inside a trainer: pipelines saved at some number of stages, chunks and replicas, loaded at others."""

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
    SharedLayerDesc,
    UsageError,
    group_sharded_parallel,
    load_checkpoint,
    pipeline_parallel,
    save_checkpoint,
)
from paddle_group_sharded.checkpoint.read import read_manifest
from unittests.checkpoint.whole import differing, whole_state
from unittests.harness import fresh

SAVED_AT, END = 2, 3  # steps
MICRO_BATCHES = 4


def head(layer: Any, x: Any) -> Any:
    return paddle.matmul(x, layer.weight, transpose_y=True)


def entries() -> list[Any]:
    return [
        SharedLayerDesc("embed", nn.Embedding, None, "weight", 11, 6),
        LayerDesc(nn.Linear, 6, 7),
        LayerDesc(nn.Dropout, 0.2),
        LayerDesc(nn.LayerNorm, 7),
        LayerDesc(nn.Linear, 7, 5),
        paddle.tanh,
        LayerDesc(nn.Linear, 5, 6),
        LayerDesc(nn.Linear, 6, 6),
        SharedLayerDesc("embed", nn.Embedding, head, "weight", 11, 6),
    ]


def places() -> list[str]:
    """``stages x chunks``, what is left of the ranks being replicas; and the same layers as an ordinary model."""
    return {
        1: ["1x1", "plain", "p_g_os"],
        2: ["2x1", "2x2", "p_g_os"],
        3: ["3x1"],
        4: ["4x1", "2x1", "2x2"],
    }[dist.get_world_size()]


def make(place: str, seed: int) -> tuple[Any, Any]:
    fresh(seed)
    rate = paddle.optimizer.lr.StepDecay(0.05, step_size=3, gamma=0.5)
    if place[0].isdigit():
        stages, chunks = int(place[0]), int(place[2])
        layer = PipelineLayer(
            entries(),
            num_stages=stages,
            loss_fn=nn.CrossEntropyLoss(),
            num_virtual_pipeline_stages=chunks,
            seed=seed,
        )
        optimizer = paddle.optimizer.AdamW(rate, parameters=layer.parameters())
        return pipeline_parallel(layer, optimizer, MICRO_BATCHES, "interleaved" if chunks > 1 else "1f1b")
    model = Ordinary()
    optimizer = paddle.optimizer.AdamW(rate, parameters=model.parameters())
    if place != "plain":
        model, optimizer, _ = group_sharded_parallel(model, optimizer, place)
    return model, optimizer


class Ordinary(nn.Layer):
    """The same names in plain Paddle."""

    def __init__(self) -> None:
        super().__init__()
        for index, entry in enumerate(entries()):
            if isinstance(entry, LayerDesc) and index != 2:
                self.add_sublayer(str(index), entry.build_layer())
        self._sub_layers["8"].weight = self._sub_layers["0"].weight

    def forward(self, ids: Any) -> Any:
        layers = self._sub_layers
        x = layers["4"](layers["3"](layers["1"](layers["0"](ids))))
        return head(layers["8"], layers["7"](layers["6"](paddle.tanh(x))))


def steps(model: Any, optimizer: Any, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        ids = paddle.to_tensor([[(step + 3 * row + column) % 11 for column in range(3)] for row in range(8)])
        if hasattr(model, "train_batch"):
            loss = model.train_batch([ids, ids], optimizer)
        else:
            loss = nn.functional.cross_entropy(model(ids), ids.unsqueeze(-1))
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
        getattr(optimizer, "_optim", optimizer)._learning_rate.step()
        losses.append(float(loss.item()))
    return losses


def draws_alike(source: str, target: str) -> bool:
    """Whether both have the same dropout: the ordinary model has none, and replicas draw each for itself."""
    kinds = [int(place[-1]) // int(place[0]) if place[0].isdigit() else 0 for place in (source, target)]
    return kinds[0] == kinds[1]


def save_all(folder: str) -> list[str]:
    """Every rank leaves its own part beside each checkpoint."""
    rank, saved = dist.get_rank(), []
    for place in places():
        model, optimizer = make(place, 7)
        steps(model, optimizer, 0, SAVED_AT)
        saved.append(f"{place}-{dist.get_world_size()}")
        path = f"{folder}/{saved[-1]}"
        save_checkpoint(path, model, optimizer, extra=place)
        assert {key[2] for key in read_manifest(Path(path)).tensors if key[0] == "rank"} == {"random"}  # none drifted
        expected = whole_state(model, optimizer)
        losses = steps(model, optimizer, SAVED_AT, END)
        Path(f"{path}/{rank}.pickle").write_bytes(pickle.dumps((expected, losses)))
    return saved


def load_all(folder: str, sources: list[str]) -> dict[str, Any]:
    """By source and place: names that differ, names that are new, and how far the losses that follow are."""
    results: dict[str, Any] = {}
    for place in places():
        model, optimizer = make(place, 99)
        steps(model, optimizer, 5, 6)
        for source in sources:
            parts = [pickle.loads(path.read_bytes()) for path in sorted(Path(folder, source).glob("*.pickle"))]
            whole: dict[str, Any] = {}
            for part, _ in parts:
                assert [name for name in whole if name in part and name in differing(whole, {**whole, **part})] == []
                whole.update(part)
            assert load_checkpoint(f"{folder}/{source}", model, optimizer) == source.partition("-")[0]
            found = whole_state(model, optimizer)
            # A stage that has the second owner of the shared weight calls its states by that name.
            found = {name if name in whole else name.replace(" 8.weight ", " 0.weight "): found[name] for name in found}
            expected = {name: whole[name] for name in found}
            far = 0.0
            if draws_alike(source, f"{place}-{dist.get_world_size()}"):
                again = steps(model, optimizer, SAVED_AT, END)
                losses = parts[dist.get_rank() if len(parts) == dist.get_world_size() else 0][1]  # of this replica
                far = max(abs(one - two) for one, two in zip(losses, again))
            results[f"{source} -> {place}-{dist.get_world_size()}"] = (differing(expected, found), far)
    return results


# ------------------------------------------------------------------------------------- what each rank gives, and where


def attempt(action: Any) -> str:
    try:
        action()
    except UsageError as error:
        return str(error)
    return "nothing was raised"


def one_sided(folder: str) -> dict[str, Any]:
    """An optimizer on some ranks only: what is said, and what has changed."""
    rank = dist.get_rank()
    results: dict[str, Any] = {}
    for place in ("2x1", "p_g_os", "plain"):
        model, optimizer = make(place, 7)
        steps(model, optimizer, 0, 1)
        good = f"{folder}/{place}"
        save_checkpoint(good, model, optimizer)
        steps(model, optimizer, 1, 2)
        before = whole_state(model, optimizer)
        mine = optimizer if rank else None
        said = [
            attempt(lambda model=model, mine=mine, place=place: save_checkpoint(f"{folder}/no", model, mine)),
            attempt(lambda model=model, mine=mine, good=good: load_checkpoint(good, model, mine)),
            attempt(lambda model=model, mine=mine, good=good: load_checkpoint(good, model, mine, strict=False)),
        ]
        results[place] = (said, differing(before, whole_state(model, optimizer)))
    results["folder"] = Path(folder, "no").exists()
    return results


def bare_stage(folder: str) -> dict[str, Any]:
    """The first stage has dropout and no parameters; a run goes on from its part of the pipeline or the whole."""
    rank = dist.get_rank()

    def build(seed: int, given: str, load: bool) -> tuple[Any, list[float]]:
        fresh(seed)
        descs = [LayerDesc(nn.Dropout, 0.4), LayerDesc(nn.ReLU), LayerDesc(nn.Dropout, 0.4), LayerDesc(nn.Linear, 6, 5)]
        layer = PipelineLayer(descs, num_stages=2, loss_fn=nn.CrossEntropyLoss(), seed=seed, seg_method=[0, 2, 4])
        optimizer = paddle.optimizer.AdamW(0.05, parameters=layer.parameters()) if rank else None
        if load and given == "before":
            load_checkpoint(folder, layer, optimizer)
        model, wrapped = pipeline_parallel(layer, optimizer, MICRO_BATCHES)
        if load and given != "before":
            load_checkpoint(folder, layer if given == "layer" else model, optimizer if given == "layer" else wrapped)
        losses = []
        for step in range(0 if load else -2, 2):
            if step == 0 and not load:
                save_checkpoint(folder, layer if given == "layer" else model, optimizer if rank else None)
            x = paddle.to_tensor([[(step + 3 * row + column + 5) % 11 / 11 for column in range(6)] for row in range(8)])
            y = paddle.to_tensor([row % 5 for row in range(8)])
            losses.append(float(model.train_batch([x, y], wrapped).item()))
        return model, losses[-2:]

    results: dict[str, Any] = {}
    for saved in ("layer", "model"):
        _, losses = build(3, saved, False)
        for given in ("layer", "model", "before"):
            model, again = build(8, given, True)
            results[f"{saved} {given}"] = (losses, again, model.random_step)
    return results

"""Inside a trainer: save at every level, load into every level."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_group_sharded import group_sharded_parallel, load_checkpoint, save_checkpoint
from paddle_group_sharded.checkpoint.read import read_manifest
from unittests.checkpoint.whole import differing, whole_state
from unittests.harness import fresh
from unittests.sharding import plain_paddle
from unittests.sharding.dygraph_arguments import grid_groups

LEVELS = ("os", "os_g", "p_g_os")
SAVED_AT, END = 3, 5  # steps


class Half(nn.Layer):
    """bfloat16 parameters that are stepped as float32 masters: those of whole and of odd sizes."""

    def __init__(self, dtype: str = "bfloat16") -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.middle = nn.Linear(7, 5)
        self.out = nn.Linear(5, 7)
        for param in self.parameters():
            value = param.astype(dtype)
            value._share_buffer_to(param)

    def forward(self, ids: Any) -> Any:
        x = nn.functional.embedding(ids, self.embedding.weight.astype("float32")).mean(axis=1)
        for layer in (self.middle, self.out):
            x = paddle.tanh(nn.functional.linear(x, layer.weight.astype("float32"), layer.bias.astype("float32")))
        return x


def build(kind: str) -> tuple[Any, Any]:
    if kind in ("AdamW", "Lamb", "Momentum", "SGD"):
        return plain_paddle.build(kind)
    paddle.seed(7)
    model = plain_paddle.Rich()
    if kind.startswith(("half", "full")):
        model = Half("bfloat16" if kind.startswith("half") else "float32")
    if kind == "ASGD":
        return model, paddle.optimizer.ASGD(0.05, batch_num=3, parameters=model.parameters())
    if kind.endswith(" Lamb"):
        return model, paddle.optimizer.Lamb(0.05, parameters=model.parameters(), multi_precision=True)
    return model, paddle.optimizer.AdamW(0.05, parameters=model.parameters(), multi_precision=True)


def places(kind: str) -> list[str]:
    """Plain Paddle cannot step bfloat16 on the CPU; os_g keeps what os keeps, so more ranks than two do without."""
    levels = [level for level in LEVELS if level != "os_g" or dist.get_world_size() < 3]
    return levels if kind.startswith("half") else ["plain", *levels]


def make(kind: str, place: str) -> tuple[Any, Any]:
    model, optimizer = build(kind)
    if place != "plain":
        model, optimizer, _ = group_sharded_parallel(model, optimizer, place)
    return model, optimizer


def save_all(folder: str, kind: str) -> dict[str, str]:
    """Each level's own whole state is left beside its checkpoint by rank 0, with the losses that follow."""
    world_size = dist.get_world_size()
    for place in places(kind):
        fresh()
        model, optimizer = make(kind, place)
        plain_paddle.train(model, optimizer, 0, SAVED_AT)
        path = f"{folder}/{place}-{world_size}"
        save_checkpoint(path, model, optimizer, extra={"place": place, "ids": plain_paddle.batch(1)})
        expected = whole_state(model, optimizer)
        losses = plain_paddle.train(model, optimizer, SAVED_AT, END)
        if dist.get_rank() == 0:
            Path(f"{path}/expected.pickle").write_bytes(pickle.dumps((expected, losses)))
    return sorted(path.name for path in Path(folder).iterdir()) if dist.get_rank() == 0 else []


def load_all(folder: str, kind: str, sources: list[str]) -> dict[str, Any]:
    """By source and level: names that differ, and how far the losses that follow are from the unbroken run's."""
    results: dict[str, Any] = {}
    for place in places(kind):
        fresh()
        build(kind)  # so that automatic names differ from those in the files
        model, optimizer = make(kind, place)
        plain_paddle.train(model, optimizer, 20, 21)  # it has other values and states of its own by now
        for source in sources:
            path = Path(folder) / source
            expected, losses = pickle.loads((path / "expected.pickle").read_bytes())
            extra = load_checkpoint(path, model, optimizer)
            assert extra["place"] == source.partition("-")[0]
            assert extra["ids"].numpy().tobytes() == plain_paddle.batch(1).numpy().tobytes()
            wrong = differing(expected, whole_state(model, optimizer))
            far = 0.0
            if source.endswith(f"-{dist.get_world_size()}"):
                again = plain_paddle.train(model, optimizer, SAVED_AT, END)
                far = max(abs(one - other) for one, other in zip(losses, again))
            results[f"{source} -> {place}-{dist.get_world_size()}"] = (wrong, far)
    return results


def precisions(folder: str, rule: str) -> dict[str, list[str]]:
    """Weights of 16 bits with masters into those of 32 bits, and back; the names of what differs."""
    results: dict[str, list[str]] = {}
    levels = ("os", "p_g_os")
    for source in levels:
        fresh()
        model, optimizer = make(f"half{rule}", source)
        plain_paddle.train(model, optimizer, 0, SAVED_AT)
        save_checkpoint(f"{folder}/half", model, optimizer)
        half = _named_alike(model, optimizer)
        masters = {name.replace("master ", "model "): value for name, value in half.items() if "master " in name}
        assert len(masters) == 5
        states = {name: value for name, value in half.items() if name.startswith("state ")}
        for steps in (0, SAVED_AT):
            fresh()
            model, optimizer = make(f"full{rule}", source)
            plain_paddle.train(model, optimizer, 10, 10 + steps)
            save_checkpoint(f"{folder}/full{steps}", model, optimizer)
            full = {name: value for name, value in _named_alike(model, optimizer).items() if "master " not in name}
            Path(f"{folder}/full{steps}-{dist.get_rank()}.pickle").write_bytes(pickle.dumps(full))
        for target in ("plain", *levels):
            for given in (True, False):
                fresh()
                model, optimizer = make(f"full{rule}", target)
                load_checkpoint(f"{folder}/half", model, optimizer if given else None)
                found = _named_alike(model, optimizer)
                expected = {**masters, **states} if given else masters
                results[f"half {source} -> full {target} {given}"] = differing(
                    expected, {name: value for name, value in found.items() if name in expected}
                )
            for saved in (0, SAVED_AT):
                for stepped in (0, 2) if target != "plain" else (0,):
                    if stepped > saved == 0:
                        continue  # the checkpoint lacks states that are here
                    fresh()
                    model, optimizer = make(f"half{rule}", target)
                    plain_paddle.train(model, optimizer, 20, 20 + stepped)
                    load_checkpoint(f"{folder}/full{saved}", model, optimizer)
                    full = pickle.loads(Path(f"{folder}/full{saved}-{dist.get_rank()}.pickle").read_bytes())
                    expected = {name: value for name, value in full.items() if name.startswith("state ")}
                    for name, value in full.items():
                        if name.startswith("model "):
                            expected[name.replace("model ", "master ")] = value
                            expected[name] = paddle.to_tensor(value).astype("bfloat16").numpy()
                    found = _named_alike(model, optimizer)
                    way = f"full{saved} {source} -> half {target} {stepped}"
                    results[way] = differing(expected, {name: found[name] for name in expected if name in found})
                    if saved == 0 and target != "plain":  # the first step is a first step
                        results[f"{way} trains"] = _differing_powers(model, optimizer, f"half{rule}", target)
    return results


def _named_alike(model: Any, optimizer: Any) -> dict[str, Any]:
    """States of a master under the names that those of a float32 parameter have."""
    return {name.replace("_fp32_master_0", ""): value for name, value in whole_state(model, optimizer).items()}


def _differing_powers(model: Any, optimizer: Any, kind: str, place: str) -> list[str]:
    """What counts steps, after one step, beside that of a model that has loaded nothing."""
    powers = []
    for each in ((model, optimizer), make(kind, place)):
        plain_paddle.train(*each, 0, 1)
        found = _named_alike(*each)
        powers.append({name: value for name, value in found.items() if "_pow_acc" in name})
    assert len(powers[1]) == 10
    return differing(powers[1], powers[0])


def plain_reference(folder: str, kind: str, source: str) -> list[str]:
    """A checkpoint, loaded into plain Paddle, against a run that knows nothing of this package."""
    model, optimizer = plain_paddle.build(kind)
    plain_paddle.train(model, optimizer, 0, SAVED_AT)
    expected = whole_state(model, optimizer)
    fresh()
    model, optimizer = plain_paddle.build(kind)
    load_checkpoint(f"{folder}/{source}", model, optimizer)
    return differing(expected, whole_state(model, optimizer))


def replicated(folder: str, level: str) -> dict[str, Any]:
    """On 4 ranks, two shards with two replicas each: who writes how much; and both back."""
    group, dp_group = grid_groups([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    model, optimizer = build("AdamW")
    model, optimizer, _ = group_sharded_parallel(
        model, optimizer, level, offload=True, group=group, dp_group=dp_group
    )
    plain_paddle.train(model, optimizer, 0, SAVED_AT)
    path = Path(folder) / level
    save_checkpoint(path, model, optimizer)
    expected = whole_state(model, optimizer)
    plain_paddle.train(model, optimizer, 20, 22)
    load_checkpoint(path, model, optimizer)
    manifest = read_manifest(path)
    written: dict[str, int] = {}
    for key, entry in manifest.tensors.items():
        for piece in entry.pieces if key[0] != "rank" else ():
            written[piece.file] = written.get(piece.file, 0) + piece.stop - piece.start
    return {
        "differing": differing(expected, whole_state(model, optimizer)),
        "written": [written[name] for name in sorted(written)],
        "elements": sum(entry.numel for key, entry in manifest.tensors.items() if key[0] != "rank"),
    }

"""Inside a trainer: load_group_sharded_model into plain and wrapped models."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
from pathlib import Path
from typing import Any, Callable

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_group_sharded import (
    GroupShardedError,
    group_sharded_parallel,
    load_group_sharded_model,
    save_group_sharded_model,
)
from unittests.harness import fresh
from unittests.sharding.dygraph_save import LEVELS, LowPrecision, distance, raw
from unittests.sharding.plain_paddle import batch, build, train

Tensor = Any


def to_arrays(state: dict[str, Any]) -> dict[str, Any]:
    """Copies on the host, bfloat16 as its bits."""
    return {
        key: to_arrays(value) if isinstance(value, dict) else value.numpy().copy() if hasattr(value, "numpy") else value
        for key, value in state.items()
    }


def same(expected: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether two states have the same names, shapes and bits."""
    return set(expected) == set(found) and all(
        value.shape == found[key].shape and value.tobytes() == found[key].tobytes() for key, value in expected.items()
    )


def by_position(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with ``<structured name>`` in place of automatic names."""
    names = sorted(((param.name, name) for name, param in model.named_parameters()), key=lambda pair: -len(pair[0]))
    result = {}
    for key, value in state.items():
        old, new = next(((old, new) for old, new in names if key.startswith(f"{old}_")), (key, key))
        result[key.replace(old, new)] = value
    return result


def make_sources(folder: str, optimizer: str) -> dict[str, Any]:
    """Plain files and ours, both of step 4 of one process; what it has at step 9."""
    model, plain = build(optimizer)
    train(model, plain, 0, 4)
    paddle.save(model.state_dict(), f"{folder}/{optimizer}.pdparams")
    paddle.save(plain.state_dict(), f"{folder}/{optimizer}.pdopt")
    fresh()
    sharded, ours, _ = group_sharded_parallel(*build(optimizer), "p_g_os")
    train(sharded, ours, 0, 4)
    save_group_sharded_model(sharded, f"{folder}/{optimizer}", ours)
    losses = train(model, plain, 4, 9)
    return {
        "losses": losses,
        "model": to_arrays(model.state_dict()),
        "optimizer": to_arrays(by_position(model, plain.state_dict())),
    }


def resumed(folder: str, optimizer: str, expected: dict[str, Any]) -> dict[str, float]:
    """L1, L4, L6, R1, R2: the largest distance from the unbroken run, by source, level and place of the load."""
    results = {}
    for source in (f"{optimizer}.pdparams", optimizer):
        for level, when in [("plain", "before"), *((level, when) for level in LEVELS for when in ("before", "after"))]:
            build(optimizer)  # so that automatic names differ from those in the files
            model, ours = build(optimizer)
            paddle.seed(99)
            for param in model.parameters():
                param.set_value(paddle.rand(param.shape))
            if when == "before":
                _load(model, f"{folder}/{source}", ours)
            if level != "plain":
                model, ours, _ = group_sharded_parallel(model, ours, level)
            if when == "after":
                train(model, ours, 0, 1)  # it has states of its own by now
                _load(model, f"{folder}/{source}", ours)
            losses = train(model, ours, 4, 9)
            states = ours.state_dict()
            found = {
                "losses": losses,
                "model": to_arrays(model.state_dict()),
                "optimizer": to_arrays(by_position(model, states)),
            }
            key = f"{source} {level} {when}"
            results[key] = max(distance(expected["model"], found["model"]), _states_apart(expected, found))
            results[key] = max(results[key], float(np.max(np.abs(np.subtract(expected["losses"], losses)))))
            if "LR_Scheduler" in expected["optimizer"]:
                assert found["optimizer"]["LR_Scheduler"] == expected["optimizer"]["LR_Scheduler"], key
    return results


def _load(model: Any, path: str, optimizer: Any) -> None:
    """Load, and check that it leaves this rank's random state alone (L11)."""
    state = paddle.get_rng_state()
    expected = paddle.rand([4]).numpy()
    paddle.set_rng_state(state)
    load_group_sharded_model(model, path, optimizer)
    assert paddle.rand([4]).numpy().tobytes() == expected.tobytes()


def _states_apart(expected: dict[str, Any], found: dict[str, Any]) -> float:
    def arrays(part: dict[str, Any]) -> dict[str, Any]:
        # The number at the end counts optimizers of the process.
        return {k.rpartition("_")[0]: v for k, v in part["optimizer"].items() if isinstance(v, np.ndarray)}

    return distance(arrays(expected), arrays(found))


class Odd(nn.Layer):
    """No size divides by 2 or 3."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(5, 7), nn.Linear(7, 11), nn.Linear(11, 1)])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = paddle.tanh(layer(x))
        return x


def stop_and_go(folder: str) -> dict[str, float]:
    """B6: DataParallel for 16 steps, against ours stopped at step 10 and resumed in a second model."""
    rank = dist.get_rank()

    def run(model: Any, optimizer: Any, start: int, stop: int) -> None:
        for step in range(start, stop):
            x = paddle.to_tensor(np.random.RandomState(100 * step + rank).randn(3, 5).astype("float32"))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad()

    def made() -> tuple[Any, Any]:
        model = Odd()
        return model, paddle.optimizer.AdamW(0.05, parameters=model.parameters())

    fresh()
    model, optimizer = made()
    run(paddle.DataParallel(model), optimizer, 0, 16)
    expected = to_arrays(model.state_dict())
    results = {}
    for level in LEVELS:
        fresh()
        first, first_optimizer, _ = group_sharded_parallel(*made(), level)
        run(first, first_optimizer, 0, 10)
        save_group_sharded_model(first, f"{folder}/{level}", first_optimizer)
        run(first, first_optimizer, 10, 16)
        unbroken = to_arrays(first.state_dict())
        second, second_optimizer, _ = group_sharded_parallel(*made(), level)
        load_group_sharded_model(second, f"{folder}/{level}", second_optimizer)
        run(second, second_optimizer, 10, 16)
        resumed_state = to_arrays(second.state_dict())
        results[level] = distance(expected, resumed_state)
        results[f"{level} resumed"] = distance(unbroken, resumed_state)
    return results


# ------------------------------------------------------------------------------------------------------- low precision


def _train_low(model: Any, optimizer: Any, start: int, stop: int) -> None:
    for step in range(start, stop):
        x = paddle.to_tensor(np.random.RandomState(step).randn(4, 5).astype("float32"))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()


def _low() -> tuple[Any, Any]:
    model = LowPrecision()
    return model, paddle.optimizer.AdamW(0.1, parameters=model.parameters(), multi_precision=True)


def masters(folder: str) -> dict[str, Any]:
    """L6, L8: fp32 masters under either name, into every level, and into a plain optimizer's own table."""
    fresh()
    unbroken, optimizer, _ = group_sharded_parallel(*_low(), "os")
    _train_low(unbroken, optimizer, 0, 3)
    save_group_sharded_model(unbroken, f"{folder}/ours", optimizer)
    dist.barrier() if dist.get_world_size() > 1 else None
    if dist.get_rank() == 0:
        shutil.copytree(f"{folder}/ours", f"{folder}/suffix")
        state = raw(f"{folder}/ours/model.pdopt")
        weights = state.pop("master_weights")
        state["master_weights"] = {f"{name}_fp32_master_0": value for name, value in weights.items()}
        plain = {key.replace("_fp32_master_0", ""): value for key, value in state.items()}
        for name, content in (("suffix", state), ("short", {**plain, "master_weights": weights})):
            os.makedirs(f"{folder}/{name}", exist_ok=True)
            shutil.copy(f"{folder}/ours/model.pdmodel", f"{folder}/{name}/model.pdmodel")
            with open(f"{folder}/{name}/model.pdopt", "wb") as file:
                pickle.dump(content, file, protocol=4)
    dist.barrier() if dist.get_world_size() > 1 else None
    _train_low(unbroken, optimizer, 3, 6)
    expected = to_arrays(unbroken.state_dict())
    results: dict[str, Any] = {}
    for name in ("ours", "suffix", "short"):
        for level in LEVELS:
            model, ours, _ = group_sharded_parallel(*_low(), level)
            load_group_sharded_model(model, f"{folder}/{name}", ours)
            _train_low(model, ours, 3, 6)
            found = to_arrays(model.state_dict())
            results[f"{name} {level}"] = [k for k, v in expected.items() if v.tobytes() != found[k].tobytes()]
        plain_model, plain_optimizer = _low()
        load_group_sharded_model(plain_model, f"{folder}/{name}", plain_optimizer)
        saved = raw(f"{folder}/ours/model.pdopt")["master_weights"]
        table = list(plain_optimizer.state_dict()["master_weights"].values())
        results[f"{name} plain"] = [
            key
            for (key, (_, array)), tensor in zip(saved.items(), table)
            if array.tobytes() != tensor.numpy().tobytes()
        ]
    return results


# ------------------------------------------------------------------------------------------------------------ adapters


class Adapted(nn.Layer):
    """A base and a small adapter beside it."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.base = nn.Linear(6, 4)
        self.adapter = nn.Linear(6, 4)
        for param in self.base.parameters() if frozen else ():
            param.stop_gradient = True

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.adapter(x)


def adapters(folder: str) -> dict[str, Any]:
    """C8: a checkpoint of all parameters, then training of the adapter alone; and the way back."""
    rank = dist.get_rank()

    def made(frozen: bool) -> tuple[Any, Any]:
        model = Adapted(frozen)
        params = (model.adapter if frozen else model).parameters()
        return model, paddle.optimizer.Adam(0.1, parameters=params)

    def step(model: Any, optimizer: Any) -> None:
        model(paddle.to_tensor(np.random.RandomState(rank).randn(3, 6).astype("float32"))).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()

    results: dict[str, Any] = {}
    for level in LEVELS:
        fresh()
        full, full_optimizer, _ = group_sharded_parallel(*made(False), level)
        step(full, full_optimizer)
        save_group_sharded_model(full, f"{folder}/{level}", full_optimizer)
        part, part_optimizer, _ = group_sharded_parallel(*made(True), level)
        load_group_sharded_model(part, f"{folder}/{level}", part_optimizer)
        before = to_arrays(by_position(full, full_optimizer.state_dict()))
        found = to_arrays(by_position(part, part_optimizer.state_dict()))
        wanted = {name: value for name, value in before.items() if name.startswith("adapter")}
        results[f"{level} states"] = same(wanted, found)
        step(part, part_optimizer)
        save_group_sharded_model(part, f"{folder}/{level}_part", part_optimizer)
        again, again_optimizer = made(False)
        load_group_sharded_model(again, f"{folder}/{level}_part", again_optimizer)
        saved = to_arrays(part.state_dict())
        results[f"{level} back"] = same(to_arrays(again.state_dict()), saved)
        results[f"{level} trained"] = (
            saved["base.weight"].tobytes() == full.state_dict()["base.weight"].numpy().tobytes()
            and saved["adapter.weight"].tobytes() != full.state_dict()["adapter.weight"].numpy().tobytes()
        )
        step(again, again_optimizer)  # the base's states begin afresh
    return results


# -------------------------------------------------------------------------------------------------------------- errors


def _edit(path: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite a file with ``change`` applied; what it returns instead, if anything."""
    content = raw(path)
    changed = change(content)
    with open(path, "wb") as file:
        pickle.dump(content if changed is None else changed, file, protocol=4)


def _cut(path: str, keep: float) -> None:
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: int(len(data) * keep)])


def _flip(path: str, at: float) -> None:
    data = bytearray(Path(path).read_bytes())
    data[int(len(data) * at)] ^= 0x10
    Path(path).write_bytes(bytes(data))


def _drop(content: dict[str, Any], key: str) -> None:
    del content[key]
    content.get("StructuredToParameterName@@", {}).pop(key, None)


def damages() -> dict[str, tuple[Callable[[str], Any], str]]:
    """What is done to a good folder, and what the message has to say."""
    model, opt = "model.pdmodel", "model.pdopt"
    flat = np.zeros([3], "float32")
    return {
        "no folder": (lambda f: shutil.rmtree(f), "does not exist"),
        "no model": (lambda f: os.remove(f"{f}/{model}"), f"{model} does not exist"),
        "no optimizer": (lambda f: os.remove(f"{f}/{opt}"), f"{opt} does not exist; pass optimizer=None"),
        "empty": (lambda f: _cut(f"{f}/{model}", 0), f"{model} cannot be read"),
        "model cut": (lambda f: _cut(f"{f}/{model}", 0.6), f"{model} cannot be read"),
        "optimizer cut": (lambda f: _cut(f"{f}/{opt}", 0.9), f"{opt} cannot be read"),
        "flipped bit": (lambda f: _flip(f"{f}/{model}", 0.5), f"{model} is damaged"),
        "flipped bit in the optimizer": (lambda f: _flip(f"{f}/{opt}", 0.7), f"{opt} is damaged"),
        "text": (lambda f: Path(f"{f}/{model}").write_text("hello world " * 9), f"{model} cannot be read"),
        "another pickle": (lambda f: _edit(f"{f}/{model}", lambda c: [1, 2]), "holds a list, expected the dict"),
        "not tensors": (
            lambda f: _edit(f"{f}/{model}", lambda c: c.update({"scale": "x"})),
            "scale: expected a tensor of shape [], got str",
        ),
        "missing entry": (
            lambda f: _edit(f"{f}/{model}", lambda c: _drop(c, "frozen.bias")),
            "missing: frozen.bias",
        ),
        "unexpected entry": (lambda f: _edit(f"{f}/{model}", lambda c: c.update(other=flat)), "unexpected: other"),
        "wrong shape": (
            lambda f: _edit(f"{f}/{model}", lambda c: c.update({"blocks.0.weight": flat})),
            "blocks.0.weight: expected shape [7, 5], got [3]",
        ),
        "wrong buffer": (
            lambda f: _edit(f"{f}/{model}", lambda c: c.update(counts=np.zeros([3], "float32"))),
            "counts: expected dtype",
        ),
        "missing state": (
            lambda f: _edit(f"{f}/{opt}", lambda c: _drop(c, "linear_1.w_0_moment2_0")),
            "_moment2_0",
        ),
        "all states of one missing": (
            lambda f: _edit(f"{f}/{opt}", lambda c: {k: v for k, v in c.items() if "linear_1.w_0_" not in k}),
            "_moment1_0",
        ),
        "wrong state shape": (
            lambda f: _edit(f"{f}/{opt}", lambda c: c.update({"linear_1.w_0_moment1_0": flat})),
            "expected shape [7, 5], got [3]",
        ),
        "another rule's state": (
            lambda f: _edit(f"{f}/{opt}", lambda c: c.update({"linear_1.w_0_velocity_0": flat})),
            "unexpected: linear_",
        ),
        "no scheduler": (lambda f: _edit(f"{f}/{opt}", lambda c: _drop(c, "LR_Scheduler")), "LR_Scheduler"),
        "a stranger's states": (
            lambda f: _edit(f"{f}/{opt}", lambda c: {"LR_Scheduler": c["LR_Scheduler"], "foo_moment1_0": flat}),
            "no entry belongs to a parameter of this optimizer; there is 'foo_moment1_0'",
        ),
        "another save's": (lambda f: shutil.copy(f"{f}_other/{opt}", f"{f}/{opt}"), "written by another save"),
        "a folder as file": (lambda f: os.makedirs(f"{f}/x.pdparams"), ""),
    }


def errors(folder: str, level: str, only_rank: int = -1, kinds: Any = None) -> dict[str, Any]:
    """Every kind of damage: the message, and whether a bit has changed in memory.

    With ``only_rank`` that rank alone is given the damaged folder.
    """
    rank = dist.get_rank()
    model, optimizer = build()
    if level != "plain":
        model, optimizer, _ = group_sharded_parallel(model, optimizer, level)
    train(model, optimizer, 0, 1, rank)
    good = f"{folder}/{level}/good"
    if rank == 0 or level != "plain":
        if level == "plain":
            fresh()
            sharded, ours, _ = group_sharded_parallel(*build(), "os")
            train(sharded, ours, 0, 2)
            save_group_sharded_model(sharded, good, ours)
            save_group_sharded_model(sharded, f"{good}_other", ours)
        else:
            save_group_sharded_model(model, good, optimizer)
            save_group_sharded_model(model, f"{good}_other", optimizer)
    train(model, optimizer, 1, 3, rank)
    before = (to_arrays(model.state_dict()), to_arrays(optimizer.state_dict()))
    results: dict[str, Any] = {}
    for kind, (damage, words) in damages().items():
        if kinds is not None and kind not in kinds:
            continue
        bad = f"{folder}/{level}/bad"
        if rank == 0:
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(good, bad)
            shutil.rmtree(f"{bad}_other", ignore_errors=True)
            shutil.copytree(f"{good}_other", f"{bad}_other")
            damage(bad)
        if dist.get_world_size() > 1:
            dist.barrier()
        path = f"{bad}/x" if kind == "a folder as file" else bad
        message = ""
        try:
            load_group_sharded_model(model, path if only_rank in (-1, rank) else good, optimizer)
        except GroupShardedError as error:
            message = f"{type(error).__name__}: {error}"
        after = (to_arrays(model.state_dict()), to_arrays(optimizer.state_dict()))
        results[kind] = (message, words, pickle.dumps(after) == pickle.dumps(before))
    load_group_sharded_model(model, good)  # L9: weights only, in spite of all that
    os.environ.pop("X", None)
    train(model, optimizer, 3, 4, rank)
    return results


def different_files(folder: str) -> str:
    """Two good folders, one for each rank."""
    rank = dist.get_rank()
    model, optimizer, _ = group_sharded_parallel(*build(), "p_g_os")
    train(model, optimizer, 0, 1, rank)
    save_group_sharded_model(model, f"{folder}/0", optimizer)
    train(model, optimizer, 1, 2, rank)
    save_group_sharded_model(model, f"{folder}/1", optimizer)
    try:
        load_group_sharded_model(model, f"{folder}/{rank}", optimizer)
    except GroupShardedError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ------------------------------------------------------------------------------------------------- plain state_dict()


def plain_state_dicts(folder: str) -> dict[str, Any]:
    """K1, K2, K3, K10: state_dict() of wrapper, model and layers at each level, on all ranks and on one alone."""
    rank = dist.get_rank()
    fresh()
    reference, _ = build()
    expected = to_arrays(reference.state_dict())
    results: dict[str, Any] = {}
    for level in LEVELS:
        fresh()
        layer, optimizer = build()
        model, optimizer, _ = group_sharded_parallel(layer, optimizer, level)
        views = {
            "wrapper": (model.state_dict(), ""),
            "model": (layer.state_dict(), ""),
            "layer": (layer.blocks.state_dict(), "blocks."),
            "tied": (layer.head.state_dict(), "head."),
            "prefix": (model.state_dict(structured_name_prefix="p."), None),
        }
        for name, (state, prefix) in views.items():
            wanted = {
                (f"p.{key}" if prefix is None else key[len(prefix) :]): value
                for key, value in expected.items()
                if key.startswith(prefix or "")
            }
            found = to_arrays(state)
            results[f"{level} {name}"] = list(found) == list(wanted) and same(wanted, found)
        if rank == 0:  # alone: the other ranks answer from their next call on
            paddle.save(layer.state_dict(), f"{folder}/{level}.pdparams")
            paddle.save(model.state_dict(), f"{folder}/{level}_wrapper.pdparams")
        train(model, optimizer, 0, 2, rank)
        if rank == 0:
            for name in (level, f"{level}_wrapper"):
                content = raw(f"{folder}/{name}.pdparams")
                table = content.pop("StructuredToParameterName@@")
                results[f"{level} {name} file"] = list(table) == list(expected) and all(
                    content[key].tobytes() == value.tobytes() for key, value in expected.items()
                )
        fresh()
        plain, plain_optimizer = build()
        parallel = paddle.DataParallel(plain, find_unused_parameters=True) if dist.get_world_size() > 1 else plain
        train(parallel, plain_optimizer, 0, 2, rank)
        # Loading whole values, as plain Paddle code does it, into the wrapper or the model inside.
        for name, target in (("model", layer), ("wrapper", model)):
            train(model, optimizer, 2, 3, rank)
            target.set_state_dict(plain.state_dict())
            found, wanted = to_arrays(model.state_dict()), to_arrays(plain.state_dict())
            results[f"{level} into {name}"] = same(wanted, found)
        layer.blocks.set_state_dict({key: value + 1 for key, value in plain.blocks.state_dict().items()})
        wanted.update({key: value + 1 for key, value in wanted.items() if key.startswith("blocks.")})
        results[f"{level} into a layer"] = same(wanted, to_arrays(model.state_dict()))
        found = wanted
        model(batch(0, rank))
        results[f"{level} after forward"] = all(
            found[key].tobytes() == value.numpy().tobytes()
            for key, value in model.state_dict().items()
            if not key.startswith("norm.")
        )
        before = to_arrays(model.state_dict())
        with model.gathered():
            copied = copy.deepcopy(layer.blocks)
        copied.set_state_dict({key: value * 0 for key, value in plain.blocks.state_dict().items()})
        zeros = all(not value.any() for value in to_arrays(copied.state_dict()).values())
        results[f"{level} a copy is not managed"] = zeros and same(before, to_arrays(model.state_dict()))
        outcome = ""
        try:
            model.set_state_dict({"blocks.0.weight": paddle.zeros([1] if rank else [7, 5])})
        except GroupShardedError as error:
            outcome = str(error)
        results[f"{level} wrong shape"] = "blocks.0.weight" in outcome or dist.get_world_size() == 1
    return results

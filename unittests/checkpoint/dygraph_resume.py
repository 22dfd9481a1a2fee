"""Inside a trainer: training that is stopped and goes on; loads that take a part only."""

from __future__ import annotations

import logging
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_group_sharded import CheckpointError, group_sharded_parallel, load_checkpoint, save_checkpoint
from unittests.checkpoint.whole import differing, whole_state
from unittests.harness import fresh
from unittests.sharding import plain_paddle
from unittests.sharding.dygraph_scaler import enabled_scaler, scaled

LEVELS = ("os", "os_g", "p_g_os")


class Noisy(nn.Layer):
    """Draws random numbers in its forward, and has statistics that every rank computes from its own data."""

    def __init__(self) -> None:
        super().__init__()
        self.rich = plain_paddle.Rich()
        self.dropout = nn.Dropout(0.3)

    def forward(self, ids: Any) -> Any:
        return self.dropout(self.rich(ids)) * (1 + 0.1 * random.random() + 0.1 * np.random.rand())


def make(level: str) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, a scheduler that the optimizer does not know, and a scaler."""
    paddle.seed(7)
    model = Noisy()
    rate = paddle.optimizer.lr.CosineAnnealingDecay(0.05, T_max=9)
    optimizer = paddle.optimizer.AdamW(rate, parameters=model.parameters())
    other = paddle.optimizer.lr.ReduceOnPlateau(1.0, patience=1)
    scaler = enabled_scaler(init_loss_scaling=64.0, incr_every_n_steps=2)
    if level != "plain":
        model, optimizer, scaler = group_sharded_parallel(model, optimizer, level, scaler=scaler)
    return model, optimizer, other, scaler


def steps(parts: tuple[Any, Any, Any, Any], start: int, stop: int) -> list[float]:
    model, optimizer, other, scaler = parts
    losses = []
    for step in range(start, stop):
        loss = model(plain_paddle.batch(step, dist.get_rank())).square().mean()
        scaled(scaler, loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        optimizer._learning_rate.step()
        other.step(loss.item())
        losses.append(float(loss.item()))
    return losses


def everything(parts: tuple[Any, Any, Any, Any]) -> dict[str, Any]:
    model, optimizer, other, scaler = parts
    return {**whole_state(model, optimizer), "other": other.state_dict(), "scale": float(scaler._scale.item())}


def unbroken(folder: str) -> dict[str, Any]:
    """By level: what differs between a run that was stopped after step 3 and one that was not; to the bit."""
    rank = dist.get_rank()
    results: dict[str, Any] = {}
    for level in LEVELS if dist.get_world_size() > 1 else ("plain", *LEVELS):
        fresh(rank)
        parts = make(level)
        paddle.seed(11 + rank)
        steps(parts, 0, 3)
        model, optimizer, other, scaler = parts
        save_checkpoint(f"{folder}/{level}", model, optimizer, scaler, other, {"position": 3})
        losses = steps(parts, 3, 6)
        expected = everything(parts)
        fresh(90 + rank)
        parts = make(level)
        model, optimizer, other, scaler = parts
        steps(parts, 20, 21)
        assert load_checkpoint(f"{folder}/{level}", model, optimizer, scaler, other) == {"position": 3}
        again = steps(parts, 3, 6)
        results[level] = (differing(expected, everything(parts)), losses == again)
    return results


def is_paddle_3() -> bool:
    """Paddle 2.6 does not tell the state of what draws random numbers on the CPU, and has no empty parameters."""
    return not paddle.version.full_version.startswith("2.")


# -------------------------------------------------------------------------------------------------------------- partial


class Adapted(nn.Layer):
    """A frozen base with a small adapter."""

    def __init__(self, adapter: bool = True, width: int = 5) -> None:
        super().__init__()
        self.base = nn.Linear(6, width)
        if adapter:
            self.down = nn.Linear(6, 2)
            self.up = nn.Linear(2, width)
            for param in self.base.parameters():
                param.stop_gradient = True

    def forward(self, x: Any) -> Any:
        return self.base(x) + (self.up(self.down(x)) if hasattr(self, "up") else 0.0)


def adapted(level: str, kind: Any = paddle.optimizer.AdamW, frozen: bool = False, **options: Any) -> tuple[Any, Any]:
    """``frozen``: the optimizer knows the base as well."""
    model = Adapted(**options)
    params = [param for param in model.parameters() if frozen or not param.stop_gradient]
    optimizer = kind(0.1, parameters=params)
    if level != "plain":
        model, optimizer, _ = group_sharded_parallel(model, optimizer, level)
    return model, optimizer


def walk(model: Any, optimizer: Any, seed: int = 0) -> None:
    x = paddle.to_tensor(np.random.RandomState(seed).randn(4, 6).astype("float32"))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.clear_grad()


def message(*args: Any, **kwargs: Any) -> str:
    """What a load says that fails, and that nothing has changed."""
    model, optimizer = args[1], args[2] if len(args) > 2 else None
    before = whole_state(model, optimizer) if optimizer is not None else {}
    try:
        load_checkpoint(*args, **kwargs)
    except CheckpointError as error:
        changed = differing(before, whole_state(model, optimizer)) if optimizer is not None else []
        return f"{error} CHANGED {changed}" if changed else str(error)
    return "loaded"


def partial(folder: str, level: str) -> dict[str, Any]:
    """C8, L9, R23: less, more and other than what was saved."""
    results: dict[str, Any] = {}
    base, base_optimizer = adapted(level, adapter=False)
    walk(base, base_optimizer)
    path = f"{folder}/base"
    save_checkpoint(path, base, base_optimizer)
    expected = whole_state(base, base_optimizer)
    save_checkpoint(f"{folder}/weights", base)

    model, optimizer = adapted(level)  # new parameters
    results["strict"] = message(path, model, optimizer)
    extra, report = load_checkpoint(path, model, optimizer, strict=False)
    results["report"] = (extra, report.missing, report.unexpected, report.mismatched)
    found = whole_state(model, optimizer)
    results["base taken"] = [name for name in differing(expected, found) if name.startswith("model base")]
    walk(model, optimizer)
    save_checkpoint(f"{folder}/adapted", model, optimizer)
    state = whole_state(model, optimizer)
    model, optimizer = adapted(level, frozen=True)  # an optimizer that was given the frozen base too
    load_checkpoint(f"{folder}/adapted", model, optimizer)
    results["adapter"] = differing(state, whole_state(model, optimizer))

    model, optimizer = adapted(level, adapter=False)  # full states, of which the adapter's optimizer wants none
    results["other way"] = message(f"{folder}/adapted", model, optimizer)
    extra, report = load_checkpoint(f"{folder}/adapted", model, optimizer, strict=False)
    results["other way report"] = (report.missing, sorted(report.unexpected))

    model, optimizer = adapted(level, adapter=False)
    load_checkpoint(path, model)  # weights only
    results["weights only"] = [name for name in differing(expected, whole_state(model, optimizer)) if "model" in name]
    results["no states"] = message(f"{folder}/weights", model, optimizer)
    walk(model, optimizer)
    results["another rule"] = message(path, *adapted(level, paddle.optimizer.Momentum, adapter=False))
    results["another shape"] = message(path, *adapted(level, adapter=False, width=7))
    model, optimizer = adapted(level, adapter=False, width=7)
    before = whole_state(model, optimizer)
    _, report = load_checkpoint(path, model, optimizer, strict=False)
    results["another shape left"] = (len(report.mismatched), differing(before, whole_state(model, optimizer)))
    return results


def tied(folder: str, level: str) -> dict[str, Any]:
    """A1, A8: every name is in the checkpoint, its bytes are there once; from tied to untied and back."""
    model, optimizer = plain_paddle.build()
    if level != "plain":
        model, optimizer, _ = group_sharded_parallel(model, optimizer, level)
    plain_paddle.train(model, optimizer, 0, 2)
    save_checkpoint(f"{folder}/tied", model, optimizer)
    weight = model.state_dict()["embedding.weight"].numpy()
    fresh()
    untied = plain_paddle.Rich()
    untied.head.weight = untied.create_parameter([11, 7])
    load_checkpoint(f"{folder}/tied", untied)
    both = [untied.embedding.weight.numpy(), untied.head.weight.numpy()]
    save_checkpoint(f"{folder}/untied", untied)
    load_checkpoint(f"{folder}/untied", model)
    named = Path(folder, "tied", "manifest.json").read_text().count('"head.weight"')
    return {"equal": [bool((value == weight).all()) for value in both], "named": named}


def save_step_10(folder: str) -> None:
    """Leaves a checkpoint of 2 ranks for :func:`random_states_elsewhere`."""
    model, optimizer = plain_paddle.build()
    paddle.seed(3 + dist.get_rank())
    save_checkpoint(folder, model, optimizer)


def random_states_elsewhere(folder: str) -> list[bool]:
    """L11: on another number of ranks, and for weights only, this rank's random state stays."""
    model, optimizer = plain_paddle.build()
    unchanged = []
    for wanted in (optimizer, None):
        state = paddle.get_rng_state()
        expected = paddle.rand([4]).numpy()
        paddle.set_rng_state(state)
        load_checkpoint(folder, model, wanted)
        unchanged.append(paddle.rand([4]).numpy().tobytes() == expected.tobytes())
    return unchanged


# ------------------------------------------------------------------------------------------------------------------ odd


class Odd(nn.Layer):
    """No elements, no dimensions, a state that is not persistable, a buffer whose elements lie in another order."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.empty = self.create_parameter([0 if is_paddle_3() else 1, 4])  # 2.6 refuses it
        self.scale = self.create_parameter([])
        self.lstm = nn.LSTM(2, 2)
        self.register_buffer("turned", paddle.rand([2, 3]).t() if transposed else paddle.rand([3, 2]))

    def forward(self, x: Any) -> Any:
        return self.lstm(self.linear(x) + self.empty.sum() + self.turned.sum())[0] * self.scale


def odd(folder: str) -> list[str]:
    """From and to every level; the names that differ."""
    wrong = []

    def make_odd(level: str) -> tuple[Any, Any]:
        model = Odd(level == "plain")
        optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
        if level != "plain":
            model, optimizer, _ = group_sharded_parallel(model, optimizer, level)
        for _ in range(2):
            model(paddle.rand([2, 3, 3])).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
        return model, optimizer

    levels = ("plain", "p_g_os") if dist.get_world_size() == 1 else LEVELS
    for source in levels:
        model, optimizer = make_odd(source)
        save_checkpoint(folder, model, optimizer)
        state = whole_state(model, optimizer)
        for target in levels:
            model, optimizer = make_odd(target)
            load_checkpoint(folder, model, optimizer)
            wrong += [f"{source} -> {target}: {name}" for name in differing(state, whole_state(model, optimizer))]
    return wrong


def other_scheduler(folder: str) -> tuple[str, bool]:
    """The state of one scheduler into another: what is said, and whether the weights are as they were."""
    model = nn.Linear(2, 2)
    step_decay = paddle.optimizer.SGD(paddle.optimizer.lr.StepDecay(0.1, 3), parameters=model.parameters())
    save_checkpoint(folder, model, step_decay)
    model.weight.set_value(paddle.zeros([2, 2]))
    plateau = paddle.optimizer.SGD(paddle.optimizer.lr.ReduceOnPlateau(0.1), parameters=model.parameters())
    said = message(folder, model, plateau)
    return said, not model.weight.numpy().any()


def independent(folder: str) -> tuple[list[str], list[str]]:
    """Plain models that have nothing to do with each other: back on as many ranks, and what was said."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("paddle_group_sharded.checkpoint.save")
    logger.addHandler(handler)
    try:
        model, optimizer = plain_paddle.build()
        plain_paddle.train(model, optimizer, 0, 2, dist.get_rank())
        save_checkpoint(folder, model, optimizer)
    finally:
        logger.removeHandler(handler)
    expected = whole_state(model, optimizer)
    if dist.get_rank() == 0:
        Path(folder, "first.pickle").write_bytes(pickle.dumps(expected))
    fresh()
    model, optimizer = plain_paddle.build()
    load_checkpoint(folder, model, optimizer)
    return differing(expected, whole_state(model, optimizer)), records


def first_of_them(folder: str) -> list[str]:
    """On another number of ranks: all of it is that of the first rank."""
    model, optimizer = plain_paddle.build()
    load_checkpoint(folder, model, optimizer)
    expected = pickle.loads(Path(folder, "first.pickle").read_bytes())
    return differing(expected, whole_state(model, optimizer))

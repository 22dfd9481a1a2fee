"""``plan()`` in one process: rows, the table, what it refuses, and that it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from paddle_group_sharded import UsageError, plan
from paddle_group_sharded.paddle_compat import accumulators, allocated_bytes, layer_params

WIDTH = 320  # a layer is a group of its own
BLOCK = WIDTH * (WIDTH + 1)
LEVELS = ["none", "os", "os_g", "p_g_os"]


def blocks(count: int = 4) -> nn.Layer:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def adamw(model: Any) -> Any:
    return paddle.optimizer.AdamW(0.01, parameters=model.parameters())


class Tied(nn.Layer):
    """An embedding whose weight is also the head's, around dropout and a norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 256)
        self.body = nn.LayerList([nn.Linear(256, 256) for _ in range(3)])
        self.norm = nn.BatchNorm1D(256)
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for layer in self.body:
            x = F.relu(layer(x))
        return paddle.matmul(self.dropout(self.norm(x)), self.embedding.weight, transpose_y=True)


TOKENS = list(range(40))


def loss_of(model: Any) -> Callable[[], Any]:
    tokens = paddle.to_tensor(TOKENS)
    return lambda: F.cross_entropy(model(tokens), tokens)


def test_rows_of_every_level_and_number_of_ranks() -> None:
    model = blocks()
    found = plan(model, adamw(model), world_size=[2, 8])
    assert [(row.world_size, row.level) for row in found.rows] == [(n, level) for n in (2, 8) for level in LEVELS]
    assert found.parameters == 4 * BLOCK
    for n in (2, 8):
        states = {"none": 16, "os": 8 + 8 / n, "os_g": 4 + 12 / n, "p_g_os": 16 / n}
        for level, size in states.items():
            row = found.row(level, n)
            assert row.formula == pytest.approx(4 * BLOCK * size)
            assert row.sum == row.parameters + row.gradients + row.states
            assert row.sum == pytest.approx(row.formula, rel=0.01)
            assert row.peak >= row.sum
    assert found.row("p_g_os", 2).collectives == 3 * 4 - 2 + 1
    assert plan(model, adamw(model)).rows[0].world_size == 1


@pytest.mark.parametrize(
    ("name", "per_parameter"),
    [("SGD", 0), ("Momentum", 4), ("Adagrad", 4), ("Adam", 8), ("RMSProp", 12)],
)
def test_states_of_other_optimizers(name: str, per_parameter: int) -> None:
    model = blocks()
    optimizer = getattr(paddle.optimizer, name)(0.01, parameters=model.parameters())
    row = plan(model, optimizer, "os", 2).rows[0]
    assert row.states == pytest.approx(4 * BLOCK * per_parameter / 2, rel=0.01)


def test_amsgrad_has_three() -> None:
    model = blocks()
    options = {"amsgrad": True} if "amsgrad" in paddle.optimizer.AdamW.__init__.__code__.co_varnames else {}
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters(), **options)
    row = plan(model, optimizer, "p_g_os", 4).rows[0]
    assert row.states == pytest.approx(4 * BLOCK * (12 if options else 8) / 4, rel=0.01)


def test_without_an_optimizer_states_are_nothing() -> None:
    row = plan(blocks(), None, "os_g", 2).rows[0]
    assert (row.states, row.parameters) == (0, pytest.approx(4 * 4 * BLOCK, rel=0.01))


def test_sixteen_bits_have_float32_masters() -> None:
    model = blocks()
    model.to(dtype="bfloat16")
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters(), multi_precision=True)
    found = plan(model, optimizer, world_size=2)
    sizes = {"none": 16, "os": 4 + 12 / 2, "os_g": 2 + 14 / 2, "p_g_os": 16 / 2}
    for level, size in sizes.items():
        assert found.row(level, 2).sum == pytest.approx(4 * BLOCK * size, rel=0.01)


def test_a_model_without_memory() -> None:
    before = allocated_bytes()
    with paddle.LazyGuard():
        model = blocks(20)
    found = plan(model, adamw(model), "p_g_os", [8, 64])
    assert found.rows[0].sum == pytest.approx(16 * 20 * BLOCK / 8, rel=0.01)
    assert allocated_bytes() - before < 4 * BLOCK  # less than one layer
    with pytest.raises(UsageError, match="'0.weight' is not initialised"):
        plan(model, sample=lambda: model(paddle.ones([1, WIDTH])).mean())


def test_segment_size_and_exclude_layer_keep_parameters_whole() -> None:
    model = blocks()
    whole = 4 * 4 * BLOCK
    assert plan(model, None, "p_g_os", 2).rows[0].parameters == pytest.approx(whole / 2, rel=0.01)
    for options in ({"segment_size": BLOCK}, {"exclude_layer": ["Linear"]}):
        row = plan(model, None, "p_g_os", 2, **options).rows[0]  # type: ignore[arg-type]
        assert row.parameters == pytest.approx(whole, rel=0.01)
    few = plan(model, None, "os", 2, buffer_max_size=BLOCK).rows[0]
    assert (few.collectives, plan(model, None, "os", 2).rows[0].collectives) == (2 * 4 + 1, 2 + 1)


def test_given_activations_grow_and_shrink_with_the_layers() -> None:
    model = blocks()
    for level in LEVELS[1:]:
        without, given = (plan(model, adamw(model), level, 2, activations=size).rows[0] for size in (0, 10**8))
        assert given.activations == 10**8
        assert 10**8 - 4 * 4 * BLOCK <= given.peak - without.peak <= 10**8


def test_a_sample_shows_what_is_gathered_again() -> None:
    """The head reads the embedding after three other groups, so it is gathered a second time in forward."""
    model = Tied()
    optimizer = adamw(model)
    assumed, seen = (plan(model, optimizer, "p_g_os", 2, sample=s).rows[0] for s in (None, loss_of(model)))
    assert (assumed.activations, seen.activations > 40 * 300 * 4) == (0, True)
    assert seen.collectives == assumed.collectives + 1
    assert seen.peak > assumed.peak


def hooks(model: nn.Layer) -> list[tuple[int, int, bool]]:
    layers = model.sublayers(include_self=True)
    return [
        (len(layer._forward_pre_hooks), len(layer._forward_post_hooks), "forward" in vars(layer)) for layer in layers
    ]


def test_a_sample_leaves_no_trace() -> None:
    model = Tied()
    optimizer = adamw(model)
    sample = loss_of(model)

    def values() -> list[Any]:
        return [value.numpy() for _, value in sorted(model.state_dict().items())]

    paddle.seed(3)
    before, random = values(), paddle.rand([4]).numpy()
    installed = hooks(model)
    live = allocated_bytes()
    paddle.seed(3)
    plan(model, optimizer, sample=sample)
    assert (paddle.rand([4]).numpy() == random).all()
    assert all((one == other).all() for one, other in zip(before, values()))
    assert all(param.grad is None for param in model.parameters())
    assert hooks(model) == installed
    assert {type(layer_params(layer)).__name__ for layer in model.sublayers()} <= {"OrderedDict", "dict"}
    assert not any(accumulators(optimizer).values())
    assert allocated_bytes() - live < 1000
    sample().backward()  # and it trains on
    optimizer.step()
    assert not np.array_equal(before[0], values()[0])


def test_a_sample_that_fails_leaves_no_trace_either() -> None:
    model = Tied()

    def sample() -> Any:
        loss_of(model)()
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        plan(model, sample=sample)
    assert set(hooks(model)) == {(0, 0, False)}


def test_the_table() -> None:
    model = blocks()
    lines = str(plan(model, adamw(model), world_size=[2, 4])).splitlines()
    assert lines[0] == "410.9 k parameters, AdamW, 2 ranks: bytes of a rank, and elements that it sends in a step"
    assert [line.split()[0] for line in lines[1:6]] == ["level", "DataParallel", "os", "os_g", "p_g_os"]
    assert len({len(line) for line in lines[1:6]}) == 1  # aligned
    assert lines[4].split()[1:5] == ["1.644", "MB", "821.8", "kB"]
    assert lines[7].startswith("410.9 k parameters, AdamW, 4 ranks")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "zero3"}, "level must be one of 'os', 'os_g', 'p_g_os', got 'zero3'"),
        ({"world_size": 0}, "world_size must be a number of ranks, at least 1, got 0"),
        ({"world_size": [2, True]}, "world_size must be a number of ranks, at least 1, got True"),
        ({"dp_size": 0}, "dp_size must be a number of ranks"),
        ({"activations": -1}, "activations must be a number of bytes, at least 0, got -1"),
        ({"activations": 1, "sample": lambda: None}, "expected activations or sample, got both"),
        ({"sample": lambda: None}, "sample must return a loss: a tensor of one element with a gradient, got None"),
        ({"segment_size": -1}, "segment_size must be a number of elements, at least 0, got -1"),
        ({"model": 3}, "model must be a paddle.nn.Layer, got int"),
        ({"optimizer": 3}, "optimizer must be a paddle.optimizer.Optimizer, got int"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    arguments = {"model": blocks(1), **options}
    with pytest.raises(UsageError) as found:
        plan(**arguments)
    assert str(found.value).startswith(message)


def test_a_gradient_in_the_way_of_a_sample() -> None:
    model = blocks(1)
    model(paddle.ones([1, WIDTH])).mean().backward()
    with pytest.raises(UsageError, match=r"'0.weight' has a gradient, .* call optimizer.clear_grad\(\)"):
        plan(model, sample=lambda: model(paddle.ones([1, WIDTH])).mean())

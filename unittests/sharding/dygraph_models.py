"""Models with parameters of every kind: odd sizes, ties, dtypes, frozen ones, buffers."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from paddle_group_sharded import group_sharded_parallel
from unittests.harness import fresh
from unittests.sharding import parity as base
from unittests.sharding.parity import AVERAGED, LEVELS, Difference, Run, average_grads, compare, train

Tensor = Any


class Case(base.Case):
    """AdamW where sums are exact; elsewhere it would turn the last bit of a gradient near zero into a whole update."""

    def optimizer(self, layer: nn.Layer) -> Any:
        if paddle.distributed.get_world_size() <= 2:
            return super().optimizer(layer)
        return paddle.optimizer.Momentum(0.01, parameters=layer.parameters())


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Layer] = []
    for below, above in zip(widths, widths[1:]):
        layers += [nn.Linear(below, above), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Owner(nn.Layer):
    """A layer with parameters of the given shapes, all of which its output depends on."""

    def __init__(self, *shapes: list[int]) -> None:
        super().__init__()
        self.names = [f"p{index}" for index in range(len(shapes))]
        for name, shape in zip(self.names, shapes):
            self.add_parameter(name, self.create_parameter(shape, default_initializer=nn.initializer.Constant(0.5)))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            param = getattr(self, name)
            x = x * (1 + param.sum() * 0.1) + (param * param).sum()
        return x


# ------------------------------------------------------------------------------------------------------------ sizes


class OddSizes(Case):
    """No size is divisible by 2, 3 or 4 (B6, B9)."""

    def build(self) -> nn.Layer:
        return mlp(8, 7, 5, 11, 1)


class Tiny(Case):
    """Fewer elements than ranks, in a group of its own kind (B1, FS#409)."""

    def build(self) -> nn.Layer:
        return nn.Sequential(Owner([1], [3], [2, 1]), nn.Linear(8, 1))


class FewParameters(Case):
    """One parameter, on up to four ranks (B2)."""

    def build(self) -> nn.Layer:
        return nn.Linear(8, 3, bias_attr=False)


class OneElement(Case):
    """All there is are three elements: on four ranks one owns nothing at all (B1)."""

    def build(self) -> nn.Layer:
        return Owner([3])


class NoDimensions(Case):
    """Scalars of shape [] beside matrices, first and last in their group (B4)."""

    reference = AVERAGED

    def build(self) -> nn.Layer:
        return nn.Sequential(Owner([]), nn.Linear(8, 3), Owner([], [2], []))


class NoElements(Case):
    """Parameters without elements: between others, and as a group of their own."""

    reference = AVERAGED

    def build(self) -> nn.Layer:
        model = nn.Sequential(Owner([0], [2, 0]), nn.Linear(8, 3), Owner([0, 4]))
        last = Owner([0])
        last.p0.stop_gradient = True
        model.add_sublayer("last", last)
        return model


class LargeBlocks(Case):
    """Blocks that are groups of their own, so that several are gathered and released in one pass."""

    def build(self) -> nn.Layer:
        return nn.Sequential(nn.Linear(8, 257), *[nn.Linear(257, 257) for _ in range(3)], nn.Linear(257, 3), nn.Tanh())


# ------------------------------------------------------------------------------------------------------------- ties


class TiedLM(nn.Layer):
    """An output head that is the embedding's weight, under a second name, and not the first parameter (A1, A2, A5)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.0))
        self.embedding = nn.Embedding(13, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width))
        self.head = nn.Layer()
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.body(self.embedding(ids) * self.scale)
        return paddle.matmul(hidden, self.head.weight, transpose_y=True)


class Tied(Case):
    """Tied embedding and head in one group."""

    width = 8

    def build(self) -> nn.Layer:
        return TiedLM(self.width)

    def batch(self, rank: int, step: int) -> Any:
        return paddle.to_tensor(np.random.RandomState(100 * step + rank).randint(0, 13, [4, 5]))

    def loss(self, run: Run, batch: Any) -> Tensor:
        return F.cross_entropy(run.model(batch).reshape([-1, 13]), batch.reshape([-1]))


class TiedLarge(Tied):
    """The head's layer and the embedding's are in different groups (A4, A6)."""

    width = 260


class TiedByLayer(Case):
    """One layer object under two names."""

    def build(self) -> nn.Layer:
        shared = nn.Linear(8, 8)
        return nn.Sequential(nn.Linear(8, 8), shared, nn.Tanh(), shared, nn.Linear(8, 2))


class AcrossUnits(Case):
    """Two large layers, which are different groups, share one bias (A4)."""

    def build(self) -> nn.Layer:
        model = nn.Sequential(nn.Linear(8, 260), nn.Linear(260, 260), nn.Linear(260, 260))
        model[2].bias = model[0].bias
        return model


# ----------------------------------------------------------------------------------------------------- frozen parts


class FrozenTrunk(Case):
    """A frozen trunk, large enough for groups of its own (C1, C3)."""

    def build(self) -> nn.Layer:
        model = nn.Sequential(nn.Linear(8, 260), nn.Linear(260, 260), nn.Tanh(), nn.Linear(260, 3))
        for layer in (model[0], model[1]):
            for param in layer.parameters():
                param.stop_gradient = True
        return model


class FrozenMiddle(Case):
    """Frozen layers that gradients have to pass through, and a frozen bias beside a trainable weight."""

    def build(self) -> nn.Layer:
        model = nn.Sequential(nn.Linear(8, 260), nn.Linear(260, 260), nn.Tanh(), nn.Linear(260, 260), nn.Linear(260, 3))
        for param in (*model[1].parameters(), *model[3].parameters(), model[4].bias):
            param.stop_gradient = True
        return model


class FrozenEmbedding(Tied):
    """The tied weight itself is frozen (A13)."""

    def build(self) -> nn.Layer:
        model = TiedLM()
        model.embedding.weight.stop_gradient = True
        return model


class PartOptimized(Case):
    """The optimizer knows the head only; the trunk is trainable, but nobody's."""

    reference = AVERAGED  # DataParallel reduces the trunk too, to no effect

    def build(self) -> nn.Layer:
        return mlp(8, 260, 260, 3)

    def optimizer(self, layer: nn.Layer) -> Any:
        return paddle.optimizer.AdamW(0.01, parameters=layer[4].parameters())


class Unfreezing(Case):
    """Layers are frozen and unfrozen between steps, one that began frozen and one that did not (R14)."""

    reference = AVERAGED

    def build(self) -> nn.Layer:
        model = nn.Sequential(nn.Linear(8, 260), nn.Linear(260, 260), nn.Tanh(), nn.Linear(260, 260), nn.Linear(260, 3))
        for param in model[0].parameters():
            param.stop_gradient = True
        return model

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        for index, frozen in {2: (0, False), 4: (1, True), 6: (3, True), 7: (1, False), 8: (0, True)}.items():
            if run.step == index:
                for param in run.layer[frozen[0]].parameters():
                    param.stop_gradient = frozen[1]
        return super().train_step(run, batch)


class EmptyGroup(Case):
    """Two groups of the optimizer, one of which becomes empty by freezing, under a scheduler (C5)."""

    reference = AVERAGED

    def build(self) -> nn.Layer:
        return mlp(8, 6, 6, 3)

    def optimizer(self, layer: nn.Layer) -> Any:
        rate = paddle.optimizer.lr.ExponentialDecay(0.01, 0.9)
        groups = [
            {"params": [p for p in layer.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in layer.parameters() if p.ndim == 1], "weight_decay": 0.0, "learning_rate": 0.1},
        ]
        return paddle.optimizer.AdamW(rate, parameters=groups)

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        if run.step in (3, 7):
            for param in run.layer.parameters():
                if param.ndim == 1:
                    param.stop_gradient = run.step == 3
        loss = super().train_step(run, batch)
        run.optimizer._learning_rate.step()
        if len(run.optimizer._param_groups) != 2:
            raise AssertionError("a group of the optimizer has been dropped")
        return loss


def nothing_trainable(level: str) -> dict[str, Any]:
    """Everything is frozen: a step changes nothing and does not hang (A2, C6)."""
    model = mlp(8, 6, 3)
    for param in model.parameters():
        param.stop_gradient = True
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    before = {name: value.numpy() for name, value in model.state_dict().items()}
    model, optimizer, _ = group_sharded_parallel(model, optimizer, level)
    for _ in range(3):
        model(paddle.ones([2, 8]))
        optimizer.step()
        optimizer.clear_grad()
    after = {name: value.numpy() for name, value in model.state_dict().items()}
    return {"before": before, "after": after}


# --------------------------------------------------------------------------------------------------- kinds of layers


class BatchNorm(Case):
    """Running statistics are each rank's own, as with DataParallel, and stand in the state (J1)."""

    def build(self) -> nn.Layer:
        model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1D(6), nn.ReLU(), nn.Linear(6, 2))
        model.register_buffer("table", paddle.arange(5, dtype="int64"))
        model.register_buffer("flags", paddle.to_tensor([True, False]))
        model.register_buffer("scratch", paddle.ones([3]), persistable=False)
        return model


class Float64Beside(Case):
    """float32 and float64 parameters in one layer."""

    class Layer(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.weight = self.create_parameter([8, 8], dtype="float32")
            self.precise = self.create_parameter([8, 3], dtype="float64")
            self.bias = self.create_parameter([3], dtype="float32", is_bias=True)

        def forward(self, x: Tensor) -> Tensor:
            hidden = paddle.tanh(paddle.matmul(self.first(x), self.weight))
            return paddle.matmul(hidden.astype("float64"), self.precise).astype("float32") + self.bias

    def build(self) -> nn.Layer:
        return self.Layer()

    def optimizer(self, layer: nn.Layer) -> Any:
        """Paddle's AdamW cannot step both dtypes."""
        return paddle.optimizer.SGD(0.1, parameters=layer.parameters())


class Recurrent(Case):
    """LSTM and GRU, two layers each, in both directions."""

    def build(self) -> nn.Layer:
        class Model(nn.Layer):
            def __init__(self) -> None:
                super().__init__()
                self.lstm = nn.LSTM(8, 5, num_layers=2, direction="bidirect")
                self.gru = nn.GRU(10, 4, num_layers=2)
                self.cell = nn.LSTMCell(4, 3)
                self.head = nn.Linear(3, 2)

            def forward(self, x: Tensor) -> Tensor:
                x, _ = self.lstm(x)
                x, last = self.gru(x)
                x, _ = self.cell(x[:, -1] + last[-1])
                return self.head(x)

        return Model()

    def batch(self, rank: int, step: int) -> Any:
        return paddle.to_tensor(np.random.RandomState(1000 * step + rank).randn(3, 4, 8).astype("float32"))


class Normed(Case):
    """weight_norm and spectral_norm compute a layer's weight in hooks of their own, before ours."""

    def build(self) -> nn.Layer:
        return nn.Sequential(
            nn.utils.weight_norm(nn.Linear(8, 260)),
            nn.Tanh(),
            nn.utils.spectral_norm(nn.Linear(260, 260)),
            nn.Tanh(),
            nn.utils.weight_norm(nn.Linear(260, 3), dim=None),
        )


class Convolutional(Case):
    """Convolutions and normalisation over channels, 4-D weights."""

    def build(self) -> nn.Layer:
        return nn.Sequential(
            nn.Conv2D(1, 3, 3),
            nn.GroupNorm(3, 3),
            nn.PReLU(3),
            nn.Conv2DTranspose(3, 2, 2),
            nn.Flatten(),
            nn.Linear(50, 2),
        )

    def batch(self, rank: int, step: int) -> Any:
        return paddle.to_tensor(np.random.RandomState(1000 * step + rank).randn(2, 1, 6, 6).astype("float32"))


class Transformer(Case):
    """Paddle's own encoder with attention and dropout; the ranks draw the same masks."""

    def build(self) -> nn.Layer:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1)
        return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(8, 2))

    def batch(self, rank: int, step: int) -> Any:
        return paddle.to_tensor(np.random.RandomState(1000 * step + rank).randn(2, 4, 8).astype("float32"))


CASES = {
    case.__name__: case
    for case in (
        OddSizes, Tiny, FewParameters, OneElement, NoDimensions, NoElements, LargeBlocks, Tied, TiedLarge, TiedByLayer,
        AcrossUnits, FrozenTrunk, FrozenMiddle, FrozenEmbedding, PartOptimized, Unfreezing, EmptyGroup, BatchNorm,
        Float64Beside, Recurrent, Normed, Convolutional, Transformer,
    )
}  # fmt: skip


def parity(case: str, steps: int = 10, levels: tuple[str, ...] = LEVELS) -> dict[str, Difference]:
    return compare(CASES[case](), levels, steps)


# ------------------------------------------------------------------------------------------------------ low precision


def bfloat16_parameter(value: Tensor) -> Tensor:
    param = paddle.create_parameter(value.shape, "bfloat16", default_initializer=nn.initializer.Constant(0.0))
    param.set_value(value)
    return param


class MixedPrecision(nn.Layer):
    """bfloat16 and float32 parameters in one layer, computing in float32 (B8)."""

    def __init__(self, rounded: bool) -> None:
        super().__init__()
        self.rounded = rounded
        self.first = nn.Linear(8, 32)
        self.scale = self.create_parameter([32], default_initializer=nn.initializer.Constant(1.0))
        self.weight = self.create_parameter([32, 4])
        self.shift = self.create_parameter([4], is_bias=True)
        if not rounded:
            bits = self.weight.astype("bfloat16").detach()
            self.weight = bfloat16_parameter(bits)

    def forward(self, x: Tensor) -> Tensor:
        hidden = paddle.tanh(self.first(x) * self.scale)
        weight = self.weight.astype("bfloat16") if self.rounded else self.weight
        return paddle.matmul(hidden, weight.astype("float32")) + self.shift


def mixed_precision(level: Optional[str], steps: int) -> dict[str, Any]:
    """Losses and weights; ``level`` None: float32 weights, rounded to bfloat16 wherever they are used."""
    fresh()
    model: Any = MixedPrecision(rounded=level is None)
    layer = model
    if level is None:
        layer.weight.set_value(layer.weight.astype("bfloat16").astype("float32"))
    optimizer: Any = paddle.optimizer.Momentum(0.05, parameters=layer.parameters())
    if level is not None:
        model, optimizer, _ = group_sharded_parallel(layer, optimizer, level)
    losses = []
    for step in range(steps):
        loss = model(Case().batch(paddle.distributed.get_rank(), step)).square().mean()
        loss.backward()
        if level is None:
            average_grads(layer)
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss.item()))
    master = layer.weight if level is None else optimizer.views.state("weight", "master_weight")
    state = {name: value.astype("float32") for name, value in model.state_dict().items()}
    dtypes = {name: str(value.dtype) for name, value in model.state_dict().items()}
    return {"losses": losses, "state": state, "master": master, "dtypes": dtypes}


def masters_survive_reading(level: str, steps: int) -> dict[str, Any]:
    """SGD whose updates are smaller than bfloat16's digits, on a weight that is read outside of any forward."""
    layer = nn.Layer()
    layer.weight = bfloat16_parameter(paddle.ones([4, 4]).astype("bfloat16"))
    optimizer = paddle.optimizer.SGD(2.0**-12, parameters=layer.parameters())
    model, optimizer, _ = group_sharded_parallel(layer, optimizer, level)
    for _ in range(steps):
        layer.weight.astype("float32").sum().backward()
        optimizer.step()
        optimizer.clear_grad()
    return {
        "master": optimizer.views.state("weight", "master_weight"),
        "weight": model.state_dict()["weight"].astype("float32"),
    }


def twice(case: str, level: str, steps: int = 10) -> bool:
    """Whether two trainings end with the same bits (L12)."""
    first, second = (train(CASES[case](), level, steps) for _ in range(2))
    return first[0] == second[0] and all(np.array_equal(first[1][name], second[1][name]) for name in first[1])


def creates_empty_parameters() -> bool:
    """Whether this Paddle has parameters without elements at all."""
    try:
        Owner([0])
    except AssertionError:
        return False
    return True

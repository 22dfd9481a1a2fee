"""How layers are called and what they return: parameters used elsewhere, calls besides forward, outputs of any kind."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from types import MethodType
from typing import Any, Optional

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from unittests.sharding.dygraph_models import Case
from unittests.sharding.parity import AVERAGED, LEVELS, Difference, Run, compare

Tensor = Any
WIDE = 260  # a square layer of this width is a group of its own


class Blocks(nn.Layer):
    """A stem, square blocks and a head; each block is a group of its own."""

    def __init__(self, count: int = 3, width: int = WIDE) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.LayerList([nn.Linear(width, width) for _ in range(count)])
        self.head = nn.Linear(width, 3)

    def encode(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = paddle.tanh(block(x))
        return x

    def generate(self, x: Tensor, count: int) -> Tensor:
        """A loop over calls that never go through forward."""
        for _ in range(count):
            x = paddle.concat([self.head(self.encode(x)), x[:, 3:]], axis=1)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


class Plain(Case):
    """The averaged reference, on three square blocks."""

    reference = AVERAGED

    def build(self) -> nn.Layer:
        return Blocks()


# ------------------------------------------------------------------------------------------------- used somewhere else


class InsideAnother(Plain):
    """A block reads the weight of the one before, inside its own forward (A5)."""

    class Reader(nn.Layer):
        def __init__(self, other: nn.Layer) -> None:
            super().__init__()
            self.own = nn.Linear(WIDE, WIDE)
            self.__dict__["other"] = other  # not a sublayer

        def forward(self, x: Tensor) -> Tensor:
            return self.own(x) + F.linear(x, self.other.weight, self.other.bias)

    def build(self) -> nn.Layer:
        model = Blocks()
        model.blocks[1] = self.Reader(model.blocks[0])
        model.blocks[2] = self.Reader(model.blocks[1].own)
        return model


class OwnForwards(Plain):
    """Layers whose instances have a forward of their own, a method or any callable, and one that is called by name."""

    def build(self) -> nn.Layer:
        model = Blocks()
        first, second, third = model.blocks
        first.forward = MethodType(lambda layer, x, scale=2.0: F.linear(x * scale, layer.weight, layer.bias), first)
        second.forward = lambda x: F.linear(x, first.weight) + second.bias
        model.encode = lambda x: third.forward(second(first(model.stem(x), scale=0.5)))
        return model


class HooksAround(Plain):
    """Hooks of the user's, from before wrapping, that read the layer's weight, change its input and its output."""

    def build(self) -> nn.Layer:
        model = Blocks()
        for block in model.blocks:
            block.register_forward_pre_hook(lambda layer, inputs: (inputs[0] * (1 + layer.weight.mean()),))
            block.register_forward_post_hook(lambda layer, inputs, out: out + layer.weight.sum(0) * layer.bias)
        return model


class OutsideAny(Plain):
    """F.linear(h, model.fc.weight) in the training loop, outside of any forward (A5, A6)."""

    def loss(self, run: Run, batch: Any) -> Tensor:
        hidden = run.model.encode(batch)
        again = F.linear(hidden, run.model.blocks[0].weight, run.model.blocks[0].bias)
        return F.linear(hidden + again, run.model.head.weight, run.model.head.bias).square().mean()


class Penalty(Plain):
    """A loss on the weights themselves, read by name outside of any forward."""

    def loss(self, run: Run, batch: Any) -> Tensor:
        penalty = sum((block.weight**2).sum() for block in run.layer.blocks)
        return super().loss(run, batch) + 0.01 * penalty


class WeightsOnly(Plain):
    """A loss of weights alone: no forward at all."""

    def loss(self, run: Run, batch: Any) -> Tensor:
        return sum((block.weight**2).mean() for block in run.layer.blocks) * batch.mean().abs()


class Directly(Plain):
    """Layers are called one by one, never the model (I1)."""

    def loss(self, run: Run, batch: Any) -> Tensor:
        return run.layer.head(run.model.encode(batch)).square().mean()


class EncoderAlone(Plain):
    """Only a part of the model is trained at even steps (I1)."""

    def loss(self, run: Run, batch: Any) -> Tensor:
        if run.step % 2 == 0:
            return run.model.stem(batch).square().mean()
        return super().loss(run, batch)


class Generating(Plain):
    """generate() between steps and between forward and backward, with and without gradients (I1, R5)."""

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        with paddle.no_grad():
            found = run.model.generate(batch, 3).abs().mean()
        loss = self.loss(run, batch)
        found = found + run.model.generate(batch, 2).abs().mean()
        loss.backward()
        run.update()
        return float((loss + found).item())


class Written(Plain):
    """Weights that the user sets between steps, by set_value and in place, stay set."""

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        if run.step == 3:
            run.layer.blocks[1].weight.set_value(np.full([WIDE, WIDE], 0.01, "float32"))
        if run.step == 5:
            with paddle.no_grad():
                run.layer.head.weight.scale_(0.5)
        if run.step == 7:
            for param in run.layer.stem.parameters():
                param.set_value(np.full(param.shape, 0.02, "float32"))
        return super().train_step(run, batch)


class WrittenBranches(Plain):
    """Weights are set through parameters(), then each rank runs another block: the others must serve what was set."""

    def build(self) -> nn.Layer:
        class Branches(Blocks):
            def forward(self, x: Tensor, index: int) -> Tensor:
                return self.head(self.blocks[index](self.stem(x)))

        return Branches()

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        if run.step in (2, 5):
            for number, param in enumerate(run.layer.parameters()):
                param.set_value(np.full(param.shape, 0.003 * (number + run.step), "float32"))
        if run.step == 5:  # without the model's own forward
            index = (run.rank + 1) % 3
            loss = run.layer.head(run.layer.blocks[index](run.layer.stem(batch))).square().mean()
        else:
            loss = run.model(batch, (run.rank + run.step) % 3).square().mean()
        loss.backward()
        run.update()
        return float(loss.item())


class SummedWeights(Plain):
    """Large weights that are only used as a sum, so that their gradients are equal and could be one tensor."""

    class Block(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.base = self.create_parameter([WIDE, WIDE])
            self.delta = self.create_parameter([WIDE, WIDE])
            self.third = self.create_parameter([WIDE * WIDE])

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.base + self.delta - self.third.reshape([WIDE, WIDE]))

    def build(self) -> nn.Layer:
        model = Blocks()
        for index in range(3):
            model.blocks[index] = self.Block()
        return model


# ---------------------------------------------------------------------------------------------------- what is returned


Pair = namedtuple("Pair", ["first", "rest"])


@dataclasses.dataclass
class Record:
    value: Any
    label: str = "a record"
    count: int = 1


class Plainly:
    """A class of the user's own."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    """An object without ``__dict__``."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


PACK: dict[str, Any] = {
    "dict": lambda x: {"x": x, "none": None, "mode": "mean"},
    "ordered": lambda x: OrderedDict(x=x),
    "namedtuple": lambda x: Pair(x, None),
    "dataclass": Record,
    "nested": lambda x: (1, [None, ({"deep": [x]},)], "text"),
    "object": Plainly,
    "slots": Slotted,
    "none": lambda x: None,
}
UNPACK: dict[str, Any] = {
    "dict": lambda out: out["x"],
    "ordered": lambda out: out["x"],
    "namedtuple": lambda out: out.first,
    "dataclass": lambda out: out.value,
    "nested": lambda out: out[1][1][0]["deep"][0],
    "object": lambda out: out.value,
    "slots": lambda out: out.value,
}
TYPES = {
    "dict": dict, "ordered": OrderedDict, "namedtuple": Pair, "dataclass": Record, "nested": tuple, "object": Plainly,
    "slots": Slotted, "none": type(None),
}  # fmt: skip


class Packing(nn.Layer):
    """A block that packs its output; for "none" it leaves it in an attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(WIDE, WIDE)
        self.weight = self.create_parameter([WIDE, WIDE])

    def forward(self, x: Tensor) -> Any:
        x = F.linear(paddle.tanh(self.inner(x)), self.weight)
        self.kept = x if self.kind == "none" else None
        return PACK[self.kind](x)


class Packed(nn.Layer):
    """Blocks that hand on packed outputs, which is also what the model returns (I8)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.stem = nn.Linear(8, WIDE)
        self.blocks = nn.LayerList([Packing(kind) for _ in range(3)])
        self.head = nn.Linear(WIDE, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            out = block(x)
            if type(out) is not TYPES[self.kind]:
                raise AssertionError(f"expected {TYPES[self.kind]}, got {type(out)}")
            x = block.kept if out is None else UNPACK[self.kind](out)
        self.kept = self.head(x)
        return PACK[self.kind](self.kept)


def returning(kind: str) -> type[Case]:
    class Returning(Plain):
        def build(self) -> nn.Layer:
            return Packed(kind)

        def loss(self, run: Run, batch: Any) -> Tensor:
            out = run.model(batch)
            return (run.layer.kept if out is None else UNPACK[kind](out)).square().mean()

    return Returning


class SomeDiscarded(Plain):
    """A layer returns several tensors, of which the loss uses another one in each step; one needs no gradient."""

    class Splitting(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.weight = self.create_parameter([WIDE, WIDE])
            self.other = self.create_parameter([WIDE, WIDE])

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return F.linear(x, self.weight), F.linear(x, self.other), x.detach()

    def build(self) -> nn.Layer:
        model = Blocks(0)
        model.split = self.Splitting()
        return model

    def loss(self, run: Run, batch: Any) -> Tensor:
        outputs = run.layer.split(run.layer.stem(batch))
        return run.layer.head(outputs[run.step % 2]).square().mean()


# ----------------------------------------------------------------------------------------------------- auxiliary losses


class Auxiliary(Plain):
    """Layers keep an auxiliary loss in an attribute: of their outputs, of an inner layer, of their own weight."""

    use = ("aux",)

    class Routed(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDE, 4)
            self.weight = self.create_parameter([WIDE, WIDE])
            self.scale = self.create_parameter([WIDE, WIDE])

        def forward(self, x: Tensor) -> Tensor:
            gates = F.softmax(self.gate(x))
            out = F.linear(x, self.weight) * gates[:, :1]
            self.aux = (gates.mean(0) ** 2).sum() + 0.01 * paddle.tanh(F.linear(x, self.scale)).square().mean()
            self.collected = [0.1 * (self.weight**2).mean(), {"deep": (self.scale**2).mean()}]
            return out

    def build(self) -> nn.Layer:
        model = Blocks()
        for index in range(3):
            model.blocks[index] = self.Routed()
        return model

    def loss(self, run: Run, batch: Any) -> Tensor:
        loss = super().loss(run, batch)
        for block in run.layer.blocks:
            loss = loss + block.aux + block.collected[0] + block.collected[1]["deep"]
        return loss


class AuxiliaryFirst(Auxiliary):
    """The auxiliary losses have a backward pass of their own, before the main one."""

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        loss = Case.loss(self, run, batch)
        auxiliary = sum(block.aux + block.collected[0] + block.collected[1]["deep"] for block in run.layer.blocks)
        auxiliary.backward(retain_graph=True)
        loss.backward()
        run.update()
        return float((loss + auxiliary).item())

    def optimizer(self, layer: nn.Layer) -> Any:
        return paddle.optimizer.Momentum(0.01, parameters=layer.parameters())


class AuxiliaryAlone(Auxiliary):
    """Only the auxiliary losses are used: no output's hook ever runs."""

    def loss(self, run: Run, batch: Any) -> Tensor:
        Case.loss(self, run, batch)
        return sum(block.aux + block.collected[0] + block.collected[1]["deep"] for block in run.layer.blocks)


# --------------------------------------------------------------------------------------------------------------- views


class Views(Plain):
    """Blocks whose saved tensors are views of the weight: a buffer must not be used again under them."""

    class Block(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.weight = self.create_parameter([WIDE, WIDE])

        def forward(self, x: Tensor) -> Tensor:
            return paddle.tanh(self.product(x))

        def product(self, x: Tensor) -> Tensor:
            return paddle.matmul(x, self.weight.t())

    def build(self) -> nn.Layer:
        model = Blocks()
        for index in range(3):
            model.blocks[index] = self.Block()
        model.blocks.append(self.Block())
        return model


class Slices(Views):
    """The same with slices, reshapes and a detached view that outlives the step."""

    class Block(Views.Block):
        def product(self, x: Tensor) -> Tensor:
            first = self.weight[: WIDE // 2].reshape([WIDE // 2, WIDE])
            second = paddle.split(self.weight, 2, axis=0)[1]
            self.kept = self.weight.detach()[0]
            return paddle.concat([F.linear(x, first.t()), F.linear(x, second.t())], axis=-1) * self.kept.sum()


class Chunked(Views):
    """Fused projections that are cut into views."""

    class Block(Views.Block):
        def product(self, x: Tensor) -> Tensor:
            rows = self.weight.unbind(0)
            return paddle.stack([(x * row).sum(-1) for row in rows[:10]], axis=-1).tile([1, WIDE // 10])


CASES = {
    case.__name__: case
    for case in (
        InsideAnother, OwnForwards, HooksAround,
        OutsideAny, Penalty, WeightsOnly, Directly, EncoderAlone, Generating, Written, WrittenBranches,
        SummedWeights, SomeDiscarded,
        Auxiliary, AuxiliaryFirst, AuxiliaryAlone, Views, Slices, Chunked,
    )
}  # fmt: skip
CASES.update({f"Returning-{kind}": returning(kind) for kind in PACK})


def parity(case: str, steps: int = 10, levels: tuple[str, ...] = LEVELS) -> dict[str, Difference]:
    return compare(CASES[case](), levels, steps)

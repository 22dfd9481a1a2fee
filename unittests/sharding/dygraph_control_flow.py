"""Passes that differ between ranks and steps: unused parameters, branches, repeated uses, eval, errors."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paddle_group_sharded import group_sharded_parallel
from unittests.harness import fresh
from unittests.sharding.dygraph_models import Case
from unittests.sharding.parity import AVERAGED, LEVELS, Difference, Run, average_grads, compare, to_array

Tensor = Any
WIDE = 260  # a square layer of this width is a group of its own


class Branching(nn.Layer):
    """A stem, blocks of which ``forward`` is told which to run, and a head."""

    def __init__(self, width: int, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.LayerList([nn.Linear(width, width) for _ in range(blocks)])
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        x = self.stem(x)
        for index in chosen:
            x = paddle.tanh(self.blocks[index](x))
        return self.head(x)


class Branch(Case):
    """The blocks that run are a function of rank and step."""

    find_unused = True
    width = 8

    def build(self) -> nn.Layer:
        return Branching(self.width)

    def chosen(self, rank: int, step: int) -> tuple[int, ...]:
        raise NotImplementedError

    def loss(self, run: Run, batch: Any) -> Tensor:
        return run.model(batch, self.chosen(run.rank, run.step)).square().mean()


class UnusedOnOneRank(Branch):
    """Rank 0 leaves a block out (H2)."""

    def chosen(self, rank: int, step: int) -> tuple[int, ...]:
        return (0, 2) if rank == 0 else (0, 1, 2)


class UnusedOnAll(Branch):
    """A block that is left out by all ranks at first, then at some steps (H2)."""

    reference = AVERAGED  # DataParallel steps what it has not reached with zero gradients, or not, by release

    def chosen(self, rank: int, step: int) -> tuple[int, ...]:
        return (0, 1, 2) if step in (3, 4, 6) else (0, 2)


class NeverUsed(Branch):
    """A block that nobody ever runs is left as it is."""

    reference = AVERAGED

    def chosen(self, rank: int, step: int) -> tuple[int, ...]:
        return (0, 1)


class MixtureOfExperts(Branch):
    """Each rank runs another expert at each step (H1)."""

    reference = AVERAGED

    def chosen(self, rank: int, step: int) -> tuple[int, ...]:
        return ((rank + step) % 3,)


class LayerDrop(Branch):
    """Ranks run blocks in different numbers and orders, and some none (H1)."""

    reference = AVERAGED

    def chosen(self, rank: int, step: int) -> tuple[int, ...]:
        return ((), (2, 0), (1,), (0, 1, 2), (2, 2))[(rank + step) % 5]


def wide(case: type[Branch]) -> type[Branch]:
    """With blocks that are groups of their own: whole groups are skipped on some ranks."""
    return type(f"Wide{case.__name__}", (case,), {"width": WIDE})


# ------------------------------------------------------------------------------------------------------ repeated uses


class Repeated(Case):
    """What is run several times in one step."""

    reference = AVERAGED
    width = WIDE

    def build(self) -> nn.Layer:
        return Branching(self.width)

    def optimizer(self, layer: nn.Layer) -> Any:
        """Momentum: does not blow up the last bit of a sum that was formed in another order, as Adam does."""
        return paddle.optimizer.Momentum(0.01, parameters=layer.parameters())

    def run_once(self, run: Run, batch: Any, chosen: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        return run.model(batch, chosen).square().mean()


class UsedTwice(Repeated):
    """A layer is used twice in one forward."""

    def loss(self, run: Run, batch: Any) -> Tensor:
        return self.run_once(run, batch, (0, 1, 0, 2, 0))


class Siamese(Repeated):
    """One backward through two forwards of the model (G3)."""

    def loss(self, run: Run, batch: Any) -> Tensor:
        first, second = run.model(batch, (0, 1)), run.model(-batch, (0, 1))
        return (first - 0.3 * second).square().mean()


class TwoForwardsTwoBackwards(Repeated):
    """Both forwards before both backwards."""

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        first, second = self.run_once(run, batch), self.run_once(run, 2 * batch)
        first.backward()
        second.backward()
        run.update()
        return float((first + second).item())


class TwoBranchesTwoBackwards(Repeated):
    """The same where the passes, and the ranks, reach different blocks."""

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        first = self.run_once(run, batch, (0, (run.rank + run.step) % 3))
        second = self.run_once(run, 2 * batch, (1, 2) if run.rank == 0 else (2,))
        second.backward()
        first.backward()
        run.update()
        return float((first + second).item())


class KeptGraph(Repeated):
    """Two backwards through one graph."""

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        out = run.model(batch, (0, 1, 2))
        first, second = out.square().mean(), out.abs().mean()
        first.backward(retain_graph=True)
        first.backward(retain_graph=True)
        second.backward()
        run.update()
        return float((first + second).item())


class MultiTask(Repeated):
    """Two backwards through a common trunk that end in two heads of one group, each with its own loss."""

    def build(self) -> nn.Layer:
        class Model(nn.Layer):
            def __init__(self, width: int) -> None:
                super().__init__()
                self.trunk = nn.Sequential(nn.Linear(8, width), nn.Linear(width, width))
                self.heads = nn.LayerList([nn.Linear(width, 2), nn.Linear(width, 3)])

            def forward(self, x: Tensor) -> list[Tensor]:
                x = self.trunk(x)
                return [head(x) for head in self.heads]

        return Model(self.width)

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        first, second = (out.square().mean() for out in run.model(batch))
        first.backward(retain_graph=True)
        second.backward()
        run.update()
        return float((first + second).item())


class MultiTaskSmall(MultiTask):
    """The same with trunk and heads in one group."""

    width = 6


class InputGradient(Repeated):
    """The gradient with respect to an input, by ``paddle.grad``, before the loss's backward."""

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        batch.stop_gradient = False
        out = run.model(batch, (0, 1, 2)).square().mean()
        (grad,) = paddle.grad(out, batch, retain_graph=True)
        out.backward()
        run.update()
        return float((out + grad.abs().mean()).item())


# ---------------------------------------------------------------------------------------------------------- recompute


class Recomputed(Repeated):
    """Blocks with dropout, two of them with one weight, that backward runs again; one block is used twice (G3, H4)."""

    reentrant = True

    def build(self) -> nn.Layer:
        width, reentrant = self.width, self.reentrant

        class Block(nn.Layer):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(width, width)
                # Without reentrance Paddle 2.6 cannot keep random states on CPU.
                self.drop = nn.Dropout(0.2 if reentrant else 0.0)

            def forward(self, x: Tensor) -> Tensor:
                return x + self.drop(paddle.tanh(self.inner(x)))

        class Model(nn.Layer):
            def __init__(self) -> None:
                super().__init__()
                self.stem = nn.Linear(8, width)
                self.blocks = nn.LayerList([Block() for _ in range(3)])
                self.blocks[2].inner.weight = self.blocks[0].inner.weight
                self.head = nn.Linear(width, 2)

            def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
                x = self.stem(x)
                for index in chosen:
                    x = recompute(self.blocks[index], x, use_reentrant=reentrant, preserve_rng_state=reentrant)
                return self.head(0.1 * x)

        return Model()

    def chosen(self, rank: int, step: int) -> tuple[int, ...]:
        return (0, 1, 2, 1)

    def loss(self, run: Run, batch: Any) -> Tensor:
        return self.run_once(run, batch, self.chosen(run.rank, run.step))


class RecomputedSmall(Recomputed):
    """All blocks in one group."""

    width = 6


class RecomputedWithoutReentrance(Recomputed):
    """``use_reentrant=False``."""

    reentrant = False


class RecomputedDataParallel(RecomputedWithoutReentrance):
    """The same against DataParallel, which cannot do the reentrant form here."""

    reference = "DataParallel"


class RecomputedBranches(Recomputed):
    """Ranks run different blocks, and weights are used once, twice, three times or never."""

    def chosen(self, rank: int, step: int) -> tuple[int, ...]:
        return ((0,), (1, 1, 0, 2), (1,), (2, 1, 0, 1, 1), ())[(rank + step) % 5]


class RecomputedBranchesSmall(RecomputedBranches):
    """The same in one group."""

    width = 6


# ----------------------------------------------------------------------------------------- what is not a training step


class ForwardWithoutBackward(Repeated):
    """A forward whose result is dropped, before, between and instead of training passes."""

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        run.model(2 * batch, (0, 1, 2))
        loss = self.run_once(run, batch)
        run.model(3 * batch, (1,))
        loss.backward()
        run.model(4 * batch, (2,))
        run.update()
        if run.step % 3 == 0:
            run.model(batch, (0, 1, 2))
        return float(loss.item())


class BackwardWithoutStep(Repeated):
    """Gradients that are cleared and never used."""

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        if run.step % 2:
            self.run_once(run, 5 * batch, (1,)).backward()
            run.optimizer.clear_grad(set_to_zero=False)
        return super().train_step(run, batch)

    def loss(self, run: Run, batch: Any) -> Tensor:
        return self.run_once(run, batch)


class EvalBetween(Repeated):
    """Evaluation between forward, backward, step and the next step; ranks differ in how often."""

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        loss = self.run_once(run, batch)
        found = [self.evaluate(run, batch)]
        loss.backward()
        found += [self.evaluate(run, batch) for _ in range(run.rank)]
        run.update()
        found.append(self.evaluate(run, batch))
        return float(loss.item()) + found[0] + found[-1]

    def evaluate(self, run: Run, batch: Any) -> float:
        run.model.eval()
        with paddle.no_grad():
            result = float(self.run_once(run, batch, (0, 2)).item())
        run.model.train()
        return result


class ErrorInForward(Repeated):
    """A layer raises in the middle of a forward, on all ranks or on one; training goes on."""

    class Trap(nn.Layer):
        armed = False

        def forward(self, x: Tensor) -> Tensor:
            if self.armed:
                raise ArithmeticError("trap")
            return x

    def build(self) -> nn.Layer:
        model = Branching(self.width)
        model.blocks[1] = nn.Sequential(nn.Linear(self.width, self.width), self.Trap())
        return model

    def train_step(self, run: Run, batch: Any) -> Optional[float]:
        if run.step in (1, 4, 5) and (run.step != 5 or run.rank == 0):
            trap = run.layer.blocks[1][1]
            trap.armed = True
            try:
                self.run_once(run, batch)
                raise AssertionError("the trap was not reached")
            except ArithmeticError:
                trap.armed = False
            if run.step == 4:
                run.optimizer.clear_grad()
        if run.step == 6:  # in a layer that is called directly
            trap = run.layer.blocks[1][1]
            trap.armed = True
            try:
                run.layer.blocks[1](paddle.ones([1, self.width]))
            except ArithmeticError:
                trap.armed = False
        return super().train_step(run, batch)

    def loss(self, run: Run, batch: Any) -> Tensor:
        return self.run_once(run, batch)


class CaughtInside(ErrorInForward):
    """The model itself catches the error of a layer and goes on in the same forward."""

    def build(self) -> nn.Layer:
        model = super().build()
        plain = model.forward

        def forward(x: Tensor, chosen: tuple[int, ...]) -> Tensor:
            model.blocks[1][1].armed = True
            try:
                model.blocks[1](paddle.ones([1, self.width]))
            except ArithmeticError:
                model.blocks[1][1].armed = False
            return plain(x, chosen)

        model.forward = forward
        return model

    train_step = Case.train_step


# ----------------------------------------------------------------------------------------------------------- two models


class Adversarial(Case):
    """A generator and a discriminator, both wrapped, stepped in turn; one graph crosses both."""

    reference = AVERAGED

    class Pair(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(8, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 4))
            self.critic = nn.Sequential(nn.Linear(4, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 1))


def adversarial(level: Optional[str], steps: int) -> dict[str, Any]:
    """Losses and weights of both after some steps; ``level`` None averages gradients by hand."""
    fresh()
    pair = Adversarial.Pair()
    plain = [pair.generator, pair.critic]
    models: list[Any] = list(plain)
    optimizers: list[Any] = [
        paddle.optimizer.Adam(0.01, parameters=plain[0].parameters()),
        paddle.optimizer.Adam(0.001, beta1=0.5, parameters=plain[1].parameters()),
    ]
    if level is not None:
        for index in range(2):
            models[index], optimizers[index], _ = group_sharded_parallel(plain[index], optimizers[index], level)
    generator, critic = models

    def update(index: int) -> None:
        if level is None:
            average_grads(plain[index])
        optimizers[index].step()
        optimizers[index].clear_grad()

    losses = []
    rank = paddle.distributed.get_rank()
    for step in range(steps):
        rng = np.random.RandomState(1000 * step + rank)
        real = paddle.to_tensor(rng.randn(4, 4).astype("float32"))
        fake = generator(paddle.to_tensor(rng.randn(4, 8).astype("float32")))
        critic_loss = critic(fake.detach()).mean() - critic(real).square().mean()
        critic_loss.backward()
        update(1)
        generator_loss = -critic(fake).mean()
        generator_loss.backward()
        update(0)
        optimizers[1].clear_grad()
        losses += [float(critic_loss.item()), float(generator_loss.item())]
    states = [{name: to_array(value) for name, value in model.state_dict().items()} for model in models]
    return {"losses": losses, "generator": states[0], "critic": states[1]}


BRANCHES = (UnusedOnOneRank, UnusedOnAll, NeverUsed, MixtureOfExperts, LayerDrop)
CASES = {
    case.__name__: case
    for case in (
        *BRANCHES, *(wide(case) for case in BRANCHES),
        UsedTwice, Siamese, TwoForwardsTwoBackwards, TwoBranchesTwoBackwards, KeptGraph, MultiTask, MultiTaskSmall,
        InputGradient, Recomputed, RecomputedSmall, RecomputedWithoutReentrance, RecomputedDataParallel,
        RecomputedBranches, RecomputedBranchesSmall, ForwardWithoutBackward, BackwardWithoutStep, EvalBetween,
        ErrorInForward, CaughtInside,
    )
}  # fmt: skip


def parity(case: str, steps: int = 10, levels: tuple[str, ...] = LEVELS) -> dict[str, Difference]:
    return compare(CASES[case](), levels, steps)

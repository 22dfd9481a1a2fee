"""Cases of test_accumulation.py: backward passes, no_sync(), steps and clear_grad in every order."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paddle_group_sharded import group_sharded_parallel
from paddle_group_sharded.comm import RecordingComm
from unittests.harness import fresh
from unittests.sharding.parity import AVERAGED, LEVELS, Case, Run, average_grads, compare

Tensor = Any


class Branches(nn.Layer):
    """A trunk, and a branch that a forward pass may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.branch = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor, branch: bool, repeat: bool = False) -> Tensor:
        hidden = nn.functional.tanh(self.first(x))
        if branch:
            hidden = hidden + recompute(self.branch, hidden) if repeat else self.branch(hidden)
        if repeat:
            hidden = hidden + recompute(self.branch, 2.0 * hidden)
        return self.last(hidden)


class Program(Case):
    """A step is what the letters of ``text`` say.

    ``b`` backward, ``u`` with the branch left out, ``d`` left out on odd ranks, ``r`` the branch twice by recompute,
    ``q`` two forwards, then two backwards, ``Q`` the first of them without the branch on odd ranks, ``k`` two backwards
    of one kept graph, ``f`` a forward that is never used, ``e`` evaluation, ``s`` step, ``z`` clear_grad to zero,
    ``n`` clear_grad to none, ``( )`` no_sync.
    """

    reference = AVERAGED

    def __init__(self, text: str, **arguments: Any) -> None:
        self.text = text
        self.arguments = arguments

    def build(self) -> nn.Layer:
        return Branches()

    def train_step(self, run: Run, batch: Any) -> float:
        self.run, self.calls, self.total = run, 0, 0.0
        with contextlib.ExitStack() as contexts:
            opened: list[contextlib.ExitStack] = []
            for letter in self.text:
                if letter == "(":
                    opened.append(contexts.enter_context(contextlib.ExitStack()))
                    if not run.is_reference:
                        opened[-1].enter_context(run.model.no_sync())
                elif letter == ")":
                    opened.pop().close()
                else:
                    getattr(self, f"do_{letter}")()
        return self.total

    def forward(self, **options: Any) -> Tensor:
        self.calls += 1
        batch = self.batch(self.run.rank, 10 * self.run.step + self.calls)
        loss = self.run.model(batch, **{"branch": True, **options}).square().mean()
        self.total += float(loss.item())
        return loss

    def do_b(self) -> None:
        self.forward().backward()

    def do_u(self) -> None:
        self.forward(branch=False).backward()

    def do_d(self) -> None:
        self.forward(branch=self.run.rank % 2 == 0).backward()

    def do_r(self) -> None:
        self.forward(repeat=True).backward()

    def do_q(self) -> None:
        first, second = self.forward(), self.forward()
        first.backward()
        second.backward()

    def do_Q(self) -> None:  # noqa: N802
        first, second = self.forward(branch=self.run.rank % 2 == 0), self.forward()
        first.backward()
        second.backward()

    def do_k(self) -> None:
        loss = self.forward()
        loss.backward(retain_graph=True)
        loss.backward()

    def do_f(self) -> None:
        self.forward()

    def do_e(self) -> None:
        with paddle.no_grad():
            self.forward()

    def do_s(self) -> None:
        if self.run.mode == AVERAGED:
            average_grads(self.run.layer)
        self.run.optimizer.step()

    def do_z(self) -> None:
        self.run.optimizer.clear_grad(set_to_zero=True)

    def do_n(self) -> None:
        self.run.optimizer.clear_grad(set_to_zero=False)


def parity(programs: list[str], steps: int = 10, **arguments: Any) -> dict[str, dict[str, float]]:
    """The largest difference of losses and weights from those of plain layers whose gradients are averaged."""
    results = {text: compare(Program(text, **arguments), LEVELS, steps) for text in programs}
    return {
        text: {level: max(difference) for level, difference in by_level.items()}
        for text, by_level in results.items()
    }


# ------------------------------------------------------------------------------------------------------------- exact


def exact_sum(level: str) -> dict[str, np.ndarray]:
    """Weights after ``k`` backwards and one step, in numbers that float32 holds exactly; plain SGD.

    The loss is the sum of ``x @ w``, so the gradient of each row of ``w`` is the sum of a column of all batches.
    """
    results = {}
    for way in ("each", "no_sync", "all_kept", "one"):
        fresh()
        layer = nn.Linear(4, 5, bias_attr=False)
        layer.weight.set_value(np.arange(20, dtype="float32").reshape(4, 5))
        optimizer = paddle.optimizer.SGD(0.5, parameters=layer.parameters())
        model, optimizer, _ = group_sharded_parallel(layer, optimizer, level)
        batches = [integers(dist.get_rank(), index) for index in range(3)]
        if way == "one":
            model(paddle.to_tensor(np.concatenate(batches))).sum().backward()
        for index, batch in enumerate(batches if way != "one" else ()):
            kept = way == "all_kept" or (way == "no_sync" and index < 2)
            with model.no_sync() if kept else contextlib.nullcontext():
                model(paddle.to_tensor(batch)).sum().backward()
        optimizer.step()
        results[way] = model.state_dict()["weight"].numpy()
    return results


def integers(rank: int, index: int) -> np.ndarray:
    """A batch of small integers."""
    return np.random.RandomState(7 * rank + index).randint(-8, 9, [4, 4]).astype("float32")


# ------------------------------------------------------------------------------------------------------------ counted


def traffic(level: str, text: str) -> list[tuple[list[tuple[str, str, int]], list[tuple[str, str, int]]]]:
    """For each of three steps: the operations until just before ``s``, and those from there on."""
    program = Program(text)
    run = Run(program, level)
    comm = RecordingComm(run.model._engine.comm)
    steps = []
    plain_step = program.do_s
    for run.step in range(3):
        before: list[Any] = []

        def split(before: list[Any] = before) -> None:
            before.extend(comm.log)
            comm.clear()
            plain_step()

        program.do_s = split  # type: ignore[method-assign]
        program.train_step(run, None)
        steps.append(([entry[:3] for entry in before], [entry[:3] for entry in comm.log]))
        comm.clear()
    return steps

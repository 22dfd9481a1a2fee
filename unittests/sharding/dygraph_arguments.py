"""Cases of test_arguments.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.communication.group import Group

from paddle_group_sharded import group_sharded_parallel
from paddle_group_sharded.errors import GroupShardedError
from unittests.harness import fresh
from unittests.sharding.dygraph_accumulation import Program
from unittests.sharding.parity import AVERAGED, LEVELS, Case, Run, compare, to_array

Tensor = Any


class Chain(Case):
    """Layers of several sizes, some of them 0-d or a single element."""

    reference = AVERAGED

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def build(self) -> nn.Layer:
        return nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.LayerNorm(30), nn.Linear(30, 1), nn.PReLU())


def differences(grid: list[dict[str, Any]], levels: list[str]) -> list[dict[str, float]]:
    """For each set of arguments: the largest difference from averaged gradients."""
    return [
        {level: max(value) for level, value in compare(Chain(**arguments), levels).items()} for arguments in grid
    ]


# ----------------------------------------------------------------------------------------------------- process groups


def group_of(ranks: list[int]) -> Group:
    """A group as ``new_group`` gives it, without connections: Paddle fails to open several on gloo.

    Four processes that call ``new_group`` for [0, 1] and then [2, 3] meet refused connections.
    """
    return Group(ranks.index(dist.get_rank()), 1000 + ranks[0] * 10 + ranks[-1], ranks)


def subgroup_training(groups: list[list[int]], level: str, steps: int = 10) -> Optional[tuple[float, float]]:
    """Ranks in no group do something else meanwhile; returns the difference from gradients averaged in the group."""
    rank = dist.get_rank()
    made = dist.new_group(groups[0]) if len(groups) == 1 else None  # every rank makes it
    mine = [ranks for ranks in groups if rank in ranks]
    if not mine:
        time.sleep(0.2)
        return None
    group = made or group_of(mine[0])
    results = []
    for sharded in (False, True):
        fresh(seed=7 * groups.index(mine[0]))
        layer = Chain().build()
        model: Any = layer
        optimizer: Any = paddle.optimizer.AdamW(0.01, parameters=layer.parameters())
        if sharded:
            model, optimizer, _ = group_sharded_parallel(layer, optimizer, level, group=group)
        for step in range(steps):
            model(Chain().batch(rank, step)).square().mean().backward()
            if not sharded:
                average_over(layer, mine[0], made)
            optimizer.step()
            optimizer.clear_grad()
        results.append({name: to_array(value).copy() for name, value in model.state_dict().items()})
    distance = max(float(np.abs(results[0][name] - results[1][name]).max()) for name in results[0])
    return distance, float(sum(np.abs(value).sum() for value in results[1].values()))


def average_over(layer: nn.Layer, ranks: list[int], made: Optional[Group]) -> None:
    """The mean of the gradients of ``ranks``; over all ranks, of which some are chosen, where no group was made."""
    for param in layer.parameters():
        grads: list[Tensor] = []
        dist.all_gather(grads, param.grad.clone(), group=made)
        chosen = grads if made is not None else [grads[rank] for rank in ranks]
        param.clear_gradient(False)
        param.grad = sum(chosen[1:], chosen[0]) * (1.0 / len(ranks))


class Grid(Program):
    """Branches under clipping."""

    def __init__(self, text: str, clip: Any, **arguments: Any) -> None:
        super().__init__(text, **arguments)
        self.clip = clip

    def optimizer(self, layer: nn.Layer) -> Any:
        return paddle.optimizer.AdamW(0.01, parameters=layer.parameters(), weight_decay=0.01, grad_clip=self.clip)


def grid_groups(rows: list[list[int]], columns: list[list[int]]) -> tuple[Any, Any]:
    """This rank's sharding group (its row) and its data parallel group (its column)."""
    row, column = (next(ranks for ranks in groups if dist.get_rank() in ranks) for groups in (rows, columns))
    return group_of(row), group_of(column)


def grid(
    programs: list[str], rows: list[list[int]], columns: list[list[int]], levels: Sequence[str] = LEVELS
) -> dict[str, dict[str, float]]:
    """Differences from gradients averaged over all ranks."""
    group, dp_group = grid_groups(rows, columns)
    clips = {"none": None, "global": nn.ClipGradByGlobalNorm(0.1), "norm": nn.ClipGradByNorm(0.05)}
    results = {}
    for text in programs:
        for name, clip in clips.items():
            found = compare(Grid(text, clip, group=group, dp_group=dp_group), levels, 10)
            results[f"{text} {name}"] = {level: max(difference) for level, difference in found.items()}
    return results


def grid_scaler(rows: list[list[int]], columns: list[list[int]], cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """dygraph_scaler.parity over a grid."""
    from unittests.sharding import dygraph_scaler

    group, dp_group = grid_groups(rows, columns)
    return dygraph_scaler.parity(cases, group=group, dp_group=dp_group)


# ------------------------------------------------------------------------------------------------------------ buffers


class Normed(Case):
    """BatchNorm, whose running statistics differ between ranks."""

    reference = AVERAGED

    def __init__(self, sync: bool) -> None:
        self.arguments = {"sync_buffers": sync}

    def build(self) -> nn.Layer:
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1D(6), nn.Linear(6, 3))

    def optimizer(self, layer: nn.Layer) -> Any:
        """The bias before a BatchNorm has a gradient of rounding errors only, which Adam would blow up."""
        return paddle.optimizer.Momentum(0.05, parameters=layer.parameters())

    def loss(self, run: Run, batch: Any) -> Tensor:
        if run.is_reference and self.arguments["sync_buffers"] and run.world_size > 1:
            for buffer in run.layer.buffers():
                dist.broadcast(buffer, 0)
        return super().loss(run, batch)


def buffers() -> dict[bool, dict[str, float]]:
    """With and without sync_buffers; the state holds the buffers of this rank."""
    return {sync: {k: max(v) for k, v in compare(Normed(sync)).items()} for sync in (False, True)}


# ---------------------------------------------------------------------------------------------- what stays whole


class Kept(nn.Layer):
    """Layers of different classes and sizes: 90, 110 and 6 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 10)
        self.deep = nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.deep[1](self.deep[0](self.wide(x))[:, :3])


def whole_bytes(which: str, **arguments: Any) -> dict[str, int]:
    """Bytes of parameters that this rank keeps, and of all of them."""
    layer = Kept()
    chosen = {"none": [], "class": ["LayerNorm"], "id": [id(layer.deep)], "both": ["LayerNorm", id(layer.wide)]}
    if which:
        arguments["exclude_layer"] = chosen[which]
    optimizer = paddle.optimizer.AdamW(0.01, parameters=layer.parameters())
    model, optimizer, _ = group_sharded_parallel(layer, optimizer, "p_g_os", **arguments)
    for _ in range(2):
        model(paddle.ones([2, 8])).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    groups = model._engine.groups
    stay = sum(group.layout.param_numel for group in groups if not group.placements.param)
    return {**model._engine.memory_report(), "stay": stay, "groups": len(groups)}


# ------------------------------------------------------------------------------------------------------------- sparse


class SparseCall(nn.Layer):
    """Asks for a sparse gradient where no layer shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([10, 4])

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.weight, sparse=True)


def sparse(level: str) -> list[str]:
    """The messages for a sparse layer, and for a sparse call."""
    messages = []
    for layer in (nn.Sequential(nn.Embedding(10, 4, sparse=True)), SparseCall()):
        optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
        try:
            model, optimizer, _ = group_sharded_parallel(layer, optimizer, level)
            model(paddle.to_tensor([1, 2, 2])).sum().backward()
            optimizer.step()
            messages.append("")
        except GroupShardedError as error:
            messages.append(str(error))
        except SystemError as error:
            messages.append(str(cause(error)))
    return messages


def cause(error: BaseException) -> BaseException:
    """What has gone wrong: the autograd engine makes a SystemError of an error in a hook."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


# ------------------------------------------------------------------------------------------------------------ unequal


def unequal(level: str) -> tuple[str, float]:
    """H5: rank 0 runs one backward pass more than the others; the error and the seconds until it came."""
    layer = nn.Linear(300, 300)
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    model, optimizer, _ = group_sharded_parallel(layer, optimizer, level)
    start = time.monotonic()
    try:
        for _ in range(2 if dist.get_rank() == 0 else 1):
            model(paddle.ones([2, 300])).mean().backward()
        optimizer.step()
    except Exception as error:
        return str(cause(error)), time.monotonic() - start
    return "", time.monotonic() - start

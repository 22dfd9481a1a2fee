"""What differs between the ranks of a sharding group: how much of the model each one steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .facts import GroupFacts, ParamFacts, StepFacts

__all__ = ["RankLoad", "rank_loads"]


@dataclass
class RankLoad:
    """Bytes of one rank."""

    states: float = 0.0  # with float32 masters, and what is stepped in memory of its own
    copies: int = 0  # of its gradients, made by the step: casts, clipped ones
    held: int = 0  # of reduced gradients where they were not sharded: a slice keeps the whole of a large one alive


def rank_loads(
    params: Sequence[ParamFacts], groups: Sequence[GroupFacts], step: StepFacts, world_size: int
) -> list[RankLoad]:
    """The load of each rank, in order."""
    loads = [RankLoad() for _ in range(world_size)]
    for group in groups:
        if any(params[index].expects_grad for index in group.members):
            _add_group(loads, params, group, step)
    if step.steps_whole:
        _share_out_whole(loads, params, groups)
    return loads


def _add_group(loads: list[RankLoad], params: Sequence[ParamFacts], group: GroupFacts, step: StepFacts) -> None:
    itemsize = max(params[index].grad_itemsize for index in group.members)
    shard_numel = group.layout.shard_numel
    for run in group.layout.runs:
        first = params[group.members[run.slots.start]]
        joined = step.joins_neighbours and len(run.slots) > 1 and not first.has_master and first.reached
        for rank, numel in _shares(run.start, run.stop, shard_numel):
            loads[rank].held += itemsize * (run.numel if len(run.slots) == 1 else numel)
            if joined:  # the gaps have states as well
                loads[rank].states += numel * first.state_bytes / first.numel + first.scalar_bytes
        for index in run.slots:
            slot, param = group.layout.slots[index], params[group.members[index]]
            for rank, numel in _shares(slot.start, slot.stop, shard_numel) if param.expects_grad else ():
                load = loads[rank]
                if not joined and not step.steps_whole:
                    load.states += numel * param.state_bytes / param.numel + param.scalar_bytes
                stepped_itemsize = 4 if param.has_master else itemsize
                load.copies += numel * stepped_itemsize * ((stepped_itemsize != itemsize) + step.clips)


def _shares(start: int, stop: int, shard_numel: int) -> Iterator[tuple[int, int]]:
    """The ranks that own some of the elements of an interval, and how many."""
    while start < stop:
        rank = start // shard_numel
        end = min(stop, (rank + 1) * shard_numel)
        yield rank, end - start
        start = end


def _share_out_whole(loads: list[RankLoad], params: Sequence[ParamFacts], groups: Sequence[GroupFacts]) -> None:
    """States, masters and copies of whole parameters, as the optimizer shares them out, and the gradients it needs."""
    numels = [0] * len(loads)
    owners = {}
    stepped = [index for index, param in enumerate(params) if param.expects_grad]
    for index in sorted(stepped, key=lambda index: -params[index].numel):
        param = params[index]
        rank = owners[index] = numels.index(min(numels))
        numels[rank] += param.numel
        own = 0 if param.has_master else param.numel * param.itemsize
        loads[rank].states += param.state_bytes + param.scalar_bytes + own
    for group in groups:
        itemsize = max(params[index].grad_itemsize for index in group.members)
        for rank in {owners[index] for index in group.members if index in owners}:
            loads[rank].copies += itemsize * group.layout.numel

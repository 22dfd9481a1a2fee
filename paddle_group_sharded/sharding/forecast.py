"""What one rank holds and sends in a training step, before it runs: arithmetic on layouts.

Everything is of a step that is not the first, in bytes and elements, as the allocator sees it: what Python, sockets and
the collectives' library hold is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..comm.recording import elements_sent
from .facts import GroupFacts, ParamFacts, StepFacts
from .level import Placements
from .loads import rank_loads
from .replay import BackwardPeak, Kind, Limits, ReducedGroup, replay
from .traffic import buckets, collectives, replica_numels

__all__ = ["Forecast", "RankForecast", "data_parallel", "formula_bytes", "sharded"]

class RankForecast(NamedTuple):
    """Bytes of one rank."""

    states: int
    peak: int


class Forecast(NamedTuple):
    """Bytes of the rank that has most, and what each sends in a step."""

    parameters: int  # kept between steps
    gradients: int  # kept from backward to the step
    states: int  # of the optimizer, with float32 masters
    formula: float  # bytes of these three by the ZeRO paper, without padding
    buffers: int  # the most that whole gradients, gathered and packed buffers hold at once
    activations: int  # the most that the passes keep
    peak: int  # at any moment of the step
    sent: float  # elements
    collectives: int
    by_rank: tuple[RankForecast, ...]


def formula_bytes(params: Sequence[ParamFacts], placements: Placements, world_size: int) -> float:
    """Model states of one rank after arXiv 1910.02054: what a level shards is divided by ``world_size``."""
    kinds = (
        sum(param.numel * param.itemsize for param in params),
        sum(param.grad_bytes + param.loose_bytes for param in params),
        sum(param.state_bytes for param in params if param.expects_grad),
    )
    return sum(bytes_ / (world_size if is_sharded else 1) for bytes_, is_sharded in zip(kinds, placements))


def data_parallel(params: Sequence[ParamFacts], step: StepFacts, world_size: int) -> Forecast:
    """``paddle.DataParallel``, whose reductions keep a second copy of the gradients.

    With Paddle's ``optimizer.clear_grad()`` gradients keep their memory from step to step.
    """
    whole = sum(param.numel * param.itemsize for param in params)
    grads = sum(param.grad_bytes + param.loose_bytes for param in params)
    states = sum(param.state_bytes + param.scalar_bytes for param in params if param.expects_grad)
    members = buckets(params) if world_size > 1 else []
    sizes = [sum(params[index].numel * params[index].itemsize for index in bucket) for bucket in members]
    passes = _bucket_peak(params, step, members, sizes)
    clipped = sum(param.grad_bytes for param in params) if step.clips else 0
    peak = whole + states + step.other_bytes + grads + sum(sizes)
    peak += max(passes.total + step.workspace, passes.left + clipped)
    return Forecast(
        parameters=whole,
        gradients=grads,
        states=states,
        formula=formula_bytes(params, Placements(False, False, False), world_size),
        buffers=sum(sizes) + max(passes.buffers, clipped),
        activations=_activations(step),
        peak=peak,
        sent=sum(
            elements_sent("all_reduce", sum(params[index].numel for index in bucket), world_size) for bucket in members
        ),
        collectives=len(members),
        by_rank=(RankForecast(states, peak),) * world_size,
    )


def _bucket_peak(
    params: Sequence[ParamFacts], step: StepFacts, members: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> BackwardPeak:
    """Activations beside a gradient that is about to be added, or beside a bucket.

    A bucket is filled anew while its copy of the step before is still there.
    """
    bucket_of = {index: number for number, bucket in enumerate(members) for index in bucket}
    missing = [set(bucket) for bucket in members]
    total = most = left = 0
    for kind, index, activations in step.moments:
        now = 0
        if kind is Kind.GRAD:
            now = params[index].grad_bytes
            bucket = bucket_of.get(index)
            if bucket is not None:
                missing[bucket].discard(index)
                now = now if missing[bucket] else max(now, sizes[bucket])
        total, most, left = max(total, activations + now), max(most, now), activations
    return BackwardPeak(total, most, left)


def sharded(
    params: Sequence[ParamFacts],
    groups: Sequence[GroupFacts],
    placements: Placements,
    step: StepFacts,
    world_size: int,
    limits: Limits,
    dp_size: int = 1,
) -> Forecast:
    """One of the three levels; the ``moments`` of ``step`` count the groups that are sharded from 0."""
    reduced = [
        ReducedGroup(
            group.layout,
            group.members,
            max(params[index].grad_itemsize for index in group.members),
            any(params[index].expects_grad for index in group.members),
        )
        for group in groups
    ]
    kept = sum(_kept_bytes(group, params) for group in groups)
    loose = sum(param.loose_bytes for param in params)
    shards = sum(each.itemsize * each.layout.shard_numel for each in reduced if each.expects_grad)
    whole_grads = 0 if placements.grad else sum(param.grad_bytes for param in params)
    full = [_itemsize(group, params) * group.layout.numel for group in groups if group.sharded]
    passes = replay(step.moments, full, reduced, [param.grad_bytes for param in params], placements.grad, limits)
    base = kept + step.other_bytes + loose + (shards if placements.grad else 0)
    packing = max((each.packing_bytes for each in reduced), default=0)
    whole_step = _whole_step_bytes(params, groups, reduced) if step.steps_whole else 0
    ranks, buffers = [], 0
    for load in rank_loads(params, groups, step, world_size):
        held = 0 if placements.grad else load.held
        at_step = max(0 if placements.grad else whole_grads + packing, held + load.copies + whole_step)
        peak = max(passes.total + step.workspace, at_step + passes.left)
        buffers = max(buffers, passes.buffers - whole_grads, at_step - whole_grads)
        ranks.append(RankForecast(int(load.states), base + int(load.states) + peak))
    traffic = collectives(params, groups, step)
    copies = replica_numels(params, groups, placements, step) if dp_size > 1 else []
    return Forecast(
        parameters=kept,
        gradients=loose + (shards if placements.grad else whole_grads),
        states=max(rank.states for rank in ranks),
        formula=formula_bytes(params, placements, world_size),
        buffers=buffers,
        activations=_activations(step),
        peak=max(rank.peak for rank in ranks),
        sent=sum(elements_sent(op, numel, world_size) for op, numel in traffic)
        + sum(elements_sent("all_reduce", numel, dp_size) for numel in copies),
        collectives=len(traffic) + len(copies),
        by_rank=tuple(ranks),
    )


def _activations(step: StepFacts) -> int:
    return max((moment.activations for moment in step.moments), default=0)


def _itemsize(group: GroupFacts, params: Sequence[ParamFacts]) -> int:
    return params[group.members[0]].itemsize  # the same for all: groups are of one dtype


def _kept_bytes(group: GroupFacts, params: Sequence[ParamFacts]) -> int:
    return _itemsize(group, params) * (group.layout.shard_numel if group.sharded else group.layout.numel)


def _whole_step_bytes(
    params: Sequence[ParamFacts], groups: Sequence[GroupFacts], reduced: Sequence[ReducedGroup]
) -> int:
    """Where whole parameters are stepped: one shard of gradients, or one gathered group and a copy of a parameter."""
    shard = max((each.itemsize * each.layout.shard_numel for each in reduced if each.expects_grad), default=0)
    gathered = max((_itemsize(group, params) * group.layout.numel for group in groups if group.sharded), default=0)
    largest = max((param.numel * param.itemsize for param in params if param.expects_grad), default=0)
    return max(shard, gathered + largest)

"""What one rank holds and sends in a training step, before it runs: arithmetic on layouts.

Everything is of a step that is not the first, of group rank 0 (which never owns less of the padding's share than
another), in bytes and elements, under the allocator's view: memory of Python, sockets and kernels is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..comm.recording import elements_sent
from .facts import GroupFacts, ParamFacts, StepFacts
from .level import Placements
from .replay import BackwardPeak, Kind, Limits, ReducedGroup, replay
from .traffic import buckets, collectives, replica_numels

__all__ = ["Forecast", "data_parallel", "formula_bytes", "sharded"]

class Forecast(NamedTuple):
    """Bytes of one rank, and what it sends in a step."""

    parameters: int  # kept between steps
    gradients: int  # kept from backward to the step
    states: int  # of the optimizer, with float32 masters
    formula: float  # bytes of these three by the ZeRO paper, without padding
    buffers: int  # the most that whole gradients, gathered and packed buffers hold at once
    activations: int  # the most that the passes keep
    peak: int  # at any moment of the step
    sent: float  # elements
    collectives: int


def formula_bytes(params: Sequence[ParamFacts], placements: Placements, world_size: int) -> float:
    """Model states of one rank after arXiv 1910.02054: what a level shards is divided by ``world_size``."""
    kinds = (
        sum(param.numel * param.itemsize for param in params),
        sum(param.grad_bytes + param.loose_bytes for param in params),
        sum(param.state_bytes for param in params if param.expects_grad),
    )
    return sum(bytes_ / (world_size if is_sharded else 1) for bytes_, is_sharded in zip(kinds, placements))


def data_parallel(params: Sequence[ParamFacts], step: StepFacts, world_size: int) -> Forecast:
    """``paddle.DataParallel``, whose reductions keep a second copy of the gradients."""
    whole = sum(param.numel * param.itemsize for param in params)
    grads = sum(param.grad_bytes for param in params)
    loose = sum(param.loose_bytes for param in params)
    states = sum(param.state_bytes + param.scalar_bytes for param in params if param.expects_grad)
    members = buckets(params) if world_size > 1 else []
    sizes = [sum(params[index].numel * params[index].itemsize for index in bucket) for bucket in members]
    total, most, left = _bucket_peak(params, step, members, sizes)
    clipped = grads if step.clips else 0
    return Forecast(
        parameters=whole,
        gradients=grads + loose,
        states=states,
        formula=formula_bytes(params, Placements(False, False, False), world_size),
        buffers=sum(sizes) + max(most, clipped),
        activations=_activations(step),
        peak=whole
        + states
        + step.other_bytes
        + loose
        + sum(sizes)
        + max(total + step.workspace, grads + clipped + left),
        sent=sum(
            elements_sent("all_reduce", sum(params[index].numel for index in bucket), world_size) for bucket in members
        ),
        collectives=len(members),
    )


def _bucket_peak(
    params: Sequence[ParamFacts], step: StepFacts, members: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> tuple[int, int, int]:
    """The most bytes of activations, gradients and one new bucket at once; the largest bucket; activations at the end.

    A bucket is filled anew while its copy of the step before is still there.
    """
    bucket_of = {index: number for number, bucket in enumerate(members) for index in bucket}
    missing = [set(bucket) for bucket in members]
    live = total = left = 0
    for kind, index, activations in step.moments:
        filled = 0
        if kind is Kind.GRAD:
            live += params[index].grad_bytes
            bucket = bucket_of.get(index)
            if bucket is not None:
                missing[bucket].discard(index)
                filled = 0 if missing[bucket] else sizes[bucket]
        total = max(total, activations + live + filled)
        left = activations
    return total, max(sizes, default=0), left


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
    whole_grads = sum(param.grad_bytes for param in params)
    grads = loose + (shards if placements.grad else whole_grads)
    states = _state_bytes(params, groups, step, world_size)
    full = [_itemsize(group, params) * group.layout.numel for group in groups if group.sharded]
    peak = replay(step.moments, full, reduced, [param.grad_bytes for param in params], placements.grad, limits)
    base = kept + states + step.other_bytes + loose + (shards if placements.grad else 0)
    at_step = _step_bytes(params, groups, reduced, placements, step, peak, whole_grads)
    traffic = collectives(params, groups, step)
    copies = replica_numels(params, groups, placements, step) if dp_size > 1 else []
    return Forecast(
        parameters=kept,
        gradients=grads,
        states=states,
        formula=formula_bytes(params, placements, world_size),
        buffers=max(peak.buffers, at_step - peak.left) - (0 if placements.grad else whole_grads),
        activations=_activations(step),
        peak=base + max(peak.total + step.workspace, at_step),
        sent=sum(elements_sent(op, numel, world_size) for op, numel in traffic)
        + sum(elements_sent("all_reduce", numel, dp_size) for numel in copies),
        collectives=len(traffic) + len(copies),
    )


def _activations(step: StepFacts) -> int:
    return max((moment.activations for moment in step.moments), default=0)


def _itemsize(group: GroupFacts, params: Sequence[ParamFacts]) -> int:
    return params[group.members[0]].itemsize  # the same for all: groups are of one dtype


def _kept_bytes(group: GroupFacts, params: Sequence[ParamFacts]) -> int:
    return _itemsize(group, params) * (group.layout.shard_numel if group.sharded else group.layout.numel)


def _state_bytes(
    params: Sequence[ParamFacts], groups: Sequence[GroupFacts], step: StepFacts, world_size: int
) -> int:
    """Of rank 0's pieces; where parameters are stepped whole, of the rank that has most."""
    if step.steps_whole:
        return max(_whole_loads(params, world_size))
    total = 0.0
    for group in groups:
        for run in group.layout.runs:
            first = params[group.members[run.slots.start]]
            joined = step.joins_neighbours and len(run.slots) > 1 and not first.has_master
            low, high = group.layout.shard_bounds(0)
            if joined and first.expects_grad:
                numel = max(0, min(run.stop, high) - max(run.start, low))  # the gaps have states as well
                total += numel * first.state_bytes / first.numel + (first.scalar_bytes if numel else 0)
                continue
            for slot in run.slots:
                piece, param = group.layout.piece(slot, 0), params[group.members[slot]]
                if piece is not None and param.expects_grad:
                    total += piece.numel * param.state_bytes / param.numel + param.scalar_bytes
    return int(total)


def _whole_loads(params: Sequence[ParamFacts], world_size: int) -> list[int]:
    """Bytes of each rank's states, masters and own copies, as the optimizer shares the parameters out."""
    loads, numels = [0] * world_size, [0] * world_size
    for param in sorted((param for param in params if param.expects_grad), key=lambda param: -param.numel):
        rank = numels.index(min(numels))
        numels[rank] += param.numel
        own = 0 if param.has_master else param.numel * param.itemsize
        loads[rank] += param.state_bytes + param.scalar_bytes + own
    return loads


def _step_bytes(
    params: Sequence[ParamFacts],
    groups: Sequence[GroupFacts],
    reduced: Sequence[ReducedGroup],
    placements: Placements,
    step: StepFacts,
    peak: BackwardPeak,
    whole_grads: int,
) -> int:
    """The most that lives beside parameters, states and shards of gradients between backward and the step's end."""
    packing = max((each.packing_bytes for each in reduced), default=0)
    before = 0 if placements.grad else whole_grads + packing
    copies = 0  # of the gradients of this rank's pieces
    for group, each in zip(groups, reduced):
        owned = group.layout.owned(0) if each.expects_grad else ()
        for piece in owned:
            param = params[group.members[piece.index]]
            copies += piece.numel * ((4 if param.has_master else each.itemsize) if step.clips else 0)
            copies += piece.numel * (4 if param.has_master and each.itemsize != 4 else 0)
    if step.steps_whole:
        copies += sum(each.itemsize * each.layout.numel for each in reduced if each.expects_grad)
    held = 0 if placements.grad else _held_bytes(groups, reduced)
    return max(before, held + copies) + peak.left


def _held_bytes(groups: Sequence[GroupFacts], reduced: Sequence[ReducedGroup]) -> int:
    """Where gradients stay whole until the step: what rank 0 holds of them after they have been reduced."""
    total = 0
    for group, each in zip(groups, reduced):
        end = group.layout.shard_bounds(0)[1]
        for run in group.layout.runs if each.expects_grad else ():
            if run.start < end:  # its slice keeps the whole of a large gradient alive
                total += each.itemsize * (run.numel if len(run.slots) == 1 else min(run.stop, end) - run.start)
    return total

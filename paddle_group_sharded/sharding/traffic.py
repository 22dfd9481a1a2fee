"""The collectives of one training step, and the elements of each: what :class:`~..comm.RecordingComm` would log."""

from __future__ import annotations

from collections.abc import Sequence

from .facts import GroupFacts, ParamFacts, StepFacts
from .level import Placements
from .replay import gathers

__all__ = ["buckets", "collectives", "replica_numels"]

# paddle.DataParallel fills buckets of gradients until they hold so many bytes; the first parameters' bucket is small.
_BUCKETS = (2**20, 25 * 2**20)

# The optimizer tells in front of its flags whether a forward changed a parameter, and whether gradients were left.
_SIGNALS = 2


def buckets(params: Sequence[ParamFacts]) -> list[tuple[int, ...]]:
    """The numbers of the parameters of each bucket of ``paddle.DataParallel``, in registration order."""
    found: list[tuple[int, ...]] = []
    for itemsize in dict.fromkeys(param.itemsize for param in params if param.trainable):
        members: list[int] = []
        size = 0
        for index, param in enumerate(params):
            if not param.trainable or param.itemsize != itemsize:
                continue
            members.append(index)
            size += param.numel * itemsize
            if size >= _BUCKETS[min(len(found), 1)]:
                found.append(tuple(members))
                members, size = [], 0
        if members:
            found.append(tuple(members))
    return found


def collectives(
    params: Sequence[ParamFacts], groups: Sequence[GroupFacts], step: StepFacts
) -> list[tuple[str, int]]:
    """Every collective of a step inside the sharding group, with its elements; calls without any count as nothing."""
    sharded_groups = [group for group in groups if group.sharded]
    traffic = [("all_reduce", _SIGNALS + step.num_flags + step.num_norms)]
    if sharded_groups:
        traffic += [("all_gather", sharded_groups[index].layout.numel) for index in gathers(step.moments)]
    for group in groups:
        members = [params[index] for index in group.members if params[index].expects_grad]
        if not members:
            continue
        numel = group.layout.numel
        traffic.append(("reduce_scatter", numel))
        if step.steps_whole:
            traffic.append(("all_gather", numel))  # its gradients
            traffic += [("all_gather", numel)] * (2 if group.sharded else 0)  # to read, then to write parameters
            traffic += [("broadcast", param.numel) for param in members]
        if not group.sharded:
            traffic.append(("all_gather", numel))
    return traffic


def replica_numels(
    params: Sequence[ParamFacts], groups: Sequence[GroupFacts], placements: Placements, step: StepFacts
) -> list[int]:
    """Elements of each all-reduce over the replicas."""
    numels = [_SIGNALS + step.num_flags]
    for group in groups:
        if not any(params[index].expects_grad for index in group.members):
            continue
        if placements.grad:
            numels.append(group.layout.shard_numel)
            continue
        end = group.layout.shard_bounds(0)[1]
        numels += [min(run.stop, end) - run.start for run in group.layout.runs if run.start < end]
    return numels

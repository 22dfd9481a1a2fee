"""Which parameters share a buffer and a collective.

Where parameters stay whole, a group is a bucket of at most ``buffer_max_size`` elements.  Where they are sharded, a
group is what is gathered at once: one block of the model; small neighbours are merged, since a collective costs as much
as moving some ten thousand elements.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["MERGE_BELOW", "Group", "ParamInfo", "group_params"]

MERGE_BELOW = 2**16  # elements; 256 KiB of float32 move in about the time that starting a collective takes


@dataclass(frozen=True)
class ParamInfo:
    """What grouping needs to know of a parameter."""

    numel: int
    kind: Hashable  # only parameters of one kind (dtype, device, trainable or not) can share a buffer
    unit: int  # index of the block it belongs to; consecutive in registration order
    sharded: bool  # its storage is sharded, not only its gradient and state


@dataclass(frozen=True)
class Group:
    """Indices of the parameters of one group, in registration order."""

    members: tuple[int, ...]
    sharded: bool


def group_params(params: Sequence[ParamInfo], bucket_numel: int) -> list[Group]:
    """Split ``params`` into groups; the result is ordered by each group's first parameter.

    A bucket closes before it would exceed ``bucket_numel`` elements; a parameter larger than that is a bucket of its
    own.  A sharded group closes at the first block boundary after it has reached :data:`MERGE_BELOW` elements.
    """
    open_groups: dict[Hashable, list[int]] = {}
    numels: dict[Hashable, int] = {}  # elements of each open group
    done: list[list[int]] = []
    for index, info in enumerate(params):
        key = (info.kind, info.sharded)
        members = open_groups.get(key, [])
        if info.sharded:
            closes = bool(members) and numels[key] >= MERGE_BELOW and params[members[-1]].unit != info.unit
        else:
            closes = bool(members) and numels[key] + info.numel > bucket_numel
        if not members or closes:
            members = open_groups[key] = []
            numels[key] = 0
            done.append(members)
        members.append(index)
        numels[key] += info.numel
    return [Group(tuple(members), params[members[0]].sharded) for members in done]

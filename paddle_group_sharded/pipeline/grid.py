"""Who stands where: which ranks of the launch form a pipeline, and which hold copies of the same stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import paddle
from paddle.distributed import fleet

from ..errors import UsageError

__all__ = ["Grid", "Ranks"]

_DATA, _PIPE = ("data", "dp"), ("pipe", "pp")  # names of the two axes in Paddle's topologies


class Ranks(NamedTuple):
    """What :func:`.comm.create_comm` needs of a group."""

    ranks: tuple[int, ...]  # global


@dataclass(frozen=True)
class Grid:
    """The place of this rank in ``num_replicas`` equal pipelines of ``num_stages`` ranks each."""

    all_pipelines: tuple[tuple[int, ...], ...]  # global ranks of each replica, in stage order
    global_rank: int  # this rank's number in the launch

    @classmethod
    def of(cls, topology: Optional[Any] = None, num_stages: Optional[int] = None) -> Grid:
        """The grid of the launch; no communication.

        ``topology`` is Paddle's ``CommunicateTopology`` (or the ``HybridCommunicateGroup`` that has one); without it,
        global rank ``replica * num_stages + stage`` holds ``stage``, which is fleet's order too.  Without either, the
        pipeline degree given to ``fleet.init`` counts, and one process alone is one stage.
        """
        rank, world_size = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
        if topology is None and num_stages is None:
            topology = _fleet_topology(world_size)
            num_stages = 1 if topology is None else None
        if topology is not None:
            return cls(_from_topology(topology, num_stages, world_size), rank)
        if not isinstance(num_stages, int) or isinstance(num_stages, bool) or num_stages < 1:
            raise UsageError(f"num_stages is a whole number from 1 on; got {num_stages!r}")
        if world_size % num_stages:
            raise UsageError(
                f"expected a number of ranks that {num_stages} stages divide, but the launch has {world_size}; start "
                f"it with --nproc_per_node {-(-world_size // num_stages) * num_stages}, or set num_stages to a "
                f"divisor of {world_size}"
            )
        starts = range(0, world_size, num_stages)
        return cls(tuple(tuple(range(start, start + num_stages)) for start in starts), rank)

    @property
    def num_stages(self) -> int:
        """Ranks of one pipeline."""
        return len(self.all_pipelines[0])

    @property
    def num_replicas(self) -> int:
        """Pipelines side by side; each gets batches of its own."""
        return len(self.all_pipelines)

    @property
    def replica(self) -> int:
        """Number of the pipeline that this rank belongs to."""
        return next(index for index, ranks in enumerate(self.all_pipelines) if self.global_rank in ranks)

    @property
    def stage(self) -> int:
        """This rank's number in its pipeline, from 0 along it."""
        return self.pipeline_ranks.index(self.global_rank)

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """Global ranks of this rank's pipeline, in stage order."""
        return self.all_pipelines[self.replica]

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """Global ranks that hold the same stage as this rank, one of each replica."""
        return tuple(ranks[self.stage] for ranks in self.all_pipelines)


def _fleet_topology(world_size: int) -> Optional[Any]:
    """The topology that ``fleet.init`` was given; None for one process without it."""
    try:
        return fleet.get_hybrid_communicate_group().topology()
    except (AttributeError, AssertionError):  # fleet.init has not been called
        if world_size == 1:
            return None
        raise UsageError(
            f"expected num_stages or topology, as the launch has {world_size} ranks; pass num_stages=N (the other "
            f"ranks become replicas), or call fleet.init with hybrid_configs={{'pp_degree': N}} first"
        ) from None


def _from_topology(topology: Any, num_stages: Optional[int], world_size: int) -> tuple[tuple[int, ...], ...]:
    if callable(getattr(topology, "topology", None)):
        topology = topology.topology()
    if not hasattr(topology, "get_hybrid_group_names"):
        raise UsageError(
            f"topology is what fleet.get_hybrid_communicate_group().topology() returns; got a {type(topology).__name__}"
        )
    sizes = {name: int(topology.get_dim(name)) for name in topology.get_hybrid_group_names()}
    pipe = next((name for name in _PIPE if name in sizes), None)
    data = next((name for name in _DATA if name in sizes), None)
    if pipe is None:
        raise UsageError(f"expected an axis called 'pipe' in the topology; it has {', '.join(sizes)}")
    others = [f"{name}={size}" for name, size in sizes.items() if name not in (pipe, data) and size > 1]
    if others:
        raise UsageError(
            f"a pipeline goes with data parallelism only, but the topology also has {', '.join(others)}; set the "
            f"degrees of these axes to 1"
        )
    if num_stages is not None and num_stages != sizes[pipe]:
        raise UsageError(
            f"num_stages={num_stages}, but the topology has {sizes[pipe]} along its axis {pipe!r}; pass one of them"
        )
    if topology.world_size() != world_size:
        raise UsageError(f"the topology is for {topology.world_size()} ranks, but the launch has {world_size}")
    coordinates = [topology.get_coord(rank)._asdict() for rank in range(world_size)]
    pipelines: list[list[int]] = [[-1] * sizes[pipe] for _ in range(world_size // sizes[pipe])]
    for rank, place in enumerate(coordinates):
        pipelines[place[data] if data else 0][place[pipe]] = rank
    return tuple(tuple(ranks) for ranks in pipelines)

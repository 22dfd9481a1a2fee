"""What all ranks know of the whole list of layers before any of them builds its own: the cut, the seed, the names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import paddle

from ..comm import Comm, LocalComm, create_comm
from ..comm.agreement import agree
from ..errors import GroupShardedError, UsageError
from .desc import check_entries, class_name
from .grid import Grid
from .naming import LayerNames, counts_now
from .partition import Number
from .probe import probe_all
from .profile import profile_layers
from .randomness import draw_seed
from .report import LayerFacts
from .segment import Segmentation, SegMethod, segment

__all__ = ["LayerPlan", "plan_layers"]


@dataclass
class LayerPlan:
    """Equal on every rank, but for the communicator."""

    segmentation: Segmentation
    facts: list[LayerFacts]  # of every layer of the list
    names: LayerNames  # automatic names of every layer's parameters
    base_seed: int  # that of each layer's weights is derived from it and the layer's number
    comm: Comm  # over all ranks of the launch


def plan_layers(
    entries: Sequence[Any],
    grid: Grid,
    method: SegMethod,
    num_chunks: int,
    sample_input: Optional[Any],
    seed: Optional[int],
) -> LayerPlan:
    """Look at all ``entries`` and cut them; collective over all ranks of the launch.

    Mistakes raise on every rank, also where only one has made them.
    """
    check_entries(entries)
    if not entries:
        raise UsageError("the list of layers is empty")
    own_seed = draw_seed() if seed is None else _check_seed(seed)
    comm = create_comm() if paddle.distributed.get_world_size() > 1 else LocalComm()
    try:
        return _plan(entries, grid, method, num_chunks, sample_input, own_seed, comm)
    except BaseException:
        comm.close()
        raise


def _plan(
    entries: Sequence[Any],
    grid: Grid,
    method: SegMethod,
    num_chunks: int,
    sample_input: Optional[Any],
    own_seed: int,
    comm: Comm,
) -> LayerPlan:
    names = [class_name(entry) for entry in entries]
    agree((comm,), "list of layers", None, (names, repr(method), grid.all_pipelines, num_chunks), _difference)
    started = comm.exchange((own_seed, dict(counts_now())), "seed and names")
    start = _largest([counts for _, counts in started])

    probes = probe_all(entries, comm)
    plan = LayerPlan(
        Segmentation((0, len(entries))),  # until the layers can be weighed
        [probe.facts for probe in probes],
        LayerNames(start, [probe.names for probe in probes]),
        started[0][0],
        comm,
    )

    def measure(what: str) -> Sequence[Number]:
        if what != "parameters":
            plan.facts = _measured(entries, plan, what, sample_input)
        return [weight(facts, what) for facts in plan.facts]

    plan.segmentation = segment(names, grid.num_stages, method, num_chunks, measure)
    return plan


def weight(facts: LayerFacts, what: str) -> Number:
    """The number by which a method of :data:`.segment.MEASURES` weighs a layer."""
    value = {"parameters": facts.parameters, "time": facts.time, "memory": facts.memory_bytes}[what]
    return value or 0


def _measured(entries: Sequence[Any], plan: LayerPlan, what: str, sample_input: Optional[Any]) -> list[LayerFacts]:
    """The facts with what rank 0 has measured: its numbers count everywhere, as clocks differ."""
    problem: Optional[GroupShardedError] = None
    measured: list[tuple[float, int]] = []
    if sample_input is None:
        problem = UsageError(
            f"seg_method {what!r} runs each layer once; pass sample_input, what the first layer gets for a micro-batch"
        )
    elif plan.comm.rank == 0:
        try:
            measured = profile_layers(entries, sample_input, plan.base_seed)
        except GroupShardedError as error:
            problem = error
    agree((plan.comm,), f"segment by {what}", problem)
    decided = plan.comm.exchange(measured, f"segment by {what}")[0]
    return [
        replace(facts, time=seconds, memory_bytes=num_bytes) for facts, (seconds, num_bytes) in zip(plan.facts, decided)
    ]


def _check_seed(seed: int) -> int:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UsageError(f"seed is a whole number, got {seed!r}")
    return seed


def _largest(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    """The counts from which on no rank has given a name to anything yet."""
    keys = dict.fromkeys(key for each in counts for key in each)
    return {key: max(each.get(key, 0) for each in counts) for key in keys}


def _difference(rank: int, value: Any, other_rank: int, other: Any) -> UsageError:
    titles = ("layers", "seg_method", "grid of ranks", "num_virtual_pipeline_stages")
    title, mine, its = next((title, a, b) for title, a, b in zip(titles, value, other) if a != b)
    return UsageError(
        f"expected the same description on every rank, but {title} is {mine} on rank {rank} and {its} on rank "
        f"{other_rank}; build the list of layers alike on all ranks"
    )

"""What several tests draw from: plans, and an account of what depends on what that is independent of the package."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from paddle_group_sharded.pipeline.action import Action, Kind, Plan
from paddle_group_sharded.pipeline.schedules import SCHEDULES

ONE_CHUNK = ("1f1b", "zb_h1")


@st.composite
def scheduled_plans(draw: st.DrawFn) -> Plan:
    """A plan of any schedule of the package."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    chunks = 1 if name in ONE_CHUNK else draw(st.integers(1, 3))
    return SCHEDULES[name](draw(st.integers(1, 5)), draw(st.integers(1, 7)), chunks)


def computes(num_stages: int, num_micro_batches: int, split: bool) -> list[Action]:
    """All that has to be computed."""
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    return [Action(s, k, m) for s in range(num_stages) for m in range(num_micro_batches) for k in kinds]


def dependencies(action: Action, num_stages: int, split: bool) -> Iterator[Action]:
    """Computes that come before ``action`` by the nature of training, on whatever ranks."""
    stage, kind, batch = action
    backward = Kind.I if split else Kind.B
    if kind is Kind.F and stage > 0:
        yield Action(stage - 1, Kind.F, batch)
    if kind is Kind.W:
        yield Action(stage, Kind.I, batch)
    if kind is backward:
        yield Action(stage, Kind.F, batch)
        if stage + 1 < num_stages:
            yield Action(stage + 1, backward, batch)


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, ...]:
    """Ranks of 1 to 5 stages, in any arrangement that leaves no rank without a stage."""
    stages = draw(st.integers(1, 5))
    holders = [draw(st.integers(0, stages - 1)) for _ in range(stages)]
    return tuple(sorted(set(holders)).index(holder) for holder in holders)


@st.composite
def runnable_plans(draw: st.DrawFn) -> Plan:
    """Any order of computes that respects the dependencies, seen from each rank: it can run by construction."""
    holders, batches, split = draw(placements()), draw(st.integers(1, 4)), draw(st.booleans())
    left = computes(len(holders), batches, split)
    rows: list[list[Action]] = [[] for _ in set(holders)]
    done: set[Action] = set()
    while left:
        ready = [a for a in left if done.issuperset(dependencies(a, len(holders), split))]
        action = draw(st.sampled_from(ready))
        left.remove(action)
        done.add(action)
        rows[holders[action.stage]].append(action)
    return Plan(tuple(map(tuple, rows)), holders, batches)


@st.composite
def shuffled_plans(draw: st.DrawFn) -> Plan:
    """Each rank's computes in any order at all; most of these cannot run."""
    holders, batches, split = draw(placements()), draw(st.integers(1, 3)), draw(st.booleans())
    rows = []
    for rank in range(len(set(holders))):
        row = [a for a in computes(len(holders), batches, split) if holders[a.stage] == rank]
        rows.append(tuple(draw(st.permutations(row))))
    return Plan(tuple(rows), holders, batches)


def is_split(plan: Plan) -> bool:
    """Whether the backward of a plan is split."""
    return any(action.kind is Kind.I for row in plan.actions for action in row)

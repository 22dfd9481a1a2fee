"""Bytes and elements of a step against closed forms: the ZeRO formulas and volumes (arXiv 1910.02054)."""

from __future__ import annotations

import pytest

from paddle_group_sharded.sharding.facts import GroupFacts, ParamFacts, StepFacts
from paddle_group_sharded.sharding.forecast import Forecast, data_parallel, formula_bytes, sharded
from paddle_group_sharded.sharding.layout import GroupLayout
from paddle_group_sharded.sharding.level import Level, Placements
from paddle_group_sharded.sharding.replay import Limits, assumed_moments
from paddle_group_sharded.sharding.traffic import buckets

COUNT = 6
SIDE = 768  # its square is divided by 2, 3, 4 and 64 ranks, and by 16 elements beyond
BLOCK = SIDE * SIDE
PSI = COUNT * BLOCK
LIMITS = Limits(2, 2)
WHOLE = Placements(False, False, False)
# Bytes of a parameter, of its gradient, of its states with the master.
FLOAT32, SIXTEEN_BIT = (4, 4, 8), (2, 2, 12)


def parameters(kinds: tuple[int, int, int], count: int = COUNT) -> list[ParamFacts]:
    size, grad, state = kinds
    return [
        ParamFacts(BLOCK, size, grad, True, True, state_bytes=BLOCK * state, has_master=size < 4) for _ in range(count)
    ]


def groups(world_size: int, is_sharded: bool, count: int = COUNT) -> list[GroupFacts]:
    return [GroupFacts((i,), GroupLayout.pack([(f"p{i}", (SIDE, SIDE))], world_size), is_sharded) for i in range(count)]


def step(is_sharded: bool, activations: int = 0, count: int = COUNT, **facts: object) -> StepFacts:
    members = [(i,) for i in range(count)] if is_sharded else []
    return StepFacts(assumed_moments([BLOCK] * count, members, activations), num_flags=count, **facts)  # type: ignore[arg-type]


def forecast(level: Level, world_size: int, kinds: tuple[int, int, int] = FLOAT32, **facts: object) -> Forecast:
    dp_size = int(facts.pop("dp_size", 1))  # type: ignore[call-overload]
    activations = int(facts.pop("activations", 0))  # type: ignore[call-overload]
    is_sharded = level.placements.param and world_size > 1
    return sharded(
        parameters(kinds),
        groups(world_size, is_sharded),
        level.placements,
        step(is_sharded, activations, **facts),
        world_size,
        LIMITS,
        dp_size,
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("kinds", [FLOAT32, SIXTEEN_BIT])
@pytest.mark.parametrize("level", list(Level))
def test_states_are_the_formula(level: Level, kinds: tuple[int, int, int], world_size: int) -> None:
    p, g, k = kinds
    n = world_size
    expected = {Level.OS: p + g + k / n, Level.OS_G: p + (g + k) / n, Level.P_G_OS: (p + g + k) / n}[level] * PSI
    found = forecast(level, world_size, kinds)
    assert found.formula == pytest.approx(expected)
    assert found.parameters + found.gradients + found.states == pytest.approx(expected)


def test_example_of_the_paper() -> None:
    """Figure 1: 7.5 billion parameters in 16 bits on 64 ranks, in GB."""
    facts = [ParamFacts(7_500_000_000, 2, 2, True, True, state_bytes=12 * 7_500_000_000)]
    placements = [WHOLE, *(level.placements for level in Level)]
    found = [formula_bytes(facts, each, 64) / 1e9 for each in placements]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


@pytest.mark.parametrize("world_size", [2, 3, 4, 64])
def test_volume(world_size: int) -> None:
    """2 Psi (N - 1) / N, and at p_g_os 3 Psi but for the last two blocks, which stay from forward to backward."""
    factor = (world_size - 1) / world_size
    flags = 2 * (2 + COUNT) * factor
    for level in (Level.OS, Level.OS_G):
        found = forecast(level, world_size)
        assert found.sent == pytest.approx(2 * PSI * factor + flags)
        assert found.collectives == 2 * COUNT + 1
    found = forecast(Level.P_G_OS, world_size)
    assert found.sent == pytest.approx((3 * PSI - 2 * BLOCK) * factor + flags)
    assert found.collectives == 3 * COUNT - 2 + 1
    plain = data_parallel(parameters(FLOAT32), step(False), world_size)
    assert plain.sent == pytest.approx(2 * PSI * factor)


def test_norms_travel_with_the_flags() -> None:
    assert forecast(Level.OS, 2, num_norms=COUNT).sent - forecast(Level.OS, 2).sent == COUNT


def test_one_rank_sends_nothing() -> None:
    assert all(forecast(level, 1).sent == 0 for level in Level)
    assert data_parallel(parameters(FLOAT32), step(False), 1).collectives == 0


def test_replicas() -> None:
    """Each averages its shard: 2 (Psi / N) (R - 1) / R more, and two signals and the flags."""
    for level in (Level.OS_G, Level.P_G_OS):
        more = forecast(level, 4, dp_size=2).sent - forecast(level, 4).sent
        assert more == pytest.approx(2 * (PSI / 4) / 2 + 2 * (2 + COUNT) / 2)


@pytest.mark.parametrize("world_size", [2, 4])
def test_peaks(world_size: int) -> None:
    """States; what is kept for backward or whole gradients, whichever are more; groups gathered and under reduction."""
    block = 4 * BLOCK
    n = world_size
    little, much = 1000, 40 * block
    os_kept, os_g_kept, all_kept = (4 + 8 / n) * PSI, (4 + 12 / n) * PSI, 16 / n * PSI
    assert forecast(Level.OS, n, activations=little).peak == pytest.approx(os_kept + 4 * PSI, abs=little)
    assert forecast(Level.OS_G, n, activations=little).peak == pytest.approx(os_g_kept + 3 * block, abs=little)
    assert forecast(Level.P_G_OS, n, activations=little).peak == pytest.approx(all_kept + 5 * block, abs=little)
    # With the first gradient, when all activations are still there: it alone, and at p_g_os also two gathered groups.
    assert forecast(Level.OS, n, activations=much).peak == pytest.approx(os_kept + much + block)
    assert forecast(Level.OS_G, n, activations=much).peak == pytest.approx(os_g_kept + much + block)
    assert forecast(Level.P_G_OS, n, activations=much).peak == pytest.approx(all_kept + much + 3 * block)


def test_workspace_and_other_bytes_are_added() -> None:
    for level in Level:
        plain = forecast(level, 2, activations=40 * BLOCK)
        more = forecast(level, 2, activations=40 * BLOCK, workspace=100, other_bytes=10)
        assert more.peak - plain.peak == 110


def test_clipping_copies_gradients_and_masters_need_casts() -> None:
    """At the step, where the passes have been smaller."""
    peak = {clips: forecast(Level.OS_G, 1, clips=clips).peak for clips in (False, True)}
    assert peak[False] == 16 * PSI + 3 * 4 * BLOCK
    assert peak[True] == 16 * PSI + 4 * PSI
    assert forecast(Level.OS_G, 1, SIXTEEN_BIT).peak == 16 * PSI + 4 * PSI  # gradients as float32
    assert forecast(Level.OS_G, 1, SIXTEEN_BIT, clips=True).peak == 16 * PSI + 8 * PSI


def test_data_parallel_holds_gradients_twice_and_a_bucket() -> None:
    found = data_parallel(parameters(FLOAT32), step(False), 2)
    assert (found.parameters, found.gradients, found.states) == (4 * PSI, 4 * PSI, 8 * PSI)
    # The first parameter fills the small bucket alone, the five others one of 25 MiB.
    assert found.peak == 20 * PSI + 5 * 4 * BLOCK
    much = 40 * 4 * BLOCK  # with the first gradient, which is added to the memory of the last step's
    assert data_parallel(parameters(FLOAT32), step(False, much), 2).peak == 20 * PSI + much + 4 * BLOCK
    assert data_parallel(parameters(FLOAT32), step(False), 1).peak == 16 * PSI + 4 * BLOCK


def test_buckets_of_data_parallel() -> None:
    """As ``core.eager_assign_group_by_size`` of Paddle 3.3.1 and 2.6.2 answered for these shapes."""
    shapes = [(300, 300), (300, 1000), (1000, 1000), (1000, 1000), (2000, 1000), (2000, 2000), (2000, 2000)]
    shapes += [(100, 100), (3000, 3000), (10, 10)]
    facts = [ParamFacts(rows * columns, 4, 4, True, True) for rows, columns in shapes]
    assert buckets(facts) == [(0, 1), (2, 3, 4, 5), (6, 7, 8), (9,)]
    many = [ParamFacts(512 * 512, 4, 4, True, True) for _ in range(60)]
    assert [len(bucket) for bucket in buckets(many)] == [1, 25, 25, 9]


def test_parameters_without_gradient() -> None:
    """Frozen ones have none and no states; what nobody steps keeps its whole gradient at every level."""
    frozen = ParamFacts(BLOCK, 4, 4, False, True)
    loose = ParamFacts(BLOCK, 4, 4, True, False)
    stepped = parameters(FLOAT32, 1)[0]
    for level in Level:
        found = sharded(
            [stepped, frozen, loose], groups(2, False, 3), level.placements, step(False, count=3), 2, LIMITS
        )
        assert found.gradients == 4 * BLOCK + 4 * BLOCK // (2 if level.placements.grad else 1)
        assert found.states == 4 * BLOCK
        assert found.collectives == 1 + 2  # of the one group that is stepped


def test_ranks_differ() -> None:
    """Fifteen elements cannot be shared by two ranks: shards are multiples of 16 elements."""
    facts = [ParamFacts(15, 4, 4, True, True, state_bytes=120, scalar_bytes=8)]
    layout = GroupLayout.pack([("p", (15,))], 2)
    moments = assumed_moments([15], [], 0)
    found = sharded(facts, [GroupFacts((0,), layout, False)], Level.OS.placements, StepFacts(moments), 2, LIMITS)
    assert [rank.states for rank in found.by_rank] == [128, 0]
    assert found.states == 128


def test_small_neighbours_share_states_that_cover_the_gaps() -> None:
    facts = [ParamFacts(8, 4, 4, True, True, state_bytes=64, scalar_bytes=8) for _ in range(4)]
    layout = GroupLayout.pack([(f"p{i}", (8,)) for i in range(4)], 1)  # 8 elements and 8 of gap, four times
    moments = assumed_moments([8] * 4, [], 0)
    for joins, expected in ((True, (8 + 3 * 16) * 8 + 8), (False, 4 * (64 + 8))):
        found = sharded(
            facts,
            [GroupFacts((0, 1, 2, 3), layout, False)],
            Level.OS.placements,
            StepFacts(moments, joins_neighbours=joins),
            1,
            LIMITS,
        )
        assert found.states == expected
        # Beside parameters with gaps: the gradients, and a packed copy of them.
        assert found.peak == 4 * 64 + expected + 4 * (32 + 56)


def test_whole_parameters_are_shared_out_largest_first() -> None:
    """Three equal parameters on two ranks: two and one, each with a copy of its own; twice the volume and more."""
    facts = parameters(FLOAT32, 3)
    for level in (Level.OS, Level.P_G_OS):
        is_sharded = level.placements.param
        found = sharded(
            facts,
            groups(2, is_sharded, 3),
            level.placements,
            step(is_sharded, count=3, steps_whole=True),
            2,
            LIMITS,
        )
        assert [rank.states for rank in found.by_rank] == [2 * 12 * BLOCK, 12 * BLOCK]
        moved = {Level.OS: 3 + 3 + 3 + 3, Level.P_G_OS: 4 + 3 + 3 + 6 + 3}[level]
        assert found.sent == pytest.approx(moved * BLOCK / 2 + 2 * (2 + 3) / 2)

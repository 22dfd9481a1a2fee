"""Which parameters share a buffer: kinds are kept apart, buckets stay below their limit, blocks stay together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paddle_group_sharded.sharding.grouping import MERGE_BELOW, Group, ParamInfo, group_params

NUMELS = st.one_of(st.integers(0, 50), st.integers(MERGE_BELOW // 2, 2 * MERGE_BELOW))


@st.composite
def models(draw: st.DrawFn) -> list[ParamInfo]:
    """Parameters whose blocks are consecutive."""
    unit, params = 0, []
    for _ in range(draw(st.integers(0, 20))):
        unit += draw(st.integers(0, 1))
        params.append(ParamInfo(draw(NUMELS), draw(st.sampled_from(["fp32", "bf16"])), unit, draw(st.booleans())))
    return params


@given(models(), st.integers(1, 2 * MERGE_BELOW))
def test_each_parameter_is_in_one_group_of_its_kind(params: list[ParamInfo], bucket: int) -> None:
    groups = group_params(params, bucket)
    assert sorted(index for group in groups for index in group.members) == list(range(len(params)))
    assert [group.members[0] for group in groups] == sorted(group.members[0] for group in groups)
    for group in groups:
        assert list(group.members) == sorted(group.members)
        assert len({(params[index].kind, params[index].sharded) for index in group.members}) == 1
        assert params[group.members[0]].sharded == group.sharded


@given(models(), st.integers(1, 2 * MERGE_BELOW))
def test_buckets_keep_their_limit_and_are_filled(params: list[ParamInfo], bucket: int) -> None:
    whole = [group for group in group_params(params, bucket) if not group.sharded]
    last: dict[object, int] = {}
    for group in whole:
        sizes = [params[index].numel for index in group.members]
        assert sum(sizes) <= bucket or len([size for size in sizes if size]) == 1
        kind = params[group.members[0]].kind
        if kind in last:
            assert last[kind] + sizes[0] > bucket  # it would not have fitted into the one before
        last[kind] = sum(sizes)


@given(models(), st.integers(1, 2 * MERGE_BELOW))
def test_a_block_is_never_cut(params: list[ParamInfo], bucket: int) -> None:
    owner: dict[object, int] = {}
    for number, group in enumerate(group_params(params, bucket)):
        for index in group.members:
            info = params[index]
            if info.sharded:
                assert owner.setdefault((info.kind, info.unit), number) == number


@given(models())
def test_small_neighbours_are_merged(params: list[ParamInfo]) -> None:
    """Of one kind's groups all but the last hold MERGE_BELOW elements, and without their last block fewer."""
    groups = [group for group in group_params(params, 1) if group.sharded]
    for kind in ("fp32", "bf16"):
        for group in [group for group in groups if params[group.members[0]].kind == kind][:-1]:
            infos = [params[index] for index in group.members]
            assert sum(info.numel for info in infos) >= MERGE_BELOW
            assert sum(info.numel for info in infos if info.unit != infos[-1].unit) < MERGE_BELOW


def test_examples() -> None:
    def info(numel: int, unit: int, sharded: bool) -> ParamInfo:
        return ParamInfo(numel, "fp32", unit, sharded)

    whole = [info(numel, 0, False) for numel in (3, 3, 3, 20, 1)]
    assert group_params(whole, 6) == [Group((0, 1), False), Group((2,), False), Group((3,), False), Group((4,), False)]
    large = MERGE_BELOW
    sharded = [info(numel, unit, True) for numel, unit in ((large, 0), (5, 0), (5, 1), (large, 2), (5, 2), (7, 3))]
    assert group_params(sharded, 6) == [Group((0, 1), True), Group((2, 3, 4), True), Group((5,), True)]
    assert group_params([], 6) == []

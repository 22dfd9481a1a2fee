"""Layouts: each element of each parameter belongs to exactly one rank, padding to none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_group_sharded.sharding.layout import GroupLayout, ParamSlot, Piece

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=8)
WORLD_SIZES = st.integers(1, 64)


def pack(shapes: list[tuple[int, ...]], world_size: int) -> GroupLayout:
    return GroupLayout.pack([(f"p{index}", shape) for index, shape in enumerate(shapes)], world_size)


@given(SHAPES, WORLD_SIZES)
def test_every_element_has_one_owner(shapes: list[tuple[int, ...]], world_size: int) -> None:
    """Against a buffer written out element by element and cut into equal parts."""
    layout = pack(shapes, world_size)
    elements = [(index, k) for index, shape in enumerate(shapes) for k in range(math.prod(shape))]
    share = math.ceil(len(elements) / world_size)
    buffer = elements + [None] * (share * world_size - len(elements))
    assert (layout.param_numel, layout.shard_numel, layout.numel) == (len(elements), share, len(buffer))
    for rank in range(world_size):
        start, stop = layout.shard_bounds(rank)
        assert (start, stop) == (rank * share, (rank + 1) * share)
        found: list[object] = [None] * share
        for piece in layout.owned(rank):
            assert piece.numel > 0
            for k in range(piece.numel):
                assert found[piece.shard_start + k] is None
                found[piece.shard_start + k] = (piece.index, piece.start + k)
        assert found == buffer[start:stop]


@given(SHAPES, WORLD_SIZES)
def test_padding_is_less_than_the_world_size(shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = pack(shapes, world_size)
    assert 0 <= layout.numel - layout.param_numel < world_size
    assert layout.numel % world_size == 0


@given(SHAPES, WORLD_SIZES, st.data())
def test_piece_and_owned_agree(shapes: list[tuple[int, ...]], world_size: int, data: st.DataObject) -> None:
    layout = pack(shapes, world_size)
    rank = data.draw(st.integers(0, world_size - 1))
    by_index = {piece.index: piece for piece in layout.owned(rank)}
    assert list(by_index) == sorted(by_index)
    for index in range(len(shapes)):
        assert layout.piece(index, rank) == by_index.get(index)


def test_the_example_of_the_module() -> None:
    layout = GroupLayout.pack([("a", (5,)), ("b", (2, 2))], 2)
    assert layout.numel == 10 and layout.shard_numel == 5 and layout.param_numel == 9
    assert layout.owned(0) == (Piece(0, 0, 5, 0),)
    assert layout.owned(1) == (Piece(1, 0, 4, 0),)


def test_a_parameter_over_several_ranks() -> None:
    layout = GroupLayout.pack([("a", (1,)), ("b", (7,)), ("c", ())], 3)
    assert layout.owned(0) == (Piece(0, 0, 1, 0), Piece(1, 0, 2, 1))
    assert layout.owned(1) == (Piece(1, 2, 5, 0),)
    assert layout.owned(2) == (Piece(1, 5, 7, 0), Piece(2, 0, 1, 2))


def test_fewer_elements_than_ranks() -> None:
    layout = GroupLayout.pack([("a", (3,))], 64)
    assert [len(layout.owned(rank)) for rank in range(64)] == [1, 1, 1] + [0] * 61


def test_nothing_to_lay_out() -> None:
    for layout in (GroupLayout.pack([], 4), GroupLayout.pack([("a", (0, 3))], 4)):
        assert layout.numel == layout.shard_numel == layout.param_numel == 0
        assert all(layout.owned(rank) == () for rank in range(4))


@pytest.mark.parametrize(
    "slots",
    [
        (ParamSlot("a", (2,), 0, 2), ParamSlot("b", (2,), 3, 5)),  # a gap
        (ParamSlot("a", (2,), 0, 2), ParamSlot("b", (2,), 1, 3)),  # an overlap
        (ParamSlot("a", (2,), 1, 3),),  # does not begin at 0
        (ParamSlot("a", (2, 2), 0, 3),),  # does not hold its shape
    ],
)
def test_wrong_slots_are_refused(slots: tuple[ParamSlot, ...]) -> None:
    with pytest.raises(ValueError, match=f"'{slots[-1].name}'"):
        GroupLayout(slots, 2)


@pytest.mark.parametrize("world_size", [0, -1])
def test_wrong_world_size_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, got {world_size}"):
        GroupLayout.pack([("a", (2,))], world_size)

"""Layouts: each element of each parameter belongs to exactly one rank, padding to none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_group_sharded.comm.reduction import SMALL
from paddle_group_sharded.sharding.layout import ALIGN, RUN_LIMIT, GroupLayout, ParamSlot, Piece, Run

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=8)
WORLD_SIZES = st.integers(1, 64)


def pack(shapes: list[tuple[int, ...]], world_size: int) -> GroupLayout:
    return GroupLayout.pack([(f"p{index}", shape) for index, shape in enumerate(shapes)], world_size)


@given(SHAPES, WORLD_SIZES)
def test_every_element_has_one_owner(shapes: list[tuple[int, ...]], world_size: int) -> None:
    """Against a buffer written out element by element and cut into equal parts of whole vectors."""
    layout = pack(shapes, world_size)
    elements: list[object] = []
    for index, shape in enumerate(shapes):
        elements += [None] * (-len(elements) % ALIGN)
        elements += [(index, k) for k in range(math.prod(shape))]
    share = math.ceil(math.ceil(len(elements) / world_size) / ALIGN) * ALIGN
    buffer = elements + [None] * (share * world_size - len(elements))
    assert (layout.shard_numel, layout.numel) == (share, len(buffer))
    assert layout.param_numel == sum(element is not None for element in elements)
    assert [k for start, stop in layout.gaps for k in range(start, stop)] == [
        k for k, element in enumerate(buffer) if element is None
    ]
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
def test_cuts_lie_between_vectors(shapes: list[tuple[int, ...]], world_size: int) -> None:
    """No piece begins or ends inside a vector, but for the end of its parameter."""
    layout = pack(shapes, world_size)
    for rank in range(world_size):
        for piece in layout.owned(rank):
            assert piece.start % ALIGN == piece.shard_start % ALIGN == 0
            assert piece.stop % ALIGN == 0 or piece.stop == layout.slots[piece.index].numel
    assert layout.numel - layout.param_numel < ALIGN * (len(shapes) + world_size + 1)


@given(st.lists(st.sampled_from([0, 1, 5, 16, 100, SMALL, SMALL + 1, SMALL + 16, 5 * SMALL]), max_size=300))
def test_runs_hold_every_slot_once(sizes: list[int]) -> None:
    """Large slots alone, small ones together up to the limit; gaps make up the rest."""
    layout = pack([(size,) for size in sizes], 2)
    position = 0
    seen = []
    for stretch in layout.stretches:
        if isinstance(stretch, int):
            position += stretch
            continue
        assert stretch.start == position
        position = stretch.stop
        seen += [index for index in stretch.slots if sizes[index]]
        assert len(stretch.slots) == 1 or stretch.numel <= RUN_LIMIT
        assert len(stretch.slots) == 1 or all(sizes[index] <= SMALL for index in stretch.slots)
    assert seen == [index for index, size in enumerate(sizes) if size]
    assert position <= layout.numel


@given(SHAPES, WORLD_SIZES, st.data())
def test_piece_and_owned_agree(shapes: list[tuple[int, ...]], world_size: int, data: st.DataObject) -> None:
    layout = pack(shapes, world_size)
    rank = data.draw(st.integers(0, world_size - 1))
    by_index = {piece.index: piece for piece in layout.owned(rank)}
    assert list(by_index) == sorted(by_index)
    for index in range(len(shapes)):
        assert layout.piece(index, rank) == by_index.get(index)


def test_the_example_of_the_module() -> None:
    layout = GroupLayout.pack([("a", (40,)), ("b", (4, 5))], 2)
    assert layout.numel == 96 and layout.shard_numel == 48 and layout.param_numel == 60
    assert layout.gaps == ((40, 48), (68, 96)) and layout.runs == (Run(range(2), 0, 68),)
    assert layout.owned(0) == (Piece(0, 0, 40, 0),)
    assert layout.owned(1) == (Piece(1, 0, 20, 0),)


def test_a_parameter_over_several_ranks() -> None:
    layout = GroupLayout.pack([("a", (1,)), ("b", (70,)), ("c", ())], 3)
    assert layout.owned(0) == (Piece(0, 0, 1, 0), Piece(1, 0, 32, 16))
    assert layout.owned(1) == (Piece(1, 32, 70, 0),)
    assert layout.owned(2) == (Piece(2, 0, 1, 0),)


def test_fewer_elements_than_ranks() -> None:
    layout = GroupLayout.pack([("a", (3,))], 64)
    assert [len(layout.owned(rank)) for rank in range(64)] == [1] + [0] * 63


def test_nothing_to_lay_out() -> None:
    for layout in (GroupLayout.pack([], 4), GroupLayout.pack([("a", (0, 3))], 4)):
        assert layout.numel == layout.shard_numel == layout.param_numel == 0
        assert all(layout.owned(rank) == () for rank in range(4))


@pytest.mark.parametrize(
    "slots",
    [
        (ParamSlot("a", (2,), 0, 2), ParamSlot("b", (2,), 2, 4)),  # not aligned
        (ParamSlot("a", (2,), 0, 2), ParamSlot("b", (2,), 32, 34)),  # too wide a gap
        (ParamSlot("a", (20,), 0, 20), ParamSlot("b", (2,), 16, 18)),  # an overlap
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

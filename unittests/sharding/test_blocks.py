"""Which layers count as one block."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from paddle import nn

from paddle_group_sharded.sharding.blocks import block_of_layers


def block(*children: nn.Layer) -> nn.Layer:
    """A user's layer that holds others as attributes."""
    layer = nn.Layer()
    for index, child in enumerate(children):
        setattr(layer, f"child{index}", child)
    return layer


def leaves(depth: int = 0) -> nn.Layer:
    return nn.ReLU() if depth == 0 else block(leaves(depth - 1), leaves(depth - 1))


def numbers_of(root: nn.Layer, *layers: nn.Layer) -> list[int]:
    numbers = block_of_layers(root)
    return [numbers[id(layer)] for layer in layers]


def together(root: nn.Layer, layer: nn.Layer) -> bool:
    """Whether all of ``layer`` is one block."""
    return len(set(numbers_of(root, *layer.sublayers(include_self=True)))) == 1


def test_items_of_a_layer_list_are_blocks() -> None:
    blocks = nn.LayerList([leaves(2) for _ in range(3)])
    stem, head = nn.ReLU(), nn.ReLU()
    root = block(stem, blocks, head)
    assert all(together(root, item) for item in blocks)
    assert len(set(numbers_of(root, stem, *blocks, head))) == 5


def test_items_of_a_sequential_are_blocks() -> None:
    root = nn.Sequential(leaves(1), leaves(1))
    assert all(together(root, item) for item in root)
    assert len(set(numbers_of(root, *root))) == 2


def test_a_sequential_inside_an_item_belongs_to_it() -> None:
    item = block(nn.Sequential(nn.ReLU(), nn.ReLU()), nn.ReLU())
    root = block(nn.LayerList([item, leaves(1)]))
    assert together(root, item)


def test_an_item_with_a_list_of_its_own_is_opened() -> None:
    inner = nn.LayerList([leaves(1), leaves(1)])
    stage = block(inner, nn.ReLU())
    root = block(nn.LayerList([stage, leaves(1)]))
    assert all(together(root, item) for item in inner)
    assert len(set(numbers_of(root, *inner))) == 2


def test_lists_inside_lists_are_opened() -> None:
    stages = nn.LayerList([nn.LayerList([leaves(1), leaves(1)]), nn.Sequential(leaves(1), leaves(1))])
    root = block(stages)
    items = [item for stage in stages for item in stage]
    assert all(together(root, item) for item in items)
    assert len(set(numbers_of(root, *items))) == 4


def test_a_model_without_lists_is_cut_into_its_children() -> None:
    encoder, decoder = leaves(2), leaves(2)
    root = block(encoder, decoder)
    assert together(root, encoder) and together(root, decoder)
    assert len(set(numbers_of(root, root, encoder, decoder))) == 3


def test_a_layer_under_two_names_has_the_first_one_s_block() -> None:
    shared = nn.ReLU()
    root = nn.Sequential(block(shared), block(shared))
    first, second, third = numbers_of(root, root[0], shared, root[1])
    assert first == second != third


def test_one_layer_alone() -> None:
    root = nn.ReLU()
    assert block_of_layers(root) == {id(root): 0}


TREES: Any = st.recursive(
    st.just("leaf"),
    lambda inner: st.tuples(st.sampled_from(["block", "list", "sequential"]), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=12,
)


def build(tree: Any) -> nn.Layer:
    if tree == "leaf":
        return nn.ReLU()
    kind, children = tree
    layers = [build(child) for child in children]
    if kind == "list":
        return nn.LayerList(layers)
    return nn.Sequential(*layers) if kind == "sequential" else block(*layers)


@given(TREES)
def test_every_layer_has_a_number_and_numbers_have_no_gaps(tree: Any) -> None:
    root = build(tree)
    numbers = block_of_layers(root)
    assert set(numbers) == {id(layer) for layer in root.sublayers(include_self=True)}
    assert set(numbers.values()) == set(range(len(set(numbers.values()))))

from __future__ import annotations

import re
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_group_sharded.errors import UsageError
from paddle_group_sharded.pipeline.segment import (
    Segmentation,
    by_bounds,
    by_class_weight,
    by_layer,
    by_weight,
    segment,
    uniform,
)

GPT = ["Embedding", *["Block"] * 6, "LayerNorm", "Linear"]


@pytest.mark.parametrize(
    ("layers", "stages", "bounds"),
    [(10, 4, (0, 2, 4, 7, 10)), (15, 2, (0, 7, 15)), (8, 2, (0, 4, 8)), (3, 3, (0, 1, 2, 3))],
)
def test_uniform_gives_what_is_over_to_the_last_stages(layers: int, stages: int, bounds: tuple[int, ...]) -> None:
    assert uniform(layers, stages).bounds == bounds


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 30))
def test_uniform_covers_all_layers_in_sizes_that_differ_by_one(stages: int, chunks: int, more: int) -> None:
    cut = uniform(stages * chunks + more, stages, chunks)
    sizes = [len(part) for part in cut.parts]
    assert [layer for part in cut.parts for layer in part] == list(range(cut.num_layers))
    assert sizes == sorted(sizes)
    assert max(sizes) - min(sizes) <= 1
    assert (cut.num_stages, cut.num_chunks, cut.num_virtual_stages) == (stages, chunks, stages * chunks)


def test_chunks_are_dealt_to_the_stages_in_turns() -> None:
    cut = uniform(10, 2, 2)
    assert cut.bounds == (0, 2, 4, 7, 10)
    assert cut.layers_of(0) == (range(0, 2), range(4, 7))
    assert cut.layers_of(1) == (range(2, 4), range(7, 10))
    assert [cut.rank_of_layer(layer) for layer in range(10)] == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert [cut.virtual_stage_of_layer(layer) for layer in (0, 3, 6, 9)] == [0, 1, 2, 3]
    assert cut.totals([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == (21, 34)


def test_layer_pattern_cuts_right_behind_a_match() -> None:
    assert by_layer(GPT, "Block", 2).bounds == (0, 4, 9)
    assert by_layer(GPT, "Block", 3).bounds == (0, 3, 5, 9)
    assert by_layer(GPT, "Block", 2, 3).bounds == (0, 2, 3, 4, 5, 6, 9)


def test_layer_pattern_is_searched_without_regard_to_case() -> None:
    names = ["ColumnParallelLinear", "ReLU", "Linear", "Dropout"]
    assert by_layer(names, "linear", 2).bounds == (0, 1, 4)
    assert by_layer(names, "linear|dropout", 3).bounds == (0, 1, 3, 4)
    with pytest.raises(UsageError, match=re.escape("'layer:^Linear$' matches 1 layers, too few for 2 stages")):
        by_layer(names, "^Linear$", 2)


def test_a_pattern_may_contain_a_colon() -> None:
    assert segment(["A:B", "A:B"], 2, "layer:A:B").bounds == (0, 1, 2)


def test_42_layers_on_16_stages() -> None:
    names = ["Embedding", *["Block"] * 42, "Norm", "Head"]
    cut = by_layer(names, "Block", 16)
    counts = [sum(names[layer] == "Block" for layer in part) for part in cut.parts]
    assert sorted(counts) == [2] * 6 + [3] * 10


@given(st.lists(st.sampled_from("AB"), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 3))
def test_matches_per_stage_differ_by_one_and_no_stage_is_empty(names: list[str], stages: int, chunks: int) -> None:
    if names.count("A") < stages * chunks:
        with pytest.raises(UsageError, match="none of the classes|too few for|cannot fill"):
            by_layer(names, "A", stages, chunks)
        return
    cut = by_layer(names, "A", stages, chunks)
    counts = [sum(names[layer] == "A" for layer in part) for part in cut.parts]
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1
    assert cut.bounds[-1] == len(names)


def test_a_pattern_that_matches_nothing_is_answered_with_the_class_names() -> None:
    with pytest.raises(
        UsageError, match="'layer:Blok' matches none of the classes in the list: Embedding, Block, LayerNorm, Linear"
    ):
        segment(GPT, 2, "layer:Blok")
    with pytest.raises(UsageError, match="not a regular expression"):
        segment(GPT, 2, "layer:(")


weights = st.lists(st.integers(0, 20) | st.floats(0, 1, allow_nan=False), min_size=1, max_size=8)


@given(weights, st.data())
def test_the_largest_stage_is_as_small_as_any_cut_allows(weights: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    chunks = data.draw(st.sampled_from([c for c in range(1, parts + 1) if parts % c == 0]))
    cut = by_weight(weights, parts // chunks, chunks)
    splits = ((0, *inner, len(weights)) for inner in combinations(range(1, len(weights)), parts - 1))
    best = min(max(sum(weights[a:b]) for a, b in zip(s, s[1:])) for s in splits)
    largest = max(sum(weights[layer] for layer in part) for part in cut.parts)
    assert largest == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("method", ["parameters", "time", "memory"])
def test_measured_methods_ask_for_their_measure(method: str) -> None:
    asked = []

    def measure(what: str) -> list[float]:
        asked.append(what)
        return [9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]

    cut = segment(GPT, 2, method, measure=measure)
    assert asked == [method]
    assert cut.bounds == (0, 1, 9)
    assert cut.method == method
    assert cut.balance() == pytest.approx(1.0)
    with pytest.raises(UsageError, match=f"method '{method}' needs the layers themselves"):
        segment(GPT, 2, method)


def test_an_embedding_may_count_double() -> None:
    assert by_class_weight(GPT, {}, 3).bounds == (0, 3, 6, 9)
    assert by_class_weight(GPT, {"Embedding": 4}, 3).bounds == (0, 1, 5, 9)
    assert segment(GPT, 2, {"Block": 1, "*": 0}).totals([name == "Block" for name in GPT]) == (3, 3)
    with pytest.raises(
        UsageError, match="class weights name Emb, but the classes are Embedding, Block, LayerNorm, Linear"
    ):
        by_class_weight(GPT, {"Emb": 2}, 2)


def test_all_zero_weights_count_as_equal() -> None:
    assert by_weight([0, 0, 0, 0], 2).bounds == (0, 2, 4)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_weights_are_finite_and_not_negative(weight: float) -> None:
    with pytest.raises(UsageError, match="for layer 1"):
        by_weight([1, weight], 2)


@pytest.mark.parametrize("bounds", [[0, 5, 9], [0, 5]])
def test_the_end_of_explicit_bounds_may_be_left_out(bounds: list[int]) -> None:
    cut = segment(GPT, 2, bounds)
    assert cut.bounds == (0, 5, 9)
    assert cut.method == str(bounds)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 8, 5, 9], r"always increase; got \[0, 8, 5, 9\]"),
        ([1, 3, 5, 9], r"go from 0 .*; got \[1, 3, 5, 9\]"),
        ([0, 3, 3, 9], "always increase"),
        ([0, 3, 9], r"bounds \[0, 3, 9\] do not cut 9 layers into 3 stages; give 3 first layers, then, if you like, 9"),
        ([0, 3, 5, 7, 9], "do not cut"),
        ([0, 3, 12], "always increase"),
        ([0, 3, 12, 9], "always increase"),
        ([], "do not cut"),
        ([0, 3.0, 5], "got 3.0 of type float"),
        ([0, "3", 5], "got '3' of type str"),
        ([0, True, 5], "got True of type bool"),
    ],
)
def test_bounds_are_validated(bounds: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        by_bounds(bounds, 9, 3)


def test_bounds_of_chunks() -> None:
    assert by_bounds([0, 1, 2, 8], 9, 2, 2).layers_of(1) == (range(1, 2), range(8, 9))
    with pytest.raises(UsageError, match=r"into 4 virtual stages \(2 stages with 2 chunks each\); give 4 first layers"):
        by_bounds([0, 1, 2], 9, 2, 2)


@pytest.mark.parametrize("method", ["uniform", "layer:A", [0, 1, 2], {"A": 2}])
def test_too_few_layers_are_told_with_both_numbers(method: object) -> None:
    with pytest.raises(UsageError, match="2 layers cannot fill 3 stages.* use at most 2 of them"):
        segment(["A", "A"], 3, method)  # type: ignore[arg-type]


@pytest.mark.parametrize(("stages", "chunks"), [(0, 1), (1, 0), (-2, 1), (2.0, 1), (True, 1)])
def test_numbers_of_parts_are_whole(stages: int, chunks: int) -> None:
    with pytest.raises(UsageError, match="whole number from 1 on; got"):
        uniform(8, stages, chunks)


def test_unknown_methods_are_answered_with_the_known() -> None:
    with pytest.raises(
        UsageError, match="unknown method 'unifrom'; there are 'uniform', 'layer:<regex>', 'parameters'"
    ):
        segment(GPT, 2, "unifrom")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bounds": (0,)}, "always increase"),
        ({"bounds": (0, 2, 4, 6), "num_chunks": 2}, "3 virtual stages cannot be dealt out as 2 chunks"),
        ({"bounds": (0, 2), "num_chunks": 0}, "0 chunks"),
        ({"bounds": (0, 2), "weights": (1,)}, "a weight for each of 2 layers, got 1"),
    ],
)
def test_a_segmentation_proves_itself(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Segmentation(**fields)  # type: ignore[arg-type]


def test_a_layer_beyond_the_list_is_told() -> None:
    with pytest.raises(UsageError, match="layers go from 0 to 8; got 9"):
        uniform(9, 2).rank_of_layer(9)


def test_balance_is_the_heaviest_stage_over_the_mean() -> None:
    assert uniform(4, 2).balance() == 1.0
    assert uniform(4, 2).balance([1, 1, 2, 4]) == pytest.approx(6 / 4)
    assert uniform(4, 1, 2).balance([1, 1, 2, 4]) == 1.0
    assert uniform(4, 2).balance([0, 0, 0, 0]) == 1.0

"""Batches in every form, cut in one process; rows N1, N13 and N14 of user reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_group_sharded.errors import UsageError
from paddle_group_sharded.pipeline.batches import Batch, Counted, cut


def rows(count: int, *more: int) -> Any:
    """A tensor whose first column counts the samples."""
    return paddle.arange(count).reshape([count, *[1] * len(more)]).expand([count, *more]).astype("float32")


def both(data: Any, count: int, **options: bool) -> Batch:
    return cut(data, count, True, True, **options)


def firsts(parts: Any) -> list[list[float]]:
    return [part.reshape([part.shape[0], -1])[:, 0].tolist() for part in parts]


@given(st.integers(1, 40), st.integers(1, 12))
def test_every_sample_once_and_in_order(samples: int, count: int) -> None:
    if samples < count:
        with pytest.raises(UsageError, match=f"{samples} samples of inputs cannot be cut into {count} micro-batches"):
            both([rows(samples, 2), rows(samples)], count)
        return
    batch = both([rows(samples, 2), rows(samples)], count)
    assert sum(firsts(batch.inputs), []) == list(range(samples)) == sum(firsts(batch.labels), [])
    assert batch.sizes == [len(part) for part in firsts(batch.inputs)] and len(batch.sizes) == count
    assert max(batch.sizes) - min(batch.sizes) <= 1 and batch.sizes == sorted(batch.sizes, reverse=True)
    assert not batch.ended


def test_n1_batch_of_8_in_3() -> None:
    """N1: the last micro-batch is smaller, and counts by its samples."""
    assert both([rows(8), rows(8)], 3).sizes == [3, 3, 2]


def test_nested_inputs_and_what_has_no_samples() -> None:
    scale, table = paddle.to_tensor(2.0), {"x": rows(4, 3), "n": np.arange(4), "none": None, "flag": True}
    batch = both(((table, scale, 7), rows(4)), 2)
    first, second, third = batch.inputs[1]
    assert first["x"].shape == [2, 3] and first["n"].tolist() == [2, 3] and first["none"] is None
    assert first["flag"] is True and second.item() == 2.0 and third == 7
    assert isinstance(first["n"], paddle.Tensor)


def test_inputs_are_cut_off_from_autograd() -> None:
    x = rows(4, 2)
    x.stop_gradient = False
    assert all(part.stop_gradient for part in both([x * 2, rows(4)], 2).inputs)


def test_lists_inside_are_micro_batches() -> None:
    batch = both([(rows(4), [rows(2, 5), rows(1, 7)]), [rows(2), rows(1)]], 2)
    assert [x.shape for _, x in batch.inputs] == [[2, 5], [1, 7]] and firsts(batch.labels) == [[0, 1], [0]]
    assert batch.sizes == [2, 2], "what was cut is surer than the first tensor of what came as it is"
    assert cut([None, [rows(2), rows(1)]], 2, False, True).sizes == [2, 1]
    with pytest.raises(UsageError, match="a list in inputs holds micro-batches, and 4 are asked for, but it has 2"):
        both([[rows(2), rows(2)], rows(4)], 4)
    assert both([[rows(2), rows(2)], [rows(2), rows(2)]], 4, fewer=True).sizes == [2, 2]


@pytest.mark.parametrize("first", [True, False])
def test_samples_are_counted_in_what_was_cut(first: bool) -> None:
    """Class weights, one copy for each micro-batch, have no samples; nor do they hide those of labels or inputs."""
    weights = [np.ones(3, "float32")] * 4
    labels = (weights, rows(10)) if first else (rows(10), weights)
    assert both([rows(10), labels], 4).sizes == [3, 3, 2, 2] == cut([None, labels], 4, False, True).sizes
    only_weights = cut([None, weights], 4, False, True)
    assert (only_weights.sizes, only_weights.counted) == ([3, 3, 3, 3], Counted.WHOLE)
    assert both([rows(10), weights], 4).sizes == [3, 3, 2, 2]
    assert both([rows(10), weights], 4).counted is Counted.CUT
    assert cut([None, None], 4, False, True).counted is Counted.NOT
    assert both([(rows(3), [1, 2, 3]), {"w": weights[:3], "y": rows(3)}], 8, fewer=True).sizes == [1, 1, 1]


def test_only_what_is_needed_is_looked_at() -> None:
    assert cut(None, 3, False, False) == Batch(None, None, [], 3)
    only_inputs = cut([rows(4), None], 2, True, False)
    assert only_inputs.labels is None and only_inputs.sizes == [2, 2]
    only_labels = cut([None, rows(4)], 2, False, True)
    assert only_labels.inputs is None and only_labels.sizes == [2, 2]
    assert both([rows(4), None], 2).labels == [None, None]
    assert cut([{"n": 3}, None], 2, True, False).sizes == [1, 1]


def test_fewer_samples_than_micro_batches_in_an_evaluation() -> None:
    assert both([rows(3), rows(3)], 4, fewer=True).sizes == [1, 1, 1]
    assert both([rows(5), rows(5)], 4, fewer=True).sizes == [2, 1, 1, 1]


def test_n13_iterators_give_micro_batches_until_they_end() -> None:
    """N13: what an iterator had is counted, so that ranks can agree."""

    def source() -> Iterator[Any]:
        for size in (3, 2, 4):
            yield rows(size, 2), np.arange(size)

    stream = source()
    batch = both(stream, 2)
    assert batch.sizes == [3, 2] and not batch.ended and batch.labels[1].tolist() == [0, 1]
    rest = both(stream, 2)
    assert rest.sizes == [4] and rest.ended
    assert both(stream, 2).sizes == [] and both(stream, 2).ended
    assert both(lambda: [rows(4), rows(4)], 2).sizes == [2, 2]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "got None, which only ranks between the first and the last stage may give"),
        ({"x": 1, "y": 2}, r"got a dict of 'x', 'y'; write \[inputs, labels\]"),
        ([1, 2, 3], r"got 3 things; write \[\(x1, x2\), labels\]"),
        (rows(4), r"got a Tensor; write \[inputs, labels\]"),
        (range(4), r"got a range; give iter\(...\) of it"),
        ([(rows(4), rows(3)), rows(4)], "inputs have samples along axis 0 of different numbers: 3, 4"),
        ([([1], [1, 2]), rows(4)], "inputs have lists of micro-batches of different numbers: 1, 2"),
        ([rows(1), rows(1)], "1 samples of inputs cannot be cut into 2 micro-batches"),
        (iter([1]), "expected a micro-batch as .inputs, labels., got a int"),
    ],
)
def test_n14_says_what_came_instead(data: Any, message: str) -> None:
    """N14: a batch of another structure is refused with what it is and how to write it."""
    with pytest.raises(UsageError, match=message):
        both(data, 2)

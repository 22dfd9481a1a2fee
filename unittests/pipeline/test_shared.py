"""Shared weights over one to three stages, against one plain parameter that is stepped with the summed gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unittests.harness import Ranks

WORKER = "unittests.pipeline.dygraph_shared"
ROWS, WIDTH = 6, 4
OWNERS = {  # by hand, from the list of layers
    "0.inner.weight": ("0.inner.weight", "0.again.weight", "3.weight", "5.inner.weight", "5.again.weight"),
    "1.a": ("1.a", "4.a"),
    "1.b": ("1.b", "4.b"),
}
NUMEL = ROWS * WIDTH + 3 * WIDTH + WIDTH + 2 * WIDTH + (WIDTH * WIDTH + WIDTH)  # with two biases and the Linear


@pytest.mark.parametrize(
    ("world_size", "num_stages", "num_chunks", "optimizer"),
    [(1, 1, 1, "AdamW"), (2, 2, 1, "AdamW"), (2, 2, 3, "Momentum"), (3, 3, 1, "AdamW"), (4, 2, 1, "Lamb")],
)
def test_steps_equal_those_of_one_parameter(
    ranks: Ranks, world_size: int, num_stages: int, num_chunks: int, optimizer: str
) -> None:
    """A12: two keys, several attributes, dotted names and a property; one options set; norms count each weight once."""
    by_rank = ranks(world_size).run(WORKER, "train", num_stages, num_chunks, optimizer)
    for first_rank in range(0, world_size, num_stages):
        replica = by_rank[first_rank : first_rank + num_stages]
        assert all(seen["worst"] <= 1e-6 for seen in replica), [seen["worst"] for seen in replica]
        assert sum(seen["numel"] for seen in replica) == NUMEL
        values: dict[str, Any] = {}
        for seen in replica:
            values.update(seen["values"])
        for names in OWNERS.values():
            for name in names:
                np.testing.assert_array_equal(values[name], values[names[0]], err_msg=name)
        options = {name: option for seen in replica for name, option in seen["options"].items()}
        for names in OWNERS.values():
            assert {options[name] for name in names} == {options[names[0]]}
        assert options["5.inner.weight"][1:] == (0.5, True, True)
        assert options["4.a"][1:] == (1.0, False, False)
        counted = [name for seen in replica for name in seen["counted"]]
        if num_stages == 3:
            assert set(counted).isdisjoint({"3.weight", "5.inner.weight", "5.again.weight", "4.a", "4.b"})
            assert by_rank[1]["firstly"]["3.weight"] is False and by_rank[0]["firstly"]["0.inner.weight"] is True
            assert by_rank[1]["keys"] == ("table",)
        for seen in replica:
            assert seen["aliases"] in (None, OWNERS["0.inner.weight"])
    if world_size == 1:
        assert by_rank[0]["params"] == 3 + 2 + 2  # shared, Linear, biases


def test_a10_a13_a16_copies_meet_again(ranks: Ranks) -> None:
    first, middle, last = ranks(3).run(WORKER, "differ_and_meet")
    assert (first["keys"], middle["keys"], last["keys"]) == (("ends",), (), ("ends",))
    assert np.abs(first["reinitialised"] - last["reinitialised"]).max() > 0.1
    for seen in (first, last):
        np.testing.assert_array_equal(seen["met"], first["reinitialised"])
        assert seen["again"] == 0.0
        assert seen["no gradient"] and seen["frozen"]
        assert seen["one gradient"] == 3.0
        assert "shared 'ends' (0.weight, 2.weight) is frozen on rank 0 only" in seen["frozen here only"]
        assert seen["loaded"] == ([], [], 7.0)
    np.testing.assert_array_equal(middle["met"], middle["reinitialised"])
    assert middle["again"] == 1.0 and middle["one gradient"] is None and middle["frozen here only"] == "accepted"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_edit_of_one_row_reaches_every_copy(ranks: Ranks, dtype: str) -> None:
    """The first owner's value counts, so what the other rank has written is undone."""
    first, last = ranks(2).run(WORKER, "edited_row", dtype)
    assert first == last and first["same"] == [True, True, True]
    assert first["rows"][0] == [7.0] and first["rows"][2] == [9.0] and 8.0 not in first["rows"][1]


def test_a13_the_first_owner_says_whether_it_is_trained(ranks: Ranks) -> None:
    for seen in ranks(2).run(WORKER, "frozen_adapter"):
        assert seen == {"frozen": True, "still": True, "others": 1}


def test_refusals(ranks: Ranks) -> None:
    for shapes, counts, name, sparse, _ in ranks(2).run(WORKER, "refusals"):
        assert shapes.startswith("UsageError: shared layer 'e' has shapes and types [([6, 4], ")
        assert "on rank 0, but [([7, 4], " in shapes
        assert "expected the same number of shared attributes everywhere, got 1 at layer 0, 2 at layer 1" in counts
        assert "layer 1 (Nested) has no parameter 'inner.wait'; its parameters are " in name
        assert "'e' (0.weight, 1.weight) has sparse gradients" in sparse

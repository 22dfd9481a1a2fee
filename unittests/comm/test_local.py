"""One rank alone keeps the contract of many."""

from __future__ import annotations

import numpy as np

from unittests.comm.inputs import MOVED
from unittests.harness import Ranks

WORKER = "unittests.comm.dygraph_local"


def test_one_rank(ranks: Ranks) -> None:
    (result,) = ranks(1).run(WORKER, "alone")
    assert (result["type"], result["place"]) == ("LocalComm", (0, 1, (0,)))
    assert result["gathered"] == [True] * len(MOVED)
    assert result["overlaps"] == [(0, 0, [1.0] * 6), (1, 0, [0.0] * 4), (3, 0, [3.0])]
    assert result["view"]
    assert result["zeros"] == ["paddle.float32"]
    np.testing.assert_array_equal(result["value"], np.full(3, 7.0))
    assert result["exchanged"] == ([{"a": [1, 2]}], {"a": [1]})


def test_a_group_of_one_rank_keeps_its_global_number(ranks: Ranks) -> None:
    assert ranks(2).run(WORKER, "group_of_one") == [("LocalComm", 0, 1, (0,)), ("LocalComm", 0, 1, (1,))]


def test_what_many_ranks_refuse_one_refuses_too(ranks: Ranks) -> None:
    (messages,) = ranks(1).run(WORKER, "refused_alone")
    assert all(messages)

"""A real step beside its plan: parameters, states, elements and collectives exactly, the peak within a tenth."""

from __future__ import annotations

from typing import Any

import pytest

from unittests.harness import Ranks

WORKER = "unittests.dygraph_plan_check"
LEVELS = ["os", "os_g", "p_g_os"]


HEADINGS = ["measured", "parameters", "states", "peak", "sent", "collectives"]


CLOSE = {"parameters": 0, "sent": 0, "collectives": 0, "states": 0.01, "peak": 0.1}


def wrong(by_rank: list[dict[str, Any]]) -> list[str]:
    return [
        f"rank {rank}, {case}: {name} measured {measured}, predicted {predicted}"
        for rank, found in enumerate(by_rank)
        for case, rows in found.items()
        for name, (measured, predicted) in rows.items()
        if measured != pytest.approx(predicted, rel=CLOSE[name])
    ]


def test_third_step(ranks: Ranks) -> None:
    by_rank = ranks(2).run(WORKER, "checked", LEVELS, timeout=200)
    for rank, found in enumerate(by_rank):
        text = found.pop("text").splitlines()
        assert text[0] == f"p_g_os on 2 ranks, rank {rank}"
        assert [line.split()[0] for line in text[1:]] == HEADINGS
        assert len(found) == 3 * 7
        assert all(len(rows) == 5 for rows in found.values())
    assert "\n".join(wrong(by_rank)) == ""


def test_first_step_of_replicas(ranks: Ranks) -> None:
    by_rank = ranks(2).run(WORKER, "replicated")
    assert [list(found) for found in by_rank] == [LEVELS] * 2
    assert "\n".join(wrong(by_rank)) == ""


def test_refusals(ranks: Ranks) -> None:
    for messages in ranks(2).run(WORKER, "refused"):
        assert messages["plain"].startswith("check() takes the model and the optimizer that group_sharded_parallel")
        assert messages["level"] == "the plan has no row for level 'os' on 2 ranks, only for 'p_g_os' on 2"
        assert messages["replicas"] == "expected a model with the dp_size=3 of the plan, got 1 replicas"
        assert messages["wrapped"].startswith("expected the plain model and optimizer, got wrapped ones")

"""A real step beside its plan: parameters, states, elements and collectives exactly, the peak within a tenth."""

from __future__ import annotations

import pytest

from unittests.harness import Ranks

WORKER = "unittests.dygraph_plan_check"
LEVELS = ["os", "os_g", "p_g_os"]


HEADINGS = ["measured", "parameters", "states", "peak", "sent", "collectives"]


def test_two_ranks(ranks: Ranks) -> None:
    by_rank = ranks(2).run(WORKER, "checked", LEVELS, timeout=200)
    wrong = []
    for rank, found in enumerate(by_rank):
        text = found.pop("text").splitlines()
        assert text[0] == f"p_g_os on 2 ranks, rank {rank}"
        assert [line.split()[0] for line in text[1:]] == HEADINGS
        close = {"parameters": 0, "sent": 0, "collectives": 0, "states": 0.02, "peak": 0.1}
        for case, rows in found.items():
            for name, (measured, predicted) in rows.items():
                if measured != pytest.approx(predicted, rel=close[name]):
                    wrong.append(f"rank {rank}, {case}: {name} measured {measured}, predicted {predicted}")
    print(by_rank)
    assert "\n".join(wrong) == ""

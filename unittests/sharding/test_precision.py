"""auto_cast, 16-bit parameters with float32 masters, and fleet's main_grad."""

from __future__ import annotations

from typing import Any

import pytest

from unittests.harness import Ranks

WORKER = "unittests.sharding.dygraph_precision"
LOW_NUMEL = (8 * 7 + 7) + (7 * 5 + 5) + (5 * 3 + 3)  # 16-bit elements of the model there


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_auto_cast_equals_data_parallel(ranks: Ranks, world_size: int) -> None:
    for by_case in ranks(world_size).run(WORKER, "amp", timeout=150):
        assert len(by_case) == 3
        for case, by_level in by_case.items():
            for level, difference in by_level.items():
                assert difference <= (0.0 if world_size <= 2 else 1e-6), (case, level)


def test_multi_precision_on_float32(ranks: Ranks) -> None:
    assert ranks(2).run(WORKER, "multi_precision") == [{"os": 0.0, "os_g": 0.0, "p_g_os": 0.0}] * 2


CASES: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"dtype": "bfloat16", "name": "Momentum"},
    {"dtype": "bfloat16", "clip": True},
    {"dtype": "bfloat16", "name": "Lamb"},
    {"dtype": "bfloat16", "arguments": {"offload": True}},  # F9
    {"dtype": "float16", "arguments": {"buffer_max_size": 10}},
    {"dtype": "bfloat16", "main_grad": True},
    {"dtype": "float16", "main_grad": True, "clip": True},
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sixteen_bits(ranks: Ranks, world_size: int) -> None:
    """Weights, and the masters that are kept for the owned pieces only, equal the rule written out."""
    cases = CASES if world_size == 2 else [CASES[0], CASES[4], CASES[8]]
    by_rank = ranks(world_size).run(WORKER, "low_precision", cases, timeout=150)
    for number, case in enumerate(cases):
        for level in ("os", "os_g", "p_g_os"):
            found = [rows[number][level] for rows in by_rank]
            assert sum(owned for _, _, owned, _ in found) == LOW_NUMEL, (case, level)
            for weights, masters, _, grad_dtypes in found:
                assert masters <= 1e-6, (case, level, masters)
                assert weights <= 1e-6 or masters > 0.0, (case, level, weights)
                assert grad_dtypes == ["paddle.float32" if case.get("main_grad") else f"paddle.{case['dtype']}"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_fleets_main_grad(ranks: Ranks, world_size: int) -> None:
    """MixPrecisionLayer and MixPrecisionOptimizer; ``n`` is a pass inside no_sync(), ``b`` one outside."""
    for by_text in ranks(world_size).run(WORKER, "main_grad_parity", ["b", "bbb", "nnb", "nn", "bn"], timeout=150):
        for text, by_level in by_text.items():
            for level, difference in by_level.items():
                assert difference <= 1e-6, (text, level)

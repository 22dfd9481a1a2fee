"""Clipping: against paddle.DataParallel over ten steps, and against closed forms.

Each parameter counts once, however it is placed: the model has tied, frozen, unused and odd-sized ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unittests.harness import Ranks

WORKER = "unittests.sharding.dygraph_clipping"
TOLERANCE = 1e-6


@pytest.mark.parametrize(
    ("world_size", "levels"), [(1, ("p_g_os",)), (2, ("os", "p_g_os")), (3, ("os_g",)), (4, ("p_g_os",))]
)
def test_clips(ranks: Ranks, world_size: int, levels: tuple[str, ...]) -> None:
    for differences in ranks(world_size).run(WORKER, "clips", levels, timeout=150):
        for name, by_level in differences.items():
            assert all(value <= TOLERANCE for value in by_level.values()), (name, by_level)


@pytest.mark.parametrize("world_size", [2, 3])
def test_closed_forms(ranks: Ranks, world_size: int) -> None:
    """Gradients of 3 and 4 have the norm 5, wherever they lie; E3: summed over the ranks once, not twice."""
    expected: dict[str, Any] = {
        "E1 E3 global norm": ([0.4, 1, 1], [[1, 0.2], [1, 1]], 1),
        "norm": ([0, 1, 1], [[1, 0], [1, 1]], 1),
        "value": ([-2, 1, 1], [[1, -2.5], [1, 1]], 1),
        # Their squares' sum is 3.6e7: not a number of float16.
        "E6 float16": ([1 - 300 / 6000] * 100, [1 + 300 / 6000] * 300),
        "E5 bfloat16": ([1 - 300 / 6000] * 100, [1 + 300 / 6000] * 300),
        "nan": ([np.nan] * 3, [[np.nan] * 2] * 2, np.nan),
        "nan, auto_skip_clip": ([np.nan] * 3, [[1, -3], [1, 1]], 1),
    }
    limits = {"E6 float16": 1e-3, "E5 bfloat16": 4e-3}
    for found in ranks(world_size).run(WORKER, "closed_forms", timeout=150):
        assert {name for _, name in found} == set(expected)
        for (level, name), weights in found.items():
            for value, wanted in zip(weights, expected[name]):
                np.testing.assert_allclose(
                    value, wanted, rtol=0, atol=limits.get(name, 1e-6), err_msg=f"{level} {name}"
                )


@pytest.mark.parametrize("world_size", [1, 3])
def test_clip_grad_norm(ranks: Ranks, world_size: int) -> None:
    """The reference is ``paddle.nn.utils.clip_grad_norm_`` on averaged gradients."""
    for by_limit in ranks(world_size).run(WORKER, "clip_grad_norms", ("os", "os_g", "p_g_os"), timeout=150):
        for differences, norms in by_limit.values():
            assert all(value <= TOLERANCE for value in differences.values()), differences
            assert norms <= TOLERANCE


def test_foreign_clips_are_refused_by_name(ranks: Ranks) -> None:
    for messages in ranks(2).run(WORKER, "foreign_clips"):
        assert len(messages) == 3
        for message in messages:
            assert message.startswith("UsageError: grad_clip must be None or one of ClipGradByGlobalNorm, ")
            assert message.endswith("got OwnClip")

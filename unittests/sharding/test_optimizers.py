"""Every optimizer of Paddle against paddle.DataParallel: losses, weights, states with their keys, after ten steps.

D10: a hidden step at construction would show in the bias corrections.  D11: LAMB and users' rules need whole tensors.
D13: SGD has no state.  D12: ``use_multi_tensor``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unittests.harness import Ranks

WORKER = "unittests.sharding.dygraph_optimizers"
LEVELS = ("os", "os_g", "p_g_os")

# The fused Adam of use_multi_tensor rounds differently from the ordinary one, which steps the pieces.
NOT_TO_THE_BIT = ("Adam multi tensor",)
TOLERANCE = 1e-6


def check(by_rank: list[dict[str, dict[str, float]]], levels: tuple[str, ...], exact: bool = True) -> None:
    for differences in by_rank:
        for name, by_level in differences.items():
            assert set(by_level) == set(levels)
            limit = TOLERANCE if name in NOT_TO_THE_BIT or not exact else 0.0
            assert all(value <= limit for value in by_level.values()), (name, by_level)


def test_every_optimizer_two_ranks(ranks: Ranks) -> None:
    by_rank = ranks(2).run(WORKER, "grid", levels=LEVELS, timeout=150)
    check(by_rank, LEVELS)
    for offered in ranks(2).run(WORKER, "class_names"):
        assert set(offered) - {"LBFGS"} <= {name.partition(" ")[0] for name in by_rank[0]}, "one is not tested"


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_optimizer(ranks: Ranks, world_size: int) -> None:
    levels = ("p_g_os",)
    check(ranks(world_size).run(WORKER, "grid", levels=levels, timeout=150), levels, exact=world_size == 1)


def test_four_ranks(ranks: Ranks) -> None:
    names = ("AdamW", "Lamb", "Factored")
    check(ranks(4).run(WORKER, "grid", levels=("p_g_os",), names=names, timeout=150), ("p_g_os",), exact=False)


def test_parameters_without_dimensions_or_elements(ranks: Ranks) -> None:
    check(ranks(2).run(WORKER, "odd_shapes", levels=("os", "p_g_os"), timeout=150), ("os", "p_g_os"))


def test_refusals(ranks: Ranks) -> None:
    expected = {
        "LBFGS": "UsageError: LBFGS cannot be sharded: its line search evaluates the whole model inside one step",
        "OwnLBFGS": "UsageError: LBFGS cannot be sharded",
        "OwnStep": "UsageError: OwnStep defines a step() of its own",
        "replaced step": "UsageError: SGD defines a step() of its own",
        "LookAhead": "UsageError: LookAhead wraps another optimizer; pass that one",
        "ModelAverage": "UsageError: ModelAverage defines a step() of its own",
        "not an optimizer": "UsageError: optimizer must be a paddle.optimizer.Optimizer, got str",
        "wrapped again": "UsageError: optimizer has already been through group_sharded_parallel",
        "apply_gradients": "UsageError: apply_gradients() cannot see the sharded gradients",
        "added parameter": "StateError: expected parameter groups of [2] parameters, got [3]",
    }
    by_rank: list[dict[str, Any]] = ranks(2).run(WORKER, "refusals")
    for messages in by_rank:
        assert set(messages) == set(expected)
        for name, start in expected.items():
            assert messages[name].startswith(start), messages[name]


def test_states_that_a_rule_makes_in_its_first_update(ranks: Ranks) -> None:
    for found in ranks(2).run(WORKER, "late_states_reloaded"):
        assert set(found["unbroken"]) == set(found["resumed"]) and len(found["unbroken"]) == 6
        for name, value in found["unbroken"].items():
            np.testing.assert_array_equal(found["resumed"][name], value, err_msg=name)

"""Bytes of the model states per rank beside the ZeRO formulas (arXiv 1910.02054, section 3 and figure 1)."""

from __future__ import annotations

import numpy as np
import pytest

from unittests.harness import Ranks, run_fresh

WORKER = "unittests.sharding.dygraph_memory"
PSI = 12 * 256 * 257

# (bytes that every rank keeps, bytes that are shared out) per parameter: parameters, gradients, optimizer states
FLOAT32 = {"os": (4 + 4, 8), "os_g": (4, 4 + 8), "p_g_os": (0, 4 + 4 + 8)}
BFLOAT16 = {"os": (2 + 2, 12), "os_g": (2, 2 + 12), "p_g_os": (0, 2 + 2 + 12)}
MAIN_GRAD = {"os": (2 + 4, 12), "os_g": (2, 4 + 12), "p_g_os": (0, 2 + 4 + 12)}
STATES_DROPPED = 16 * 2 * 300 * 301  # bytes of the model that is dropped, with its gradients and states
GRADS = {"float32": 4, "bfloat16": 2, "main_grad": 4}


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "main_grad"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_states(ranks: Ranks, world_size: int, kind: str, level: str) -> None:
    """After backward exactly the formula; after step and clear_grad no more, and no less than without gradients."""
    kept, shared = {"float32": FLOAT32, "bfloat16": BFLOAT16, "main_grad": MAIN_GRAD}[kind][level]
    formula = PSI * (kept + shared / world_size)
    without_grads = formula - PSI * GRADS[kind] / (1 if level == "os" else world_size)
    dtype = "float32" if kind == "float32" else "bfloat16"
    for steps in ranks(world_size).run(WORKER, "between_steps", level, dtype, kind == "main_grad"):
        for row in steps[1:]:
            assert row["backward"] == pytest.approx(formula, rel=0.02)
            for moment in ("step", "clear"):
                assert without_grads * 0.98 <= row[moment] <= formula * 1.02, (moment, row, formula)
        assert steps[1:] == [steps[1]] * 3  # nothing grows


def test_offload_keeps_a_copy_of_the_pieces(ranks: Ranks) -> None:
    """On a machine without an accelerator host and device are one: pieces are there twice."""
    for steps in ranks(2).run(WORKER, "between_steps", "p_g_os", offload=True):
        assert steps[-1]["backward"] == pytest.approx(PSI * (4 + 4 + 8 + 4) / 2, rel=0.02)


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_peak_of_wrapping(level: str) -> None:
    """Never more than the model and one group: here every group has another size, so none can use another's memory."""
    widths = [280 + 4 * index for index in range(8)]
    sizes = [4 * width * (width + 1) for width in widths]
    for found in run_fresh(2, WORKER, "peaks", level, widths, steps=3, buffer_max_size=300 * 301, timeout=120):
        assert found["hidden"] <= max(sizes)
        assert found["wrap"] <= max(sizes) * 1.02
        if level == "p_g_os":
            # Half of parameters, gradients and states take the place of the whole model.  Beside them: one group in
            # use, one fetched ahead, two idle buffers, one new gradient, two under reduction, and what the step needs.
            states = sum(sizes) * 4 / 2 - sum(sizes)
            assert found["train"] <= states + 8 * max(sizes)


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_nothing_grows(ranks: Ranks, level: str) -> None:
    for found in ranks(2).run(WORKER, "growth", level, steps=200, timeout=120):
        assert len(set(found["bytes"])) == 1
        assert len(set(found["threads"])) == 1
        assert found["objects"][-1] - found["objects"][0] < 50
        assert found["lists"][-1] - found["lists"][0] < 150 * 10  # a few a step, whatever the number of parameters


def test_evaluation_leaves_nothing(ranks: Ranks) -> None:
    for lengths in ranks(2).run(WORKER, "only_evaluation", "p_g_os"):
        assert len(set(lengths)) == 1


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_dropped_models_leave_nothing(ranks: Ranks, level: str) -> None:
    """Twenty models that were never unwrapped: their threads, sockets and memory are gone with them."""
    for found in ranks(2).run(WORKER, "wrapped_and_dropped", level, times=20, timeout=150):
        assert [(threads, files) for threads, files, _ in found[1:]] == [found[1][:2]] * 19
        assert found[-1][2] - found[4][2] < 3 * STATES_DROPPED  # fifteen models later


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_lazy_parameters_have_the_values_of_eager_ones(ranks: Ranks, level: str) -> None:
    """paddle.LazyGuard: also where groups are filled in another order than that of the layers."""
    for found in ranks(2).run(WORKER, "lazy_equals_eager", level):
        assert set(found["eager"]) == set(found["lazy"])
        for name, value in found["eager"].items():
            np.testing.assert_array_equal(found["lazy"][name], value, err_msg=name)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_lazy_model_never_lives_whole(world_size: int) -> None:
    """Its shards and two groups: one that is being filled, and the buffer that it goes into."""
    count, width = 12, 256
    group = 4 * width * (width + 1)
    for found in run_fresh(world_size, WORKER, "lazy_peaks", "p_g_os", count, width):
        shards = count * group / world_size
        assert shards <= found["stays"] <= 1.02 * shards
        assert found["wrap"] <= shards + 2.1 * group

from __future__ import annotations

import pytest
from zero_formula import FORMULAS, LEVELS, state_bytes


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
@pytest.mark.parametrize("level", LEVELS)
def test_the_printed_formula_gives_the_number(level: str, ranks: int) -> None:
    per_parameter = eval(FORMULAS[level], {"N": ranks})
    assert state_bytes(level, 1000, ranks) == pytest.approx(1000 * per_parameter)


def test_asymptotes_of_the_paper() -> None:
    # Section 5 of arXiv 1910.02054 with 4 + 4 + 8 bytes: 2x, 4x and Nx less than replication for many ranks.
    many = 1 << 20
    ratios = [state_bytes("none", 1, many) / state_bytes(level, 1, many) for level in ("os", "os_g", "p_g_os")]
    assert ratios == pytest.approx([2, 4, many], rel=1e-5)

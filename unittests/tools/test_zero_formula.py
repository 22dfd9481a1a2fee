from __future__ import annotations

import pytest
from zero_formula import LEVELS, formula, state_bytes

# Table of section 5 and figure 1 of arXiv 1910.02054, for float32 weights without a master and for 16-bit ones with.
FLOAT32 = {"none": "16", "os": "8 + 8/N", "os_g": "4 + 12/N", "p_g_os": "16/N"}
SIXTEEN_BIT = {"none": "16", "os": "4 + 12/N", "os_g": "2 + 14/N", "p_g_os": "16/N"}


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sixteen_bit", [False, True])
def test_formula_and_number(level: str, ranks: int, sixteen_bit: bool) -> None:
    text = (SIXTEEN_BIT if sixteen_bit else FLOAT32)[level]
    assert formula(level, sixteen_bit) == text
    assert state_bytes(level, 1000, ranks, sixteen_bit) == pytest.approx(1000 * eval(text, {"N": ranks}))


def test_example_of_the_paper() -> None:
    # Figure 1: 7.5 billion parameters in 16 bits on 64 ranks, in GB.
    found = [state_bytes(level, 7_500_000_000, 64, sixteen_bit=True) / 1e9 for level in LEVELS]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)

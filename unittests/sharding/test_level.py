"""The three levels and what they shard."""

from __future__ import annotations

import pytest

from paddle_group_sharded.errors import UsageError
from paddle_group_sharded.sharding.level import Level, Placements


@pytest.mark.parametrize(
    ("name", "placements"),
    [
        ("os", Placements(param=False, grad=False, optim=True)),
        ("os_g", Placements(param=False, grad=True, optim=True)),
        ("p_g_os", Placements(param=True, grad=True, optim=True)),
    ],
)
def test_levels(name: str, placements: Placements) -> None:
    """ZeRO, figure 1: each level sheds one more."""
    assert Level.parse(name).placements == placements
    assert Level.parse(name).value == name


def test_there_are_three() -> None:
    assert len(Level) == len({level.placements for level in Level}) == 3


@pytest.mark.parametrize("wrong", ["", "OS", "stage2", "p_g", None, 2, ["os"], Level.OS, b"os"])
def test_anything_else_is_refused_with_the_three_names(wrong: object) -> None:
    with pytest.raises(UsageError) as caught:
        Level.parse(wrong)
    message = str(caught.value)
    assert "'os', 'os_g', 'p_g_os'" in message and repr(wrong) in message

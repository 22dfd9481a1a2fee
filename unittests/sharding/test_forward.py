"""How layers are called and what they return, against averaged gradients of the plain model, at every level."""

from __future__ import annotations

import pytest

from unittests.harness import Ranks
from unittests.sharding.tolerance import check

WORKER = "unittests.sharding.dygraph_forward"

USES = (
    "InsideAnother OwnForwards HooksAround OutsideAny Penalty WeightsOnly Directly EncoderAlone Generating Written "
    "WrittenBranches SummedWeights SomeDiscarded"
).split()
AUXILIARY = "Auxiliary AuxiliaryAlone".split()
VIEWS = "Views Slices Chunked".split()
OUTPUTS = "dict ordered namedtuple dataclass nested object slots none".split()
CASES = [*USES, *AUXILIARY, *VIEWS, *(f"Returning-{kind}" for kind in OUTPUTS)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_plain_model(ranks: Ranks, world_size: int, case: str) -> None:
    check(ranks(world_size).run(WORKER, "parity", case), world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_backward_passes(ranks: Ranks, world_size: int) -> None:
    check(ranks(world_size).run(WORKER, "parity", "AuxiliaryFirst"), world_size, exact=False)


@pytest.mark.parametrize("world_size", [1, 4])
def test_selection_on_one_and_four_ranks(ranks: Ranks, world_size: int) -> None:
    for case in "InsideAnother OutsideAny Generating WrittenBranches Auxiliary Views Returning-nested".split():
        check(ranks(world_size).run(WORKER, "parity", case), world_size)

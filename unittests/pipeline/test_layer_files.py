"""Files of layers: read at another number of stages and chunks, by and from plain Paddle, and when damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unittests.harness import Ranks

WORKER = "unittests.pipeline.dygraph_layer_files"


def merged(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The values of all ranks; replicas are equal."""
    values: dict[str, Any] = {}
    for held in by_rank:
        for name, value in held.items():
            np.testing.assert_array_equal(value, values.setdefault(name, value), err_msg=name)
    return values


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(("world_size", "num_stages", "num_chunks"), [(2, 2, 1), (2, 2, 3), (4, 2, 1)])
def test_saved_files_load_anywhere(
    ranks: Ranks, tmp_path: Path, world_size: int, num_stages: int, num_chunks: int
) -> None:
    folder = str(tmp_path / "new" / "layers")
    saved = merged(ranks(world_size).run(WORKER, "save", folder, num_stages, num_chunks))
    names = sorted(path.name for path in Path(folder).iterdir())
    assert [name.split("-")[0] for name in names] == [f"layer_{index:02d}" for index in (0, 1, 3, 4, 5, 7, 9, 10, 11)]
    middle = {1: "", 3: "-virtual_pp_stage_01"}[num_chunks]
    assert f"layer_05{middle}-tensor_00-model_states.pdparams" in names
    assert_same(ranks(1).run(WORKER, "read_plainly", folder)[0], saved)
    for target in ((1, 1, 1), (1, 1, 3), (2, 2, 1), (2, 2, 2), (3, 3, 2)):
        assert_same(merged(ranks(target[0]).run(WORKER, "load", folder, *target[1:])), saved)


@pytest.mark.parametrize("with_head", [False, True])
def test_files_of_plain_paddle(ranks: Ranks, tmp_path: Path, with_head: bool) -> None:
    """Paddle's pipeline writes no file for a shared layer with a forward of its own: its weight is in another one."""
    folder = str(tmp_path)
    (expected,) = ranks(1).run(WORKER, "write_plainly", folder, with_head)
    for world_size, num_chunks in ((1, 1), (2, 1), (2, 3)):
        assert_same(merged(ranks(world_size).run(WORKER, "load", folder, world_size, num_chunks)), expected)


def test_a_save_with_other_chunks_replaces_the_files(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks(2).run(WORKER, "save", folder, 2, 1)
    saved = merged(ranks(2).run(WORKER, "save", folder, 2, 2, 4))
    assert len(list(tmp_path.iterdir())) == 9
    assert_same(merged(ranks(2).run(WORKER, "load", folder, 2, 1)), saved)


DAMAGE = {
    "missing": ("layer_10-tensor_00-model_states.pdparams does not exist", ""),
    "truncated": ("layer_10-tensor_00-model_states.pdparams", "damaged"),
    "flipped": ("layer_10-tensor_00-model_states.pdparams", "does not have the checksum|do not have the checksum"),
    "foreign": ("layer_10-tensor_00-model_states.pdparams does not fit layer 10; unexpected: 10.bias", ""),
    "not a file of Paddle": ("layer_10-tensor_00-model_states.pdparams cannot be read", ""),
    "twice": ("has several files of layer 10: layer_10-tensor_00", "layer_10-virtual_pp_stage_01"),
    "deeper": ("layer_12-tensor_00-model_states.pdparams is of another model: this one has 12 layers", ""),
    "mixed": ("holds files of different saves", ""),
    "absent": ("-nowhere does not exist; expected a folder of save_state_dict", ""),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_on_every_rank_and_changes_nothing(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """The file is one of the second rank's; the first one, whose files are whole, changes nothing either."""
    first, second = DAMAGE[kind]
    for seen in ranks(2).run(WORKER, "damage", str(tmp_path / "layers"), kind):
        assert seen["message"].startswith("CheckpointError: ") and first in seen["message"]
        assert any(part in seen["message"] for part in second.split("|"))
        assert seen["unchanged"]


def test_saves_that_fail_leave_the_earlier_one(ranks: Ranks, tmp_path: Path) -> None:
    for seen in ranks(2).run(WORKER, "failing_saves", str(tmp_path)):
        assert seen["failed"].startswith("CheckpointError: ") and "No space left on device" in seen["failed"]
        assert seen["same"]
        assert "path must be a folder, but" in seen["a file"]
        assert seen["a number"] == "UsageError: path must be a folder, got int"
        assert seen["below a file"].startswith("CheckpointError: ")

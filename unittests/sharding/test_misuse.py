"""Mistakes: a clear error on every rank, before a collective could hang; afterwards all can be done rightly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unittests.harness import Ranks

WORKER = "unittests.sharding.dygraph_misuse"
LEVELS = ("os", "os_g", "p_g_os")


def _check(results: dict[str, Any]) -> None:
    for name, (message, words, untouched) in results.items():
        assert message.startswith("UsageError: ") and words in message, (name, message)
        assert untouched, name


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_arguments_and_objects(ranks: Ranks, world_size: int) -> None:
    for results in ranks(world_size).run(WORKER, "wrong_everywhere"):
        assert len(results) == 19
        _check(results)


def test_wrong_on_one_rank_only(ranks: Ranks) -> None:
    """L13."""
    by_rank = ranks(3).run(WORKER, "wrong_on_one_rank")
    for rank, results in enumerate(by_rank):
        assert len(results) == 12
        _check(results)
        for message, _, _ in results.values():
            assert message.startswith("UsageError: rank 2: ") == (rank != 2), message


@pytest.mark.parametrize("level", LEVELS)
def test_h4_wrapped_twice(ranks: Ranks, level: str) -> None:
    for results in ranks(2).run(WORKER, "wrapped_twice", level):
        words = {
            "the wrapper": "already been through group_sharded_parallel",
            "the model": "already been through group_sharded_parallel",
            "a layer": "parameter 'weight' belongs to another model",
            "around": "already been through group_sharded_parallel",
            "a shared weight": "parameter 'weight' belongs to another model",
            "the optimizer": "optimizer has already been through",
            "the optimizer inside": "4 parameters that are not in the model",
            "DataParallel": "without paddle.DataParallel",
        }
        assert set(results) == set(words)
        for name, message in results.items():
            assert message.startswith("UsageError: ") and words[name] in message, (name, message)


@pytest.mark.parametrize("world_size", [1, 2])
def test_static_graph_mode(ranks: Ranks, world_size: int) -> None:
    for rank, results in enumerate(ranks(world_size).run(WORKER, "static_mode")):
        assert "expected dynamic mode, got static-graph mode; call paddle.disable_static()" in results["all"]
        other = "" if rank == world_size - 1 else f"rank {world_size - 1}: "
        assert results["one"].startswith(f"UsageError: {other}expected dynamic mode")
        assert results["untouched"] == "True"


def test_different_between_ranks(ranks: Ranks) -> None:
    words = {
        "count": "rank 0 has 4 of them, rank 2 has 6",
        "shape": "('first.weight', (4, 5), ",
        "dtype": "float64",
        "frozen": "parameters (name, shape, dtype, frozen) differ",
        "names": "('first.weight', ",
        "buffer": "buffers (name, shape, dtype) differ",
        "level": "rank 2 has {'level': 'Level.OS_G'}",
        "optimizer": "optimizers differ between ranks: rank 0 has Adam, rank 2 has SGD",
        "rate": "options of the optimizer differ between ranks: rank 0 has {'_learning_rate': 0.1}, rank 1 has",
        "part": "parameter groups of the optimizer",
        "clip": "ClipGradByGlobalNorm",
        "scaler": "rank 0 has {'scaler': 'False'}, rank 2 has {'scaler': 'True'}",
        "segment_size": "'segment_size': '8'",
        "buffer_max_size": "'buffer_max_size': '8'",
        "offload": "'offload': 'True'",
        "sync_buffers": "'sync_buffers': 'True'",
        "sync_comm": "'sync_comm': 'True'",
        "exclude_layer": "['Linear']",
    }
    for results in ranks(3).run(WORKER, "different_between_ranks"):
        assert set(results) == set(words)
        for name, message in results.items():
            assert message.startswith("UsageError: ") and "differ between ranks" in message, (name, message)
            assert words[name] in message, (name, message)


def test_h6_h8_groups_and_missing_ranks(ranks: Ranks) -> None:
    by_rank = ranks(3).run(WORKER, "groups_and_timeouts")
    for rank, results in enumerate(by_rank):
        outside = "UsageError: expected a rank of the group [0, 2], but this is rank 1"
        assert results["outside"].startswith(outside if rank == 1 else "") and bool(results["outside"]) == (rank == 1)
        assert "group must be what paddle.distributed.new_group() returned" in results["wrong group"]
        assert "timeout must be a number of seconds above 0, got 0" in results["wrong timeout"]
        for missing in (2, 0):
            if rank != missing:
                message, seconds = results[f"missing {missing}"]
                assert message.startswith("CommError: ") and f"rank {missing} did not come" in message, message
                assert seconds < 20


def test_h6_models_wrapped_in_another_order(ranks: Ranks) -> None:
    for message in ranks(2).run(WORKER, "order_of_models"):
        assert "parameters (name, shape, dtype, frozen) differ between ranks" in message


@pytest.mark.parametrize(("world_size", "level"), [(1, "os"), (2, "p_g_os")])
def test_wrong_calls_after_wrapping(ranks: Ranks, tmp_path: Path, world_size: int, level: str) -> None:
    words = {
        "save plain": "model must be one that group_sharded_parallel returned, got Net",
        "save plain optimizer": "optimizer must be one that group_sharded_parallel returned, got Adam",
        "save another's": "optimizer belongs to another model",
        "save on one wrong": "optimizer belongs to another model",
        "load mixed": "optimizer has been through group_sharded_parallel but model has not",
        "load another's": "optimizer belongs to another model",
        "load path": "path must be a folder or the path of a Paddle file, got int",
        "load no layer": "model must be a paddle.nn.Layer, got str",
        "unwrap plain": "unwrap takes the model and the optimizer that group_sharded_parallel returned, got Net",
        "unwrap another's": "optimizer belongs to another model",
    }
    for results in ranks(world_size).run(WORKER, "wrong_calls", str(tmp_path), level):
        assert set(results) == set(words)
        for name, message in results.items():
            assert message.startswith("UsageError: ") and words[name] in message, (name, message)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("what", ["save", "load", "optimizer.state_dict", "backward", "batches"])
def test_k3_r30_h5_on_one_rank_only(ranks: Ranks, tmp_path: Path, level: str, what: str) -> None:
    messages = ranks(2).run(WORKER, "on_one_rank_only", str(tmp_path), level, what, timeout=60)
    if what == "backward" and level == "os":  # gradients stay local until the step: any number is right
        assert messages == ["", ""]
        return
    for rank, message in enumerate(messages):
        if what == "batches" and rank == 0:
            continue  # it has done its work; whether it was met half-way is up to the other
        assert message.startswith("CommError: ") and "rank 0" in message, (rank, message)
    if what in ("save", "load"):
        assert f"{what}_group_sharded_model" in messages[0] and "`if rank == 0:`" in messages[0]


@pytest.mark.parametrize(("what", "code"), [("killed", -9), ("ended", 3)])
def test_h5_r30_a_rank_that_ends_is_named_within_seconds(ranks: Ranks, what: str, code: int) -> None:
    level = "p_g_os" if what == "killed" else "os_g"
    by_rank = ranks(3).run(WORKER, "ended", what, level, expect_exit={2: code})
    for message, seconds in by_rank[:2]:
        assert message.startswith("CommError: ") and "rank 2 has ended" in message, message
        assert seconds < 15


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_a_limit_of_3_seconds(ranks: Ranks, level: str) -> None:
    first, _ = ranks(2).run(WORKER, "too_late", level)
    message, seconds = first
    assert message.startswith("CommError: ") and "rank 1 did not come within 3 s" in message and " '" in message
    assert 2.5 < seconds < 10


def test_launched_but_not_initialised(ranks: Ranks) -> None:
    for output in ranks(2).run(WORKER, "not_initialised"):
        assert "UsageError: expected an initialized parallel environment, as the launch has 2 ranks; call" in output


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("way", ["set_value", "copy_", "item", "assign"])
def test_a_parameter_written_in_its_layers_forward(ranks: Ranks, way: str, frozen: bool) -> None:
    """It would be lost at p_g_os: the same error on every rank, before a step has used anything."""
    pool = ranks(2)
    for begin in (1, 2) if way == "set_value" else (1,):
        by_rank = pool.run(WORKER, "written_in_forward", way, frozen, begin, exclude=False)
        assert by_rank[0] == by_rank[1] and by_rank[0]["step"] == begin, by_rank
        message = by_rank[0]["message"]
        assert message.startswith("UsageError: parameter 'codes' [16, 8] was changed while its layer was called")
        assert "global rank 0" in message and "exclude_layer" in message
    for result in pool.run(WORKER, "written_in_forward", way, frozen, 1, exclude=True):
        changed = 1 / 16 if way == "item" else 1.0
        assert abs(result["ratio"] - (1 - changed * (1 - 0.5**4))) < 1e-6


@pytest.mark.parametrize("level", LEVELS)
def test_deep_copies(ranks: Ranks, level: str) -> None:
    for found in ranks(2).run(WORKER, "deep_copies", level):
        assert "UsageError: a model that has been through group_sharded_parallel cannot be copied" in found["message"]
        assert set(found["copied"]) == set(found["moved"])
        assert not (found["copied"]["first.weight"] == found["moved"]["first.weight"]).any()
        assert found["alike"]


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_forward_replaced_after_wrapping(ranks: Ranks, level: str) -> None:
    for found in ranks(2).run(WORKER, "forward_around_ours", level):
        assert found == [0.0] * 4


def test_several_parameters_written_in_a_forward(ranks: Ranks) -> None:
    """Every group is released all the same, and replicas whose own ranks wrote nothing get the error too."""
    pool = ranks(2)
    quiet = pool.run(WORKER, "several_written", [], [], [])
    for clean, found in zip(quiet, pool.run(WORKER, "several_written", [0, 1], [], [])):
        assert clean["message"] == "" and found["whole"] == clean["whole"]
        assert found["message"].startswith("UsageError: parameter 'blocks.")
    grid = ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    messages = {found["message"] for found in ranks(4).run(WORKER, "several_written", [0, 1], *grid)}
    assert len(messages) <= 2 and all("was changed while its layer was called" in message for message in messages)

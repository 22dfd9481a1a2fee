"""Pipeline layers built on one to four ranks: places, weights, names, memory, printing, cuts, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unittests.harness import Ranks, run_fresh

WORKER = "unittests.pipeline.dygraph_layer"
NUM_LAYERS = 12
CLASSIC = """\
start segment network..
segment with method: uniform; result: 0, 7, 15
stage=0, global_rank={rank} ,layer_number=7
0: Conv2D(3, 64, kernel_size=11, stride=4, padding=5)
1: ReLU()
2: MaxPool2D(kernel_size=2, stride=2)
3: Conv2D(64, 192, kernel_size=5, padding=2)
4: {relu}
5: MaxPool2D(kernel_size=2, stride=2)
6: Conv2D(192, 384, kernel_size=3, padding=1)
stage=1, global_rank={rank} ,layer_number=8
7: {relu}
8: Conv2D(384, 256, kernel_size=3, padding=1)
9: {relu}
10: Conv2D(256, 256, kernel_size=3, padding=1)
11: {relu}
12: MaxPool2D(kernel_size=2, stride=2)
13: {flatten}
14: Linear(256, 10)
loss: CrossEntropyLoss
"""


@pytest.fixture(scope="module")
def one_process(ranks: Ranks) -> dict[str, Any]:
    return ranks(1).run(WORKER, "build", 1, 1)[0]


@pytest.mark.parametrize(("world_size", "num_stages", "num_chunks"), [(2, 2, 1), (2, 2, 3), (3, 3, 1), (4, 2, 2)])
def test_weights_and_names_are_those_of_one_process(
    ranks: Ranks, one_process: dict[str, Any], world_size: int, num_stages: int, num_chunks: int
) -> None:
    """M7, M8: also where ranks were seeded differently and had built other layers before."""
    for seed_by_rank in (False, True):
        by_rank = ranks(world_size).run(WORKER, "build", num_stages, num_chunks, seed_by_rank)
        for first in range(0, world_size, num_stages):
            replica = by_rank[first : first + num_stages]
            assert [seen["stage"] for seen in replica] == list(range(num_stages))
            virtual = sorted(chunk for seen in replica for chunk in seen["chunks"])
            assert [chunk[0] for chunk in virtual] == list(range(num_stages * num_chunks))
            assert [chunk[1] for chunk in virtual] + [NUM_LAYERS] == by_rank[0]["bounds"]
            assert all(stop - start == count for _, start, stop, count in virtual)
            held = [index for seen in replica for index in seen["indices"]]
            assert sorted(held) == one_process["indices"] and len(set(held)) == len(held)
            merged: dict[str, Any] = {}
            for seen in replica:
                assert not merged.keys() & seen["values"].keys()
                merged.update(seen["values"])
            assert merged.keys() == one_process["values"].keys()
            for name, value in one_process["values"].items():
                np.testing.assert_array_equal(merged[name], value, err_msg=name)
            if not seed_by_rank:
                names = {name: given for seen in replica for name, given in seen["names"].items()}
                assert names == one_process["names"]
        for seen in by_rank:
            assert seen["sequential"].keys() == one_process["values"].keys()
            for name, value in seen["sequential"].items():
                np.testing.assert_array_equal(value, one_process["values"][name], err_msg=name)
            virtual_stage = sum(bound <= 5 for bound in seen["bounds"]) - 1
            assert seen["stage of 5"] == virtual_stage % num_stages
            if not seed_by_rank:
                assert seen["next"] == one_process["next"]
        if seed_by_rank:  # the lowest numbers that no rank has used: one Linear had been built on some
            names = {given for seen in by_rank for given in seen["names"].values()}
            assert "linear_1.w_0" in names and "linear_0.w_0" not in names


def test_sublayer_names_are_those_of_paddle(ranks: Ranks) -> None:
    first, last = ranks(2).run(WORKER, "build", 2, 1)
    assert {"shared_layers.embed.weight", "1.weight", "4.bias", "5.norm1.weight"} <= set(first["sublayers"])
    assert {"shared_layers.embed.weight", "7._mean", "9.shift", "10.weight"} <= set(last["sublayers"])
    first, last = ranks(2).run(WORKER, "build", 2, 3)
    assert {"shared_layers.embed.weight", "0.1.weight", "4.0.weight", "8.1.proj.weight"} <= set(first["sublayers"])
    assert {"shared_layers.embed.weight", "2.1.weight", "6.1._mean", "10.0.weight"} <= set(last["sublayers"])


def test_layers_of_one_class_start_different(one_process: dict[str, Any]) -> None:
    """M7: layers at the same place of two stages."""
    values = one_process["values"]
    assert np.abs(values["1.weight"] - values["4.weight"]).max() > 0.1
    assert np.abs(values["4.weight"] - values["10.weight"]).max() > 0.1


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_one_process_is_an_ordinary_layer(ranks: Ranks, num_chunks: int) -> None:
    """Against the same model in plain Paddle: outputs, the tied gradient, automatic names, optimizer states."""
    (seen,) = ranks(1).run(WORKER, "whole", num_chunks)
    assert max(seen["outputs"]) <= 1e-6 and max(seen["grads"]) <= 1e-6 and seen["second loss"] <= 1e-6
    assert seen["names"] == {}
    assert seen["tied"] and seen["trained"]
    assert len(seen["moments"]) > 10 and max(seen["moments"]) <= 1e-6


def test_a_rank_allocates_its_own_stage_only() -> None:
    """Eight layers of 4 MB on two stages: neither rank ever holds more than four of them; and fleet's topology."""
    depth, width = 8, 1024
    layer_bytes = 4 * width * width
    for rank, seen in enumerate(run_fresh(2, WORKER, "memory_and_fleet", depth, width)):
        assert seen["held"] == depth // 2 * layer_bytes
        assert seen["left"] == 0
        assert seen["peak"] <= (depth // 2) * layer_bytes + layer_bytes // 2
        assert {seen[name] for name in ("implied", "topology", "group") if name in seen} <= {(2, rank, 1)}


def test_grids_follow_the_topology(ranks: Ranks) -> None:
    by_rank = ranks(4).run(WORKER, "topologies")
    straight, turned = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    for rank, seen in enumerate(by_rank):
        stage, replica = rank % 2, rank // 2
        assert seen["default"] == seen["fleet"]
        assert seen["default"] == (stage, replica, straight[replica], (stage, stage + 2), straight)
        assert seen["turned"] == (replica, stage, turned[stage], (2 * replica, 2 * replica + 1), turned)
        for name, value in seen["built"].items():  # built from another seed on every rank
            np.testing.assert_array_equal(value, by_rank[rank % 2]["built"][name], err_msg=name)
        assert len(seen["built"]) == [6, 4][stage]
        sharding, stages, world, text = seen["errors"]
        assert "the topology also has sharding=2" in sharding
        assert "num_stages=4, but the topology has 2 along its axis 'pipe'" in stages
        assert "for 2 ranks, but the launch has 4" in world
        assert text.startswith("UsageError: topology is what")


def test_the_classic_print(ranks: Ranks) -> None:
    for rank, seen in enumerate(ranks(2).run(WORKER, "printed", 2)):
        relus, flatten = seen["functions"]
        assert seen["stdout"] == CLASSIC.format(rank=rank, relu=relus, flatten=flatten)
        assert relus.startswith("<function relu at 0x") and flatten.startswith("<function AlexNetPipeDesc")
        assert seen["logged"] + "\n" == seen["stdout"]
        assert seen["bases"] == ("tagged", 10, [f"backbone.{rank}.{name}" for name in ("bias", "weight")])
        assert seen["loss"] == ["CrossEntropyLoss"]
        assert "994,624" in seen["table"] and "1,477,642" in seen["table"]  # by hand: 23296 + 307392 + 663936, ...


def test_the_classic_print_of_chunks(ranks: Ranks) -> None:
    (seen,) = ranks(1).run(WORKER, "printed", 1)
    assert seen["chunks"] == (
        "start segment network for interleave scheduler\n"
        "segment with method: uniform; result: 0, 1, 2\n"
        "stage=0, global_rank=0 ,layer_number=1\n"
        "0: Linear(2, 2)\n"
        "stage=1, global_rank=0 ,layer_number=1\n"
        "1: Linear(2, 3)\n"
        "stage 0 contains virtual stages:  0, 1,\n"
    )
    assert seen["bases"][2] == [f"backbone.{name}" for name in ("0.0.bias", "0.0.weight", "1.0.bias", "1.0.weight")]


def test_measured_cuts(ranks: Ranks) -> None:
    """M3, M6: the slow layer stands alone, and so does the one that keeps most; every rank cuts alike."""
    for seen in ranks(2).run(WORKER, "measured"):
        assert seen["time"] == [0, 4, 5]
        assert seen["memory"] == [0, 1, 5]
        assert seen["parameters"] == [0, 1, 5]  # 576 against 520 + 3 * 72; [0, 2, 5] has 1096
        assert seen["weights"] == [0, 2, 4]
        assert seen["layer"] == [0, 1, 6]
        state, without_grad = seen["statistics"]
        assert (state["_mean"] == 0).all() and (state["_variance"] == 1).all() and all(without_grad[:2])
        assert "time" in seen["tables"][0] and "memory" in seen["tables"][1]
        no_sample, failing, pattern, too_few = seen["errors"]
        assert "pass sample_input" in no_sample
        assert "layer 1 of the list, Linear(9, 9), fails on the sample input" in failing
        assert "Linear" in pattern
        assert "1 layers cannot fill 2 stages" in too_few


def test_refusals(ranks: Ranks) -> None:
    by_rank = ranks(2).run(WORKER, "refusals")
    expected = [
        "expected num_stages or topology, as the launch has 2 ranks",
        "expected a number of ranks that 3 stages divide, but the launch has 2; start it with --nproc_per_node 3",
        "num_stages is a whole number from 1 on; got 0",
        "the list of layers is empty",
        "1 layers cannot fill 2 stages",
        "write LayerDesc(Linear, ...)",
        "expected the same description on every rank, but layers is ['Linear', 'Linear'] on rank 0",
        "layer 1 of the list, FailsOnRank1(), cannot be built: no such vocabulary file",
        "accepted",  # the rank on which it fails does not hold it
        "layer 1 of the list, Linear(2), cannot be built",
        "parameter 'weight' of layer 2 (Linear) also stands in layer 0, but these are on stages 1 and 0",
        "loss function Weighted has the parameter 'scale', which nobody would train",
        "loss_fn is a function of (output, label) or a list of them; got 'mse'",
        "recompute_ctx asks for 'offload'",
        "recompute_interval is a number of layers, 0 for none; got -1",
        "seed is a whole number, got 'a'",
        "this rank holds 2 chunks that do not follow each other; pass chunk_id",
        "chunk_id goes from 0 to 0, got 1",
        "there are 0 loss functions, got index 0",
        "of the list stands there as a built layer, which another rank keeps",
        "bias: expected shape [2], got [3]",
    ]
    for rank, messages in enumerate(by_rank):
        assert len(messages) == len(expected)
        for message, part in zip(messages, expected):
            assert part in message and ("Error: " in message or part == "accepted"), (rank, message, part)
    assert by_rank[0][7].startswith("UsageError: rank 1: ")


def test_m4_two_stages_in_one_process(ranks: Ranks) -> None:
    ((message,),) = ranks(1).run(WORKER, "one_process")
    assert message.startswith("UsageError: expected a number of ranks that 2 stages divide, but the launch has 1; ")
    assert "--nproc_per_node 2" in message


def test_a9_paddles_descriptions_and_built_layers(ranks: Ranks) -> None:
    first, last = ranks(2).run(WORKER, "foreign_descs")
    assert first["built"] == (False, False, "Linear(in_features=8, out_features=8, dtype=float32)")
    assert last["built"][:2] == (True, True)
    assert first["values"] == {"0.weight": 2.0, "1.weight": 1.0, "1.bias": 0.0}
    assert last["values"] == {"2.weight": 1.0, "2.bias": 1.0, "3.weight": 2.0}
    assert first["missing"] == ["1.bias"] and last["missing"] == []
    assert first["unexpected"] == last["unexpected"] == ["9.weight", "head"]


def test_n9_n10_recompute(ranks: Ranks) -> None:
    (seen,) = ranks(1).run(WORKER, "recomputed")
    assert max(seen["outputs"]) == 0.0 and max(seen["grads"]) <= 1e-6
    assert 0.3 < seen["zeros"] < 0.95


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a9_states_of_one_process_load_by_paddles_method(ranks: Ranks, num_chunks: int) -> None:
    for seen in ranks(2).run(WORKER, "loaded_by_paddles_method", num_chunks):
        assert seen == {"0.weight": [2.0], "11.weight": [3.0], "own": [5.0], "some": 6.0}


def test_built_layers_are_copied(ranks: Ranks) -> None:
    (seen,) = ranks(1).run(WORKER, "built_and_copied")
    assert seen == {"same": 0.0, "names": True, "shared": True, "count": 2 + 4 + 2}

from __future__ import annotations

import pytest

from paddle_group_sharded.errors import UsageError
from paddle_group_sharded.pipeline.report import LayerFacts, classic, table
from paddle_group_sharded.pipeline.segment import by_class_weight, uniform


def test_classic_form() -> None:
    entries = ["Conv2D(3, 64)", "ReLU()", "Linear(in=4,\n  out=2)", "<function relu>", "Linear(4, 2)"]
    assert classic(uniform(5, 2), entries, global_rank=1, losses=["CrossEntropyLoss"]) == (
        "start segment network..\n"
        "segment with method: uniform; result: 0, 2, 5\n"
        "stage=0, global_rank=1 ,layer_number=2\n"
        "0: Conv2D(3, 64)\n"
        "1: ReLU()\n"
        "stage=1, global_rank=1 ,layer_number=3\n"
        "2: Linear(in=4,\n  out=2)\n"
        "3: <function relu>\n"
        "4: Linear(4, 2)\n"
        "loss: CrossEntropyLoss"
    )


def test_classic_form_with_chunks() -> None:
    assert classic(uniform(6, 2, 3), "abcdef", losses=["MSELoss", "my_loss"]).splitlines() == [
        "start segment network for interleave scheduler",
        "segment with method: uniform; result: 0, 1, 2, 3, 4, 5, 6",
        *[line for i, x in enumerate("abcdef") for line in (f"stage={i}, global_rank=0 ,layer_number=1", f"{i}: {x}")],
        "stage 0 contains virtual stages:  0, 2, 4,",
        "stage 1 contains virtual stages:  1, 3, 5,",
        "loss: MSELoss, my_loss",
    ]


def test_classic_form_without_a_loss() -> None:
    assert classic(uniform(1, 1), ["ReLU()"]).splitlines()[-1] == "0: ReLU()"


FACTS = [
    LayerFacts("Embedding", 1000, 0, 4000, 0.001, 500, "embed"),
    LayerFacts("Block", 200, 50, 800, 0.004, 2048),
    LayerFacts("Block", 200, 0, 800, 0.004, 2048),
    LayerFacts("Head", 1000, 0, 4000, 0.003, 0, "embed"),
]


def test_table() -> None:
    assert table(uniform(4, 2), FACTS) == (
        "segment with method: uniform; bounds: [0, 2, 4]\n"
        "          layers  parameters    bytes              time   memory  frozen  shared\n"
        "stage 0  0-1 (2)       1,200  4.7 KiB  5.00 ms (41.7 %)  2.5 KiB      50   embed\n"
        "stage 1  2-3 (2)       1,200  4.7 KiB  7.00 ms (58.3 %)  2.0 KiB       0   embed\n"
        "balance (max/mean): layers 1.00, parameters 1.00, bytes 1.00, time 1.17, memory 1.11"
    )


def test_table_with_chunks_shows_each_and_all_of_a_stage() -> None:
    lines = table(uniform(4, 2, 2), FACTS).splitlines()
    assert [line.split("  ")[0] for line in lines[2:8]] == [
        "stage 0 chunk 0",
        "stage 1 chunk 0",
        "stage 0 chunk 1",
        "stage 1 chunk 1",
        "stage 0 in all",
        "stage 1 in all",
    ]
    assert "0-0, 2-2 (2)       1,200" in lines[6]
    assert "1-1, 3-3 (2)       1,200" in lines[7]


def test_table_leaves_out_what_is_not_known() -> None:
    assert table(uniform(3, 2), [LayerFacts("A")] * 3) == (
        "segment with method: uniform; bounds: [0, 1, 3]\n"
        "          layers\n"
        "stage 0  0-0 (1)\n"
        "stage 1  1-2 (2)\n"
        "balance (max/mean): layers 1.33"
    )


def test_better_bounds_are_a_list_to_paste() -> None:
    facts = [LayerFacts("A", time=0.010), *[LayerFacts("A", time=0.001)] * 5]
    cut = uniform(6, 2)
    assert table(cut, facts).splitlines()[-1] == (
        "better bounds by time: [0, 1, 6] (largest stage 10.00 ms instead of 12.00 ms)"
    )
    chunks = table(uniform(6, 1, 2), [LayerFacts("A", memory_bytes=size) for size in (9000, 1, 1, 1, 1, 1)])
    assert chunks.splitlines()[-1] == "better bounds by memory: [0, 1, 6] (largest chunk 8.8 KiB instead of 8.8 KiB)"


def test_weights_of_any_unit_are_shown() -> None:
    cut = by_class_weight(["A", "B"], {"A": 3}, 2)
    assert cut.weights == (3, 1)
    lines = table(cut, [LayerFacts(name, weight=weight) for name, weight in zip("AB", cut.weights)]).splitlines()
    assert lines[2].split() == ["stage", "0", "0-0", "(1)", "3", "(75.0", "%)"]
    assert lines[0] == "segment with method: {'A': 3}; bounds: [0, 1, 2]"


def test_there_is_one_entry_per_layer() -> None:
    with pytest.raises(UsageError, match="one entry for each of 3 layers, got 2"):
        classic(uniform(3, 1), ["a", "b"])
    with pytest.raises(UsageError, match="one LayerFacts for each of 3 layers, got 2"):
        table(uniform(3, 1), FACTS[:2])

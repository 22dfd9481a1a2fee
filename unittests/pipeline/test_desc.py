from __future__ import annotations

import functools
import re
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet import meta_parallel
from paddle.distributed.fleet.meta_parallel.parallel_layers import pp_layers
from paddle.nn import functional as F

from paddle_group_sharded.errors import UsageError
from paddle_group_sharded.paddle_compat import allocated_bytes
from paddle_group_sharded.pipeline.desc import (
    DescTypeError,
    LayerDesc,
    SharedLayerDesc,
    check_entries,
    class_name,
    is_desc,
    is_shared_desc,
    shared_attrs,
)
from paddle_group_sharded.pipeline.report import classic
from paddle_group_sharded.pipeline.segment import segment, uniform

DESCRIPTIONS = [LayerDesc, meta_parallel.LayerDesc]
SHARED_DESCRIPTIONS = [SharedLayerDesc, meta_parallel.SharedLayerDesc]


def flatten(x: paddle.Tensor) -> paddle.Tensor:
    return x.flatten(1)


def alexnet(desc: Any) -> list[Any]:
    return [
        desc(nn.Conv2D, 3, 64, kernel_size=11, stride=4, padding=5),
        desc(nn.ReLU),
        desc(nn.MaxPool2D, kernel_size=2, stride=2),
        desc(nn.Conv2D, 64, 192, kernel_size=5, padding=2),
        F.relu,
        desc(nn.MaxPool2D, kernel_size=2, stride=2),
        desc(nn.Conv2D, 192, 384, kernel_size=3, padding=1),
        F.relu,
        desc(nn.Conv2D, 384, 256, kernel_size=3, padding=1),
        F.relu,
        desc(nn.Conv2D, 256, 256, kernel_size=3, padding=1),
        F.relu,
        desc(nn.MaxPool2D, kernel_size=2, stride=2),
        flatten,
        desc(nn.Linear, 256, 10),
    ]


def test_a_description_keeps_the_call_and_builds_nothing() -> None:
    before = allocated_bytes()
    desc = LayerDesc(nn.Linear, 1000, 1000, bias_attr=False)
    assert allocated_bytes() == before
    assert (desc.layer_func, desc.inputs, desc.kwargs) == (nn.Linear, (1000, 1000), {"bias_attr": False})
    layer = desc.build_layer()
    assert allocated_bytes() - before >= 4_000_000
    assert isinstance(layer, nn.Linear)
    assert layer.bias is None
    assert desc.build_layer() is not layer
    assert desc.build_layer(bias_attr=None).bias is not None


@pytest.mark.parametrize("desc", DESCRIPTIONS)
def test_repr_is_the_call(desc: Any) -> None:
    assert repr(desc(nn.Conv2D, 3, 64, kernel_size=11, stride=4)) == "Conv2D(3, 64, kernel_size=11, stride=4)"
    assert repr(desc(nn.ReLU)) == "ReLU()"
    assert repr(desc(nn.MaxPool2D, kernel_size=2)) == "MaxPool2D(kernel_size=2)"
    assert repr(desc(nn.Pad2D, [1, 1, 1, 1], mode="reflect")) == "Pad2D([1, 1, 1, 1], mode=reflect)"


@pytest.mark.parametrize("desc", SHARED_DESCRIPTIONS)
def test_shared_description(desc: Any) -> None:
    def head(layer: nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.matmul(x, layer.weight, transpose_y=True)

    shared = desc("embed", nn.Embedding, head, "weight", 7, embedding_dim=3)
    assert (shared.layer_name, shared.forward_func, shared.layer_func) == ("embed", head, nn.Embedding)
    assert (shared.inputs, shared.kwargs) == ((7,), {"embedding_dim": 3})
    assert shared_attrs(shared) == ("weight",)
    assert repr(shared) == "Embedding(7, embedding_dim=3)"
    assert shared.build_layer().weight.shape == [7, 3]
    assert is_desc(shared)
    assert is_shared_desc(shared)
    assert class_name(shared) == "Embedding"


def test_several_and_dotted_attributes_may_be_shared() -> None:
    shared = SharedLayerDesc("head", nn.Linear, None, ["weight", "inner.bias"], 2, 2)
    assert shared_attrs(shared) == ("weight", "inner.bias")
    assert shared.shared_weight_attr == ["weight", "inner.bias"]


@pytest.mark.parametrize(
    ("layer_func", "what"),
    [
        (F.relu, "function relu"),
        (int, "class int"),
        ("Linear", "str 'Linear'"),
        (functools.partial(nn.Linear, 2), "partial functools.partial"),
        (None, "NoneType None"),
    ],
)
def test_what_is_described_is_a_layer_class(layer_func: Any, what: str) -> None:
    expected = f"LayerDesc needs a class derived from paddle.nn.Layer, got {what}"
    with pytest.raises(DescTypeError, match=re.escape(expected)) as caught:
        LayerDesc(layer_func)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, UsageError)


def test_a_built_layer_is_not_described_again() -> None:
    with pytest.raises(DescTypeError, match="got Linear .*stand in the list as they are"):
        LayerDesc(nn.Linear(2, 2))


@pytest.mark.parametrize("attrs", [None, 3, [], ["weight", 3], ""])
def test_shared_attributes_are_names(attrs: Any) -> None:
    with pytest.raises(DescTypeError, match="shared_weight_attr of shared layer 'key' is a name or a list of names"):
        SharedLayerDesc("key", nn.Linear, None, attrs, 2, 2)


def test_a_forward_is_a_function() -> None:
    with pytest.raises(
        DescTypeError, match=r"forward_func of shared layer 'key' is a function \(layer, x\), got str 'f'"
    ):
        SharedLayerDesc("key", nn.Linear, "f", "weight", 2, 2)  # type: ignore[arg-type]


def test_entries_of_the_list_have_class_names() -> None:
    entries = [
        *(desc(nn.Linear, 2, 2) for desc in DESCRIPTIONS),
        nn.ReLU(),
        flatten,
        lambda x: x,
        functools.partial(flatten),
    ]
    assert [class_name(entry) for entry in entries] == ["Linear", "Linear", "ReLU", "flatten", "<lambda>", "partial"]
    assert [is_desc(entry) for entry in entries] == [True, True, False, False, False, False]
    assert not any(map(is_shared_desc, entries))
    check_entries(entries)


def test_descriptions_by_a_spec_of_paddle_have_class_names() -> None:
    utils = pytest.importorskip("paddle.distributed.fleet.meta_parallel.parallel_layers.spec_utils")
    specs = [utils.LayerSpec(layer=nn.Linear), utils.LayerSpec(layer=("paddle.nn", "Linear"))]
    assert [class_name(meta_parallel.LayerDesc(spec)) for spec in specs] == ["Linear", "Linear"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (3, "layer 1 of the list is int 3; expected a LayerDesc, a layer or a function"),
        (nn.ReLU, r"layer 1 of the list is the class ReLU; write LayerDesc\(ReLU, ...\)"),
        (None, "layer 1 of the list is NoneType None"),
    ],
)
def test_other_entries_are_refused_with_their_place_and_type(entry: Any, message: str) -> None:
    with pytest.raises(DescTypeError, match=message):
        check_entries([nn.ReLU(), entry])


@pytest.mark.parametrize("desc", DESCRIPTIONS)
def test_alexnet_prints_the_classic_form(desc: Any) -> None:
    entries = alexnet(desc)
    lines = classic(uniform(15, 2), entries, global_rank=1, losses=["CrossEntropyLoss"]).splitlines()
    assert lines[:6] == [
        "start segment network..",
        "segment with method: uniform; result: 0, 7, 15",
        "stage=0, global_rank=1 ,layer_number=7",
        "0: Conv2D(3, 64, kernel_size=11, stride=4, padding=5)",
        "1: ReLU()",
        "2: MaxPool2D(kernel_size=2, stride=2)",
    ]
    assert re.fullmatch(r"4: <function relu at 0x[0-9a-f]+>", lines[7])
    assert lines[10] == "stage=1, global_rank=1 ,layer_number=8"
    assert lines[-2:] == ["14: Linear(256, 10)", "loss: CrossEntropyLoss"]


@pytest.mark.parametrize(
    "method", ["uniform", "layer:Conv2D", "layer:relu|maxpool", "layer:linear", [0, 3], [0, 9, 15]]
)
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_cuts_are_those_of_paddle_where_it_can_cut(method: Any, stages: int) -> None:
    entries = alexnet(meta_parallel.LayerDesc)
    try:
        theirs = pp_layers.SegmentLayers(entries, stages, method).do_segment()
    except (AssertionError, ValueError):
        return  # it refuses what does not divide
    if theirs[-1] != len(entries):
        return  # it takes bounds that leave layers out
    assert list(segment([class_name(entry) for entry in entries], stages, method).bounds) == theirs


@pytest.mark.parametrize("layers", range(1, 30))
def test_uniform_cuts_are_those_of_paddle(layers: int) -> None:
    for stages in range(1, layers + 1):
        theirs = pp_layers.SegmentLayers([nn.ReLU()] * layers, stages, "uniform").do_segment()
        assert list(uniform(layers, stages).bounds) == theirs

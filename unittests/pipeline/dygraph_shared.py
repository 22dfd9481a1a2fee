"""Inside a trainer: shared weights over several stages, driven by gradients made up here instead of a schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from paddle_group_sharded import LayerDesc, PipelineLayer, SharedLayerDesc
from unittests.harness import fresh
from unittests.pipeline.layer_models import message_of, project

ROWS, WIDTH = 6, 4
RATE, STEPS = 0.05, 4


class Nested(nn.Layer):
    """A weight that is reached by a dotted name and by a property, and one that is not shared."""

    def __init__(self, rows: int = ROWS, trainable: bool = True) -> None:
        super().__init__()
        attr = paddle.ParamAttr(learning_rate=0.5, regularizer=paddle.regularizer.L2Decay(0.1), trainable=trainable)
        self.inner = nn.Embedding(rows, WIDTH, weight_attr=attr)
        self.again = nn.Embedding(rows, WIDTH)
        self.again.weight = self.inner.weight  # tied in itself
        self.bias = self.create_parameter([WIDTH], is_bias=True)

    @property
    def table(self) -> Any:
        return self.inner.weight

    def forward(self, x: Any) -> Any:
        return x


class Pair(nn.Layer):
    """Two shared weights; the constructor's options differ from owner to owner, the first one's count."""

    def __init__(self, need_clip: bool) -> None:
        super().__init__()
        attr = paddle.ParamAttr(need_clip=need_clip)
        self.a = self.create_parameter([3, WIDTH], attr=attr)
        self.b = self.create_parameter([WIDTH], attr=attr)

    def forward(self, x: Any) -> Any:
        return x


def three_owners() -> list[Any]:
    """Key ``table`` on stages 0, 1 and 2 of three; key ``pair`` on stages 2 and 0, in this order; 6 layers."""
    return [
        SharedLayerDesc("table", Nested, None, "inner.weight"),
        SharedLayerDesc("pair", Pair, None, ["a", "b"], need_clip=False),
        LayerDesc(nn.Linear, WIDTH, WIDTH),
        SharedLayerDesc("table", nn.Embedding, project, "weight", ROWS, WIDTH),
        SharedLayerDesc("pair", Pair, None, ["a", "b"], need_clip=True),
        SharedLayerDesc("table", Nested, None, "table"),
    ]


def gradient(index: int, name: str, shape: Any, step: int) -> Any:
    """A made-up gradient of one owner; the bias of layer 5 gets one too."""
    seed = 1000 * step + 10 * index + sum(map(ord, name)) % 7
    return np.random.RandomState(seed).randn(*shape).astype("float32")


TIES = {  # the same weights, by hand: first owner's name -> all owners
    "0.inner.weight": ["0.inner.weight", "0.again.weight", "3.weight", "5.inner.weight", "5.again.weight"],
    "1.a": ["1.a", "4.a"],
    "1.b": ["1.b", "4.b"],
}


def train(num_stages: int, num_chunks: int = 1, optimizer: str = "AdamW") -> dict[str, Any]:
    """Steps with made-up gradients; beside each shared weight one plain parameter that is stepped with the sum."""
    layer = PipelineLayer(three_owners(), num_stages, num_virtual_pipeline_stages=num_chunks)
    make = getattr(paddle.optimizer, optimizer)
    state = layer.layer_state_dict()
    plain: dict[str, Any] = {}
    reference = layer.to_sequential().state_dict()
    for first, names in TIES.items():
        attr = paddle.ParamAttr(learning_rate=0.5, regularizer=paddle.regularizer.L2Decay(0.1))
        value = reference[first].numpy()
        plain[first] = paddle.create_parameter(
            value.shape, "float32", attr=attr if first == "0.inner.weight" else None,
            default_initializer=nn.initializer.Assign(value),
        )
        assert all((state[name] == plain[first]).all() for name in names if name in state), "not equal from the start"
    ours = make(RATE, parameters=layer.parameters())
    theirs = make(RATE, parameters=list(plain.values()))
    worst = 0.0
    for step in range(STEPS):
        passes = 1 + step % 2  # gradients may add up over several passes
        for _ in range(passes):
            layer.shared.begin_gradients()
            for index, held in layer.named_layers():
                for name, param in held.named_parameters():
                    if f"{index}.{name}" == "4.b":
                        continue  # one copy without a gradient counts as zero
                    value = paddle.to_tensor(gradient(index, name, param.shape, step)) / passes
                    turned = index in (0, 4) and param.ndim == 2  # gives a gradient that is not contiguous
                    (param.t() * value.t() if turned else param * value).sum().backward()  # one rank accumulates
            layer.shared.reduce_gradients()
        for first, names in TIES.items():
            parts = [name.partition(".") for name in names if name != "4.b" and "again" not in name]
            grads = [gradient(int(index), name, plain[first].shape, step) for index, _, name in parts]
            plain[first].grad = paddle.to_tensor(np.sum(grads, 0))
        for each in (ours, theirs):
            each.step()
            each.clear_grad()
        for first, names in TIES.items():
            for name in names:
                if name in state:
                    worst = max(worst, float((state[name] - plain[first]).abs().max().item()))
    counted = [name for name, param in state.items() if layer.shared.counted(param)]
    return {
        "worst": worst,
        "values": {name: value for name, value in state.items() if any(name in names for names in TIES.values())},
        "counted": counted,
        "numel": sum(param.size for param in layer.parameters() if layer.shared.counted(param)),
        "keys": layer.shared.keys,
        "aliases": layer.shared.aliases("3.weight") if "table" in layer.shared.keys else None,
        "options": {
            name: (param.name, param.optimize_attr["learning_rate"], param.need_clip, param.regularizer is not None)
            for name, param in state.items()
            if not name.endswith("bias")
        },
        "firstly": {name: getattr(param, "is_firstly_shared", None) for name, param in state.items()},
        "params": len(layer.parameters()),
    }


def differ_and_meet() -> dict[str, Any]:
    """A10, A13, A16 on three stages, of which the middle one has no part in the key ``ends``."""
    rank = paddle.distributed.get_rank()
    descs = [
        SharedLayerDesc("ends", nn.Embedding, None, "weight", ROWS, WIDTH),
        LayerDesc(nn.Linear, WIDTH, WIDTH),
        SharedLayerDesc("ends", nn.Embedding, project, "weight", ROWS, WIDTH),
    ]
    layer = PipelineLayer(descs, num_stages=3)
    shared = layer.shared
    seen: dict[str, Any] = {"keys": shared.keys}
    weight = shared.params("ends")[0] if rank != 1 else layer.chunks[0].layers[0].weight
    shared.synchronize_if_changed()  # nothing to do
    fresh(rank)
    nn.initializer.Normal()(weight)
    seen["reinitialised"] = weight.numpy()
    shared.synchronize_if_changed()
    seen["met"] = weight.numpy()
    weight.set_value(paddle.full_like(weight, float(rank)))
    layer._synchronize_shared_weights()
    seen["again"] = float(weight.mean().item())

    shared.reduce_gradients()
    seen["no gradient"] = weight.grad is None  # as in one process: the optimizer leaves such a weight alone
    if rank == 2:
        weight.grad = paddle.full_like(weight, 3.0)
    layer.allreduce_shared_weight_gradients()
    seen["one gradient"] = None if weight.grad is None else float(weight.grad.mean().item())
    weight.stop_gradient = True
    weight.clear_gradient(False)
    shared.reduce_gradients()
    seen["frozen"] = weight.grad is None
    if rank == 2:
        weight.stop_gradient = False
    seen["frozen here only"] = message_of(shared.reduce_gradients)
    weight.stop_gradient = False
    missing, unexpected = layer.set_layer_state_dict({"2.weight": np.full([ROWS, WIDTH], 7.0, "float32")})
    seen["loaded"] = missing, unexpected, float(weight.mean().item())
    return seen


def edited_row(dtype: str, rows: int = 4000) -> dict[str, Any]:
    """One row of a table is written on one of its ranks, as for a new token; another table is left alone."""
    rank = paddle.distributed.get_rank()
    descs = [SharedLayerDesc(key, nn.Embedding, None, "weight", rows, WIDTH) for key in ("a", "b", "a", "b")]
    layer = PipelineLayer(descs, num_stages=2)
    (a,), (b,) = (layer.shared.params(key) for key in ("a", "b"))
    layer.to(dtype=dtype)
    seen: dict[str, Any] = {"same": [], "rows": []}
    for step, editor in enumerate((0, 1, 0)):
        row = 1 + 1337 * step
        before = b.astype("float32").numpy()
        if rank == editor:
            value = a.detach().astype("float32").clone()
            value[row] = 7.0 + step
            a.set_value(value.astype(a.dtype))
        layer.shared.synchronize_if_changed()
        seen["rows"].append(sorted(set(a.astype("float32").numpy()[row].tolist())))
        seen["same"].append(bool((b.astype("float32").numpy() == before).all()))
    assert str(a.dtype).endswith(dtype)
    return seen


def frozen_adapter() -> dict[str, Any]:
    """A13: the first owner describes its weight as frozen; the second one does not."""
    descs = [
        SharedLayerDesc("t", Nested, None, "table", trainable=False),
        F.relu,
        SharedLayerDesc("t", Nested, None, "table"),
    ]
    layer = PipelineLayer(descs, num_stages=2)
    (weight,) = layer.shared.params("t")
    before = weight.numpy()
    others = [param for param in layer.parameters() if param is not weight]
    optimizer = paddle.optimizer.Adam(0.1, parameters=layer.parameters())
    for param in others:
        param.grad = paddle.ones_like(param)
    layer.shared.reduce_gradients()
    optimizer.step()
    return {"frozen": weight.stop_gradient, "still": (weight.numpy() == before).all(), "others": len(others)}


def refusals() -> list[str]:
    """Messages of two ranks."""
    rank = paddle.distributed.get_rank()

    def tied(*descs: Any) -> Any:
        return PipelineLayer([*descs], num_stages=2)

    embedding = SharedLayerDesc("e", nn.Embedding, None, "weight", ROWS, WIDTH)
    sparse = SharedLayerDesc("e", nn.Embedding, None, "weight", ROWS, WIDTH, sparse=True)

    def sparse_gradient() -> None:
        layer = tied(sparse, embedding)
        layer(paddle.to_tensor([[1, 2]])).sum().backward()
        layer.shared.reduce_gradients()

    return [
        message_of(lambda: tied(embedding, SharedLayerDesc("e", nn.Embedding, None, "weight", ROWS + 1, WIDTH))),
        message_of(lambda: tied(embedding, SharedLayerDesc("e", nn.Linear, None, ["weight", "bias"], ROWS, WIDTH))),
        message_of(lambda: tied(embedding, SharedLayerDesc("e", Nested, None, "inner.wait"))),
        message_of(sparse_gradient),
        str(rank),
    ]

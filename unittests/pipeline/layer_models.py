"""Lists of layers that several tests of the pipeline's layers describe, and the same written in plain Paddle."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F

from paddle_group_sharded import LayerDesc, SharedLayerDesc

WIDTH = 8
VOCABULARY = 12


class Reader(nn.Layer):
    """A layer that looks at its weight in the constructor, draws from NumPy, and has buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        import numpy as np

        self.proj = nn.Linear(width, width)
        self.proj.weight.set_value(self.proj.weight.numpy() + np.random.rand(width, width).astype("float32"))
        self.register_buffer("shift", paddle.full([width], 0.5))

    def forward(self, x: Any) -> Any:
        return self.proj(x) + self.shift


def project(layer: nn.Layer, x: Any) -> Any:
    """The head: multiply by the embedding's weight."""
    return paddle.matmul(x, layer.weight, transpose_y=True)


def rich_descs() -> list[Any]:
    """Descriptions, functions and a tied pair of many kinds; 12 entries."""
    return [
        SharedLayerDesc("embed", nn.Embedding, None, "weight", VOCABULARY, WIDTH, padding_idx=0),
        LayerDesc(nn.Linear, WIDTH, WIDTH),
        F.relu,
        LayerDesc(nn.LayerNorm, WIDTH),
        LayerDesc(nn.Linear, WIDTH, WIDTH),
        LayerDesc(nn.TransformerEncoderLayer, WIDTH, 2, 16, dropout=0.0),
        lambda x: x.transpose([0, 2, 1]),
        LayerDesc(nn.BatchNorm1D, WIDTH),
        lambda x: x.transpose([0, 2, 1]),
        LayerDesc(Reader, WIDTH),
        LayerDesc(nn.Linear, WIDTH, WIDTH, bias_attr=False),
        SharedLayerDesc("embed", nn.Embedding, project, "weight", VOCABULARY, WIDTH, padding_idx=0),
    ]


class PlainRich(nn.Layer):
    """:func:`rich_descs` as somebody writes it who has never heard of pipelines."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0)
        self.batch_norm = nn.BatchNorm1D(WIDTH)
        self.reader = Reader(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias_attr=False)

    def forward(self, ids: Any) -> Any:
        x = self.second(self.norm(F.relu(self.first(self.embed(ids)))))
        x = self.batch_norm(self.block(x).transpose([0, 2, 1])).transpose([0, 2, 1])
        return paddle.matmul(self.last(self.reader(x)), self.embed.weight, transpose_y=True)

    PLACES = {0: "embed", 1: "first", 3: "norm", 4: "second", 5: "block", 7: "batch_norm", 9: "reader", 10: "last"}


def message_of(call: Any) -> str:
    """``Type: message`` of what ``call`` raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"

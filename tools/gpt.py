"""A byte-level GPT in plain Paddle layers, as a user would write it: nothing here knows about sharding.

The output head has no weight of its own: it reads the embedding's, outside of the embedding's own ``forward``.

Activations are float32 (or what ``auto_cast`` makes of them) whatever the dtype of the weights: on CPU Paddle has no
kernels that compute with 16-bit ones, but a cast of them works everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

__all__ = ["GPT", "GPTConfig", "generate"]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; ``width`` is a multiple of ``heads``."""

    layers: int
    width: int
    heads: int
    seq: int  # longest input, in bytes
    dropout: float = 0.0
    vocabulary: int = 256  # every byte is a token


class Linear(nn.Linear):
    """A dense layer that computes in the dtype of its input."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Float [..., in] to [..., out]."""
        return F.linear(x, _cast(self.weight, x.dtype), _cast(self.bias, x.dtype))


class LayerNorm(nn.LayerNorm):
    """A norm over the last axis that computes in the dtype of its input."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """To the same shape."""
        weight, bias = _cast(self.weight, x.dtype), _cast(self.bias, x.dtype)
        return F.layer_norm(x, self._normalized_shape, weight, bias, self._epsilon)


class Embedding(nn.Embedding):
    """A table of vectors; float32 ones come out of it."""

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """Int64 [...] to float32 [..., width]."""
        return F.embedding(tokens, _cast(self.weight, paddle.float32))


class Attention(nn.Layer):
    """Causal multi-head self-attention: float [batch, seq, width] to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = Linear(config.width, 3 * config.width, weight_attr=_normal(0.02))
        self.out = Linear(config.width, config.width, weight_attr=_residual(config))
        slopes = 2.0 ** (-8.0 * np.arange(config.heads, dtype="float32") / config.heads)
        self.register_buffer("slopes", paddle.to_tensor(slopes.reshape([-1, 1, 1])), persistable=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Mix each position with those before it."""
        batch, seq, width = x.shape
        # [batch, seq, 3 * width] -> [3, batch, heads, seq, head width]
        qkv = self.qkv(x).reshape([batch, seq, 3, self.heads, width // self.heads]).transpose([2, 0, 3, 1, 4])
        query, key, value = qkv.unbind(0)
        scores = paddle.matmul(query, key, transpose_y=True) / math.sqrt(width // self.heads)
        weights = F.softmax(scores + self._bias(seq).astype(scores.dtype))
        weights = F.dropout(weights, self.dropout, training=self.training)
        mixed = paddle.matmul(weights, value).transpose([0, 2, 1, 3]).reshape([batch, seq, width])
        return self.out(mixed)

    def _bias(self, seq: int) -> paddle.Tensor:
        """Added to the scores, [heads, seq, seq]: each head favours near bytes by its slope, and none sees ahead."""
        place = paddle.arange(seq, dtype="float32")
        distance = place.unsqueeze(1) - place
        return paddle.where(
            distance < 0, paddle.full_like(distance, -1e9), -_cast(self.slopes, distance.dtype) * distance
        )


class Block(nn.Layer):
    """One pre-norm transformer block: float [batch, seq, width] to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = LayerNorm(config.width)
        self.mlp = nn.Sequential(
            Linear(config.width, 4 * config.width, weight_attr=_normal(0.02)),
            nn.GELU(approximate=True),
            Linear(4 * config.width, config.width, weight_attr=_residual(config)),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Add what attention, then what the two dense layers find."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Layer):
    """Tokens, int64 [batch, seq], to logits of the next byte, float [batch, seq, vocabulary]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocabulary, config.width, weight_attr=_normal(0.02))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.LayerList([Block(config) for _ in range(config.layers)])
        self.norm = LayerNorm(config.width)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """Embed, run the blocks, and compare with every row of the embedding."""
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return paddle.matmul(x, _cast(self.embedding.weight, x.dtype), transpose_y=True)


def generate(model: GPT, prompt: bytes, length: int, temperature: float, seed: int) -> bytes:
    """``length`` bytes that ``model`` writes after ``prompt``, sampled at ``temperature`` (> 0)."""
    model.eval()
    rng = np.random.default_rng(seed)
    text = list(prompt)
    with paddle.no_grad():
        for _ in range(length):
            window = np.array([text[-model.config.seq :]], dtype="int64")
            logits = model(paddle.to_tensor(window))[0, -1].astype("float32").numpy().astype("float64") / temperature
            chances = np.exp(logits - logits.max())
            text.append(int(rng.choice(len(chances), p=chances / chances.sum())))
    return bytes(text[len(prompt) :])


def _cast(tensor: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)


def _normal(std: float) -> paddle.ParamAttr:
    return paddle.ParamAttr(initializer=nn.initializer.Normal(0.0, std))


def _residual(config: GPTConfig) -> paddle.ParamAttr:
    """Start of a weight whose output is added to the residual stream: 2 a layer, so their sum keeps its scale."""
    return _normal(0.02 / math.sqrt(2 * config.layers))

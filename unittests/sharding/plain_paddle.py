"""A model, its data and its optimizers in plain Paddle; as a program, what a user without this package does.

``python plain_paddle.py FOLDER START STOP RESULT`` reads ``model.pdmodel`` and ``model.pdopt`` of FOLDER with
``paddle.load``, trains on from step START to STOP in one process, and writes weights and states with ``paddle.save``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import paddle
from paddle import nn

__all__ = ["Rich", "batch", "build", "train"]


class Head(nn.Layer):
    """An output layer whose weight belongs to an embedding."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Any) -> Any:
        return paddle.matmul(x, self.weight, transpose_y=True)


class Rich(nn.Layer):
    """Tied, frozen, unused, 0-d and odd-sized parameters; buffers of several dtypes, one of them not persistable."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.frozen = nn.Linear(7, 7)
        for param in self.frozen.parameters():
            param.stop_gradient = True
        self.norm = nn.BatchNorm1D(7)
        self.blocks = nn.LayerList([nn.Linear(7, 5), nn.Linear(5, 7)])
        self.scale = self.create_parameter([], default_initializer=nn.initializer.Constant(1.5))
        self.unused = nn.Linear(3, 3)
        self.head = Head(self.embedding.weight)
        self.register_buffer("counts", paddle.to_tensor([1, 2, 3], dtype="int64"))
        self.register_buffer("doubles", paddle.to_tensor([0.1, 0.2], dtype="float64"))
        self.register_buffer("cache", paddle.zeros([4]), persistable=False)
        self.counts.name, self.doubles.name = "rich_counts", "rich_doubles"  # the automatic ones never start over

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids).mean(axis=1)
        x = self.norm(x + self.frozen(x))
        x = x + self.blocks[1](paddle.tanh(self.blocks[0](x)))
        return self.head(x * self.scale)


def build(optimizer: str = "AdamW") -> tuple[Any, Any]:
    """The model and an optimizer over all of its parameters."""
    paddle.seed(7)
    model = Rich()
    params = model.parameters()
    scheduler = paddle.optimizer.lr.StepDecay(0.05, step_size=3, gamma=0.5)
    if optimizer == "AdamW":
        return model, paddle.optimizer.AdamW(scheduler, parameters=params, weight_decay=0.01)
    if optimizer == "Momentum":
        return model, paddle.optimizer.Momentum(0.05, parameters=params)
    if optimizer == "Lamb":
        return model, paddle.optimizer.Lamb(0.05, parameters=params)
    return model, paddle.optimizer.SGD(0.05, parameters=params)


def batch(step: int, rank: int = 0) -> Any:
    """Token ids."""
    return paddle.to_tensor(np.random.RandomState(100 * step + rank).randint(0, 11, [6, 4]))


def train(model: Any, optimizer: Any, start: int, stop: int, rank: int = 0) -> list[float]:
    """Steps ``start`` to ``stop``; the losses."""
    losses = []
    for step in range(start, stop):
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        scheduler = getattr(optimizer, "_learning_rate", None)
        if isinstance(scheduler, paddle.optimizer.lr.LRScheduler):
            scheduler.step()
        losses.append(float(loss.item()))
    return losses


def main() -> None:
    folder, start, stop, result = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    paddle.set_device("cpu")
    model, optimizer = build()
    missing, unexpected = model.set_state_dict(paddle.load(os.path.join(folder, "model.pdmodel")))
    assert (missing, unexpected) == ([], [])
    optimizer.set_state_dict(paddle.load(os.path.join(folder, "model.pdopt")))
    losses = train(model, optimizer, start, stop)
    paddle.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}, result)
    assert not any(name.startswith("paddle_group_sharded") for name in sys.modules)


if __name__ == "__main__":
    main()

"""Losses of micro-batches: each counts by its share of the samples, so that their sum is the loss of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import paddle

from ..errors import UsageError
from .layer import PipelineLayer

__all__ = ["LossMeter", "Losses"]

Tensor = Any


class Losses(NamedTuple):
    """The shares of the micro-batches, which add up to the loss, of every loss function."""

    shares: list[list[float]]  # [loss function][micro-batch]
    dtype: str  # float32 for 16-bit losses too: shares are small numbers that are added

    def total(self, index: int) -> Tensor:
        """The loss of the whole batch, a 0-d tensor."""
        return paddle.to_tensor(sum(self.shares[index]), dtype=self.dtype)

    def each(self, index: int) -> Tensor:
        """The share of every micro-batch, a 1-D tensor."""
        return paddle.to_tensor(self.shares[index], dtype=self.dtype)


class LossMeter:
    """Computes the losses of one step on the last stage; also what the runner calls, see :class:`.runner.Job`."""

    def __init__(
        self, layer: PipelineLayer, labels: Optional[Sequence[Any]], sizes: Sequence[int], index: int, scale: float
    ) -> None:
        """``sizes``: samples of each micro-batch; ``index``: the loss to differentiate, multiplied by ``scale``."""
        self._layer = layer
        self._labels = labels
        self._weights = [size / sum(sizes) for size in sizes]
        self._index = index
        self._scale = scale
        self._shares: list[list[Tensor]] = [[] for _ in layer.loss_fns]

    def __call__(self, micro_batch: int, output: Any) -> Tensor:
        """The share of a micro-batch in the loss, times the scale; the last stage takes micro-batches in order."""
        label = None if self._labels is None else self._labels[micro_batch]
        weight = self._weights[micro_batch]
        losses = [self._one(output, label, index) for index in range(len(self._shares))]
        for shares, loss in zip(self._shares, losses):
            shares.append(_at_least_float32(loss.detach()) * weight)
        factor = weight * self._scale
        return losses[self._index] if factor == 1.0 else losses[self._index] * factor

    def result(self) -> Losses:
        """What has been computed, as numbers."""
        dtype = str(self._shares[0][0].dtype).rpartition(".")[2]
        return Losses([[float(share.item()) for share in shares] for shares in self._shares], dtype)

    def _one(self, output: Any, label: Any, index: int) -> Tensor:
        loss = self._layer.compute_loss(output, label, index)
        if not isinstance(loss, paddle.Tensor) or loss.size != 1:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, paddle.Tensor) else repr(loss)
            raise UsageError(
                f"expected one number from loss function {index}, got {got}; use reduction='mean', or take the mean"
            )
        return loss


def _at_least_float32(loss: Tensor) -> Tensor:
    return loss.astype("float32") if loss.dtype in (paddle.float16, paddle.bfloat16) else loss

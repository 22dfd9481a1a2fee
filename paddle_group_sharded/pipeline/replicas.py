"""Gradients averaged over the replicas of a stage, while other stages may still compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import paddle

from ..comm import Comm, Work
from ..errors import UsageError
from ..paddle_compat import flat_view, grad_of, has_grad, is_sparse

__all__ = ["ReplicaAverage", "params_by_reduction"]

Tensor = Any


class _Bucket(NamedTuple):
    """Gradients of one dtype under way: all of them, one after the other, then one flag each."""

    params: list[Tensor]
    flat: Tensor
    work: Work


class ReplicaAverage:
    """Averages the gradients of each virtual stage of this rank with those of its replicas."""

    def __init__(self, comm: Comm) -> None:
        """``comm``: over the replicas."""
        self._comm = comm
        self._params: Mapping[int, Sequence[Tensor]] = {}
        self._buckets: list[_Bucket] = []

    def expect(self, params: Mapping[int, Sequence[Tensor]]) -> None:
        """A step begins, in which the reduction of each virtual stage moves the gradients of these ``params``."""
        self._params = params
        self._buckets.clear()

    def begin(self, stage: int) -> None:
        """Start the sums of a virtual stage; collective over the replicas, in the order of the plan."""
        by_dtype: dict[str, list[Tensor]] = {}
        for param in self._params.get(stage, ()):
            if not param.stop_gradient:
                by_dtype.setdefault(str(param.dtype), []).append(param)
        for dtype, params in sorted(by_dtype.items()):
            flags = [float(has_grad(param)) for param in params]
            parts = [_flat_grad(param) for param in params]
            flat = paddle.concat([*parts, paddle.to_tensor(flags).astype(params[0].dtype)])
            label = f"gradients of stage {stage}, {dtype}"
            self._buckets.append(_Bucket(params, flat, self._comm.all_reduce(flat, label)))

    def finish(self) -> None:
        """Wait for all sums and put the averages in place; a gradient that no replica has stays absent."""
        buckets, self._buckets = self._buckets, []
        for params, flat, work in buckets:
            work.wait()
            flags = flat[-len(params) :].astype("float32").tolist()
            flat.scale_(1.0 / self._comm.world_size)
            start = 0
            for param, flag in zip(params, flags):
                stop = start + int(param.size)
                if flag > 0:
                    param.grad = flat_view(flat, start, stop).reshape(param.shape)
                start = stop


def params_by_reduction(order: Sequence[int], params: Mapping[int, Sequence[Tensor]]) -> dict[int, list[Tensor]]:
    """The parameters that each reduction moves: a parameter of several virtual stages goes with the last of them.

    ``order``: the virtual stages of this rank in the order of their reductions.
    """
    last: dict[int, int] = {id(param): stage for stage in order for param in params[stage]}
    result: dict[int, list[Tensor]] = {}
    for stage in order:
        mine = {id(param): param for param in params[stage] if last[id(param)] == stage}
        result[stage] = list(mine.values())
    return result


def _flat_grad(param: Tensor) -> Tensor:
    grad = grad_of(param)
    if grad is None:
        return paddle.zeros([int(param.size)], dtype=param.dtype)
    if is_sparse(grad):
        raise UsageError(
            f"parameter {param.name!r} has sparse gradients, which cannot be averaged over replicas; build its layer "
            f"with sparse=False"
        )
    grad = grad.detach()
    return (grad if grad.dtype == param.dtype else grad.astype(param.dtype)).reshape([-1])

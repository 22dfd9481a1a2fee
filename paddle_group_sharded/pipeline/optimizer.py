"""The user's optimizer in a pipeline: each rank steps its own parameters, and all decide together.

Together are decided the factor of ``ClipGradByGlobalNorm``, whose norm is over all stages and counts a shared weight
once, and whether scaled gradients have overflowed.  All else is the user's optimizer's own: states, rates, groups,
``ClipGradByNorm`` and ``ClipGradByValue``, which look at one parameter.
"""

from __future__ import annotations

import logging
from typing import Any, Optional

import paddle
from paddle import nn

from ..clipping import check_clip, clip_factors, square_sum
from ..comm import Comm
from ..errors import UsageError
from ..paddle_compat import has_grad, innermost_optimizer, overflow_flag, param_groups, set_overflow_flag
from ..paddle_pipeline import clip_of, step_with_scaler, unscale_grads, update_scale, without_clips
from ..wrapped_optimizer import WrappedOptimizer
from .layer import PipelineLayer

__all__ = ["PipelineOptimizer"]

Tensor = Any

_logger = logging.getLogger(__name__)


class PipelineOptimizer(WrappedOptimizer):
    """The user's optimizer over this rank's parameters, with a ``step()`` that is collective over the pipeline."""

    _own = frozenset(("_optim", "_layer", "_comm", "skipped_steps"))
    _layer: PipelineLayer
    _comm: Comm
    skipped_steps: int  # steps that an overflow of scaled gradients has skipped

    def __init__(self, optimizer: Any, layer: PipelineLayer) -> None:
        """Wrap ``optimizer``, which was made over ``layer.parameters()``; wrappers of fleet are looked through.

        A rank whose stages have no parameters gives None, or an optimizer over an empty list, which is never stepped.
        """
        inner = optimizer._optim if isinstance(optimizer, PipelineOptimizer) else innermost_optimizer(optimizer)
        if inner is not None or layer.parameters():
            _check(inner, optimizer, layer)
        super().__init__(inner)
        self.__dict__.update(_layer=layer, _comm=layer.comm, skipped_steps=0)

    def is_of(self, layer: PipelineLayer) -> bool:
        """Whether it steps the parameters of ``layer``."""
        return self._layer is layer

    def wraps(self, optimizer: Any) -> bool:
        """Whether this is the wrapper of ``optimizer``."""
        return innermost_optimizer(optimizer) is self._optim

    @property
    def _steps(self) -> bool:
        """Whether this rank has anything to step; Paddle's optimizers fail where there is nothing."""
        return self._optim is not None and any(params for _, params, _ in param_groups(self._optim))

    @paddle.no_grad()
    def step(self) -> None:
        """Clip and update this rank's parameters.  Collective over the launch.

        Where ``scaler.step(optimizer)`` calls it, an overflow of any rank's gradients skips the step of all.
        """
        flag = overflow_flag(self._optim) if self._steps else None
        overflow = self._clip(flag is not None and bool(flag))
        if self._steps:
            if overflow:
                set_overflow_flag(self._optim, True)  # which the optimizer, and the scaler after it, look at
                self._count_skipped()
            with without_clips(self._optim, _is_global):
                self._optim.step()

    @paddle.no_grad()
    def step_scaled(self, scaler: Any) -> None:
        """:meth:`step` with gradients of a loss that ``scaler`` has scaled, if no rank's have overflowed; then
        ``scaler.update()``.  Collective over the launch.
        """
        if not scaler.is_enable():
            self.step()
            return
        overflow = self._clip(self._steps and unscale_grads(scaler, self._optim))
        if overflow:
            self._count_skipped()
        if not self._steps:
            update_scale(scaler, overflow)
            return
        with without_clips(self._optim, _is_global):
            step_with_scaler(scaler, self._optim, overflow)

    def _clip(self, overflow: bool) -> bool:
        """Clip by global norm; returns whether any rank says ``overflow``, in which case nothing was clipped."""
        groups = [(params, clip_of(clip)) for _, params, clip in self._groups()]
        for _, clip in groups:
            check_clip(clip)
        clipped = [_clippable(params) if _is_global(clip) else [] for params, clip in groups]
        counted = self._layer.shared.counted
        sums = [sum(square_sum(param.grad.reshape([-1])) for param in params if counted(param)) for params in clipped]
        reports = self._comm.exchange((overflow, sums), "norms and overflow of the gradients")
        if any(report[0] for report in reports):
            return True
        mine = [reports[self._comm.ranks.index(rank)][1] for rank in self._layer.grid.pipeline_ranks]
        mine = [each for each in mine if each]  # a rank without parameters has no groups
        if len({len(each) for each in mine}) > 1:
            raise UsageError(
                f"expected the same number of parameter groups on every stage, got {[len(each) for each in mine]}; a "
                f"norm is over the group of the same number on all stages"
            )
        for index, (params, (_, clip)) in enumerate(zip(clipped, groups)):
            if _is_global(clip):
                _scale(params, clip_factors(clip, [sum(each[index] for each in mine)])[0])
        return False

    def _count_skipped(self) -> None:
        self.__dict__["skipped_steps"] += 1
        _logger.warning("step skipped: scaled gradients overflowed (%d skipped so far)", self.skipped_steps)

    def _groups(self) -> list[tuple[dict[str, Any], list[Tensor], Any]]:
        return param_groups(self._optim) if self._steps else []

    # ------------------------------------------------------------------------------------------- the rest of the API

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Forget the gradients of this rank's parameters."""
        if self._steps:
            self._optim.clear_grad(set_to_zero)

    clear_gradients = clear_grad

    def state_dict(self) -> dict[str, Any]:
        """The states of this rank's parameters; keys follow the parameters' automatic names, as in one process."""
        state: dict[str, Any] = self._optim.state_dict()
        return state

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take states under the same keys; those of other ranks' parameters may be among them."""
        self._optim.set_state_dict(state_dict)

    load_state_dict = set_state_dict


def _check(inner: Any, given: Any, layer: PipelineLayer) -> None:
    if hasattr(inner, "_optim"):
        raise UsageError(
            f"optimizer is a {type(inner).__name__}, which shards what it steps; a pipeline steps whole parameters of "
            f"its stages: pass the optimizer itself, or use group_sharded_parallel without a pipeline"
        )
    if not isinstance(inner, paddle.optimizer.Optimizer):
        raise UsageError(f"optimizer must be a paddle.optimizer.Optimizer, got {type(given).__name__}")
    known = {id(param) for param in layer.parameters()}
    groups = param_groups(inner)
    foreign = [param.name for _, params, _ in groups for param in params if id(param) not in known]
    if foreign:
        raise UsageError(
            f"the optimizer has {len(foreign)} parameters that are not of this rank's stages, the first is "
            f"{foreign[0]!r}; make it over the PipelineLayer's parameters()"
        )
    for _, _, clip in groups:
        check_clip(clip_of(clip))


def _is_global(clip: Any) -> bool:
    return isinstance(clip_of(clip), nn.ClipGradByGlobalNorm)


def _clippable(params: list[Tensor]) -> list[Tensor]:
    return [p for p in params if not p.stop_gradient and has_grad(p) and getattr(p, "need_clip", True)]


def _scale(params: list[Tensor], factor: Optional[float]) -> None:
    if factor is not None and factor != 1.0:
        for param in params:
            param.grad.scale_(factor)

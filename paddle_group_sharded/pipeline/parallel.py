"""Training and evaluation of a :class:`PipelineLayer`: what users call."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any, Optional, Union

import paddle
from paddle import nn

from ..errors import UsageError
from .action import Plan
from .engine import Engine
from .layer import PipelineLayer
from .optimizer import PipelineOptimizer
from .parallel_members import ParallelMembers
from .render import side_by_side
from .schedules import Schedule
from .settings import Settings
from .simulate import timeline
from .timeline import Timeline

__all__ = ["PipelineParallel", "pipeline_parallel"]

Tensor = Any


class PipelineParallel(ParallelMembers, nn.Layer):  # type: ignore[misc]
    """Trains a :class:`PipelineLayer` by a schedule; ``train_batch`` and ``eval_batch`` are those of Paddle's class.

    ``hcg`` and ``strategy`` are fleet's; of the strategy, ``pipeline_configs`` counts: ``accumulate_steps`` (the number
    of micro-batches), ``micro_batch_size`` and ``schedule_mode``.  ``micro_batches`` and ``schedule`` say the same
    without fleet, see :func:`pipeline_parallel`; ``accumulate_steps`` may be changed between steps.

    ``timeout``: seconds that a rank waits for a message of another one.  Collective over all ranks of the launch, as
    are ``train_batch``, ``eval_batch``, ``forward_backward_pipeline``, ``gather_timeline`` and ``report``.
    """

    def __init__(
        self,
        layers: PipelineLayer,
        hcg: Optional[Any] = None,
        strategy: Optional[Any] = None,
        *,
        micro_batches: Optional[int] = None,
        schedule: Union[str, Path, Plan, Schedule, None] = None,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__()
        if not isinstance(layers, PipelineLayer):
            raise UsageError(
                f"expected a PipelineLayer of paddle_group_sharded, got {type(layers).__name__}; describe the model as "
                f"a list of layers: PipelineLayer([LayerDesc(...), ...], num_stages=..., loss_fn=...)"
            )
        settings = Settings.of(layers.grid, hcg, strategy, micro_batches, schedule)
        if settings.schedule == "interleaved" and len(layers.chunks) == 1:
            warnings.warn(
                "schedule 'interleaved' with one chunk per rank is 1f1b; give PipelineLayer "
                "num_virtual_pipeline_stages=2 or more",
                stacklevel=2,
            )
        self._layers = layers
        self.accumulate_steps = settings.micro_batches
        self.micro_batch_size = settings.micro_batch_size
        self._engine = Engine(layers, settings.schedule, timeout)
        self._optimizer: Optional[PipelineOptimizer] = None
        self._engine.plan(self.accumulate_steps)  # what cannot run is refused here

    # ------------------------------------------------------------------------------------------------------- running

    def train_batch(
        self,
        data: Any,
        optimizer: Any,
        lr_scheduler: Optional[Any] = None,
        scaler: Optional[Any] = None,
        loss_fn_idx: int = 0,
        return_micro_batch_loss: bool = False,
    ) -> Any:
        """Forward, backward and one step of ``optimizer``, and of ``lr_scheduler``; returns the loss on every rank.

        ``data`` is ``[inputs, labels]`` of the whole batch of this replica, or an iterator of micro-batches, see
        :func:`.batches.cut`.  Only the first stage needs inputs, and only the last one labels.  Each micro-batch
        counts by its number of samples, so the loss, a 0-d tensor, is that of the whole batch if the loss function is
        a mean over samples; of one that sums, it is the mean of the micro-batches' sums, weighted by their samples.
        With ``return_micro_batch_loss`` it is a 1-D tensor of the micro-batches' shares, which add up to it.  With
        several loss functions a list with one entry each is returned; number ``loss_fn_idx`` is differentiated.

        A ``lr_scheduler`` whose ``step`` asks for metrics, such as ``ReduceOnPlateau``, gets that loss; with several
        replicas, whose losses differ, :class:`UsageError` before anything has run.

        Random numbers are drawn from seeds that depend on the step (``random_step``), the replica, the micro-batch and
        the layer, see :mod:`.step_seeds`.

        Raises StopIteration where an iterator has ended: on every rank, with nothing changed.
        """
        wrapped = self._wrap(optimizer)
        asks = lr_scheduler is not None and _asks_for_metrics(lr_scheduler)
        if asks and self._layers.grid.num_replicas > 1:
            raise UsageError(
                f"{type(lr_scheduler).__name__} needs one number for all {self._layers.grid.num_replicas} replicas, "
                f"but each has a loss of its own; leave lr_scheduler out, average the losses over the replicas, and "
                f"call its step(loss)"
            )
        loss = self.forward_backward_pipeline(
            data, scaler, loss_fn_idx=loss_fn_idx, return_micro_batch_loss=return_micro_batch_loss, optimizer=wrapped
        )
        if scaler is not None:
            wrapped.step_scaled(scaler)
        else:
            wrapped.step()
        wrapped.clear_grad()
        if lr_scheduler is not None:
            own = loss[loss_fn_idx] if isinstance(loss, list) else loss
            lr_scheduler.step(*[float(own.sum().item())] if asks else [])  # of several micro-batches: of their shares
        return loss

    def forward_backward_pipeline(
        self,
        data: Any,
        scaler: Optional[Any] = None,
        static_scheduler: bool = False,
        return_micro_batch_loss: bool = False,
        loss_fn_idx: int = 0,
        optimizer: Optional[PipelineOptimizer] = None,
    ) -> Any:
        """:meth:`train_batch` without the optimizer's step: gradients are added to those that are there.

        ``optimizer``: forgets the gradients if the step fails.  ``static_scheduler``: return the plan as text instead.
        """
        if static_scheduler:
            return str(self.plan)
        self._layers.train()
        # Asked for on every rank: a scaler switches itself off here where auto_cast needs none.
        scale = 1.0 if scaler is None else float(scaler.scale(paddle.ones([1])).item())
        try:
            result = self._engine.run(data, self.accumulate_steps, True, loss_fn_idx, scale)
        except Exception:
            if optimizer is not None:
                optimizer.clear_grad()
            raise
        return self._losses(result.losses, return_micro_batch_loss)

    def eval_batch(self, data: Any, compute_loss: bool = False, loss_fn_idx: int = 0) -> Any:
        """Forward without gradients, with the layers in eval mode.

        With ``compute_loss`` the loss, as :meth:`train_batch` gives it, on every rank.  Without, the list of outputs of
        the micro-batches on ranks that hold the last stage, and None on others; labels may then be None.  A batch of
        fewer samples than micro-batches is cut into fewer.
        """
        self._layers.eval()
        result = self._engine.run(data, self.accumulate_steps, False, loss_fn_idx if compute_loss else None)
        return self._losses(result.losses, False) if compute_loss else result.outputs

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """With one stage the model itself; with several, :class:`UsageError`."""
        if self._layers.grid.num_stages > 1:
            raise UsageError(
                f"this model is spread over {self._layers.grid.num_stages} stages and cannot be called; use "
                f"train_batch or eval_batch, on every rank"
            )
        return self._layers(*inputs, **kwargs)

    def close(self) -> None:
        """Close the connections; the next step opens new ones.  Collective."""
        self._engine.disconnect()

    # --------------------------------------------------------------------------------------------------------- state

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """This rank's layers, under the names of the one-process model."""
        return self._layers.layer_state_dict()

    def set_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        """Load this rank's part of a one-process state; returns names that were missing and names nobody knows."""
        return self._layers.set_layer_state_dict(state_dict)

    load_dict = set_dict = set_state_dict

    # ------------------------------------------------------------------------------------------ plan and measurement

    @property
    def random_step(self) -> int:
        """Training steps so far.  A run that is resumed sets it, to draw the random numbers of the run it goes on."""
        return self._layers.random_step

    @random_step.setter
    def random_step(self, value: int) -> None:
        self._layers.random_step = value

    @property
    def plan(self) -> Plan:
        """The plan of a training step, with transfers."""
        return self._engine.plan(self.accumulate_steps)

    @property
    def planned_timeline(self) -> Timeline:
        """The timeline of :attr:`plan` by the simulator, in units of one forward."""
        return timeline(self.plan)

    def gather_timeline(self) -> Timeline:
        """The measured timeline of this pipeline's last training step, in seconds since it began.  Collective.

        Before the first training step it is that of the last evaluation.
        """
        spans = [] if self._engine.runner is None else self._engine.runner.spans()
        by_rank = self._layers.comm.exchange(spans, "timeline")
        ranks = [self._layers.comm.ranks.index(rank) for rank in self._layers.grid.pipeline_ranks]
        return Timeline(tuple(span for rank in ranks for span in by_rank[rank]))

    def report(self) -> str:
        """Bubble and live activations of each rank, planned and measured in the last training step.  Collective."""
        return side_by_side(self.planned_timeline, self.gather_timeline())

    # --------------------------------------------------------------------------------------------------------- parts

    def _wrap(self, optimizer: Any) -> PipelineOptimizer:
        """One wrapper for each optimizer of the user, kept from step to step."""
        if isinstance(optimizer, PipelineOptimizer) and optimizer.is_of(self._layers):
            return optimizer
        if self._optimizer is None or not self._optimizer.wraps(optimizer):
            self._optimizer = PipelineOptimizer(optimizer, self._layers)
        return self._optimizer

    def _losses(self, losses: Any, each: bool) -> Any:
        count = range(len(losses.shares))
        found = [losses.each(index) if each else losses.total(index) for index in count]
        return found[0] if len(found) == 1 else found


def _asks_for_metrics(scheduler: Any) -> bool:
    """Whether ``scheduler.step`` cannot be called without an argument."""
    params = inspect.signature(scheduler.step).parameters.values()
    return any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in params)


def pipeline_parallel(
    pipeline_layer: PipelineLayer,
    optimizer: Optional[Any],
    micro_batches: int = 4,
    schedule: Union[str, Path, Plan, Schedule, None] = "1f1b",
    *,
    timeout: float = 1800.0,
) -> tuple[PipelineParallel, PipelineOptimizer]:
    """Wrap a model and its optimizer for training by a schedule, without fleet's strategies.

    ``optimizer`` was made over ``pipeline_layer.parameters()``; None on a rank that has no parameters.
    ``micro_batches``: into how many a batch is cut.  ``schedule``: ``"1f1b"``, ``"interleaved"`` (for several chunks),
    ``"gpipe"``, ``"zb_h1"``, a :class:`.action.Plan`, or the path of one (``.txt``, ``.csv``).  ``timeout``: seconds
    that a rank waits for a message of another one.

    Returns the model, whose ``train_batch`` and ``eval_batch`` run it, and the optimizer, whose ``step`` is collective.
    Collective over all ranks of the launch; ``world size // num_stages`` replicas train on batches of their own.

    Raises :class:`UsageError` for an optimizer of other parameters, and for a schedule that does not fit the stages
    and chunks; :class:`.simulate.ScheduleError` for a plan that would deadlock or leaves something out.

    >>> import paddle
    >>> from paddle import nn
    >>> from paddle_group_sharded import LayerDesc, PipelineLayer, pipeline_parallel
    >>> entries = [LayerDesc(nn.Linear, 4, 8), LayerDesc(nn.Linear, 8, 2)]
    >>> layers = PipelineLayer(entries, num_stages=1, loss_fn=nn.MSELoss(), seed=1)
    start segment network..
    ...
    >>> optimizer = paddle.optimizer.SGD(0.1, parameters=layers.parameters())
    >>> model, optimizer = pipeline_parallel(layers, optimizer, micro_batches=3)
    >>> loss = model.train_batch([paddle.ones([6, 4]), paddle.zeros([6, 2])], optimizer)
    >>> loss.shape == [] and float(model.eval_batch([paddle.ones([6, 4]), paddle.zeros([6, 2])], True)) < float(loss)
    True
    """
    model = PipelineParallel(pipeline_layer, micro_batches=micro_batches, schedule=schedule, timeout=timeout)
    return model, PipelineOptimizer(optimizer, pipeline_layer)

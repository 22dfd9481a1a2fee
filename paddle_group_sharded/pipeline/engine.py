"""Runs plans on this rank.  A step, from one end to the other:

    cut the data         what this rank needs of it
    agree                is the data there, alike, and of the right size?  all go on, or all raise
    run the plan         a rank that fails tells its neighbours, which fail in turn, and come to the next line too
    agree                the loss to every rank; or the first failure, which all raise
    finish gradients     averages over replicas arrive, shared weights are summed
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import paddle

from ..comm import Comm, create_comm
from ..comm.agreement import agree
from ..errors import GroupShardedError, UsageError
from .action import Kind, Plan, round_robin
from .batches import Batch, cut
from .chunk import Chunk
from .desc import is_shared_desc
from .grid import Ranks
from .layer import PipelineLayer
from .losses import Losses, LossMeter
from .lowering import add_grad_reduce, add_transfers
from .mail import Mail
from .randomness import RandomStates
from .replicas import ReplicaAverage, params_by_reduction
from .runner import Job, Runner
from .schedules import Schedule, make_plan
from .simulate import check
from .stage import Stage
from .step_agreement import Facts, agree_after, agree_before
from .step_seeds import seed_layer
from .weight_grad import WeightGrads

__all__ = ["Engine", "Result"]


class Result(NamedTuple):
    """What a step gives."""

    losses: Optional[Losses]  # of this rank's pipeline; None where no loss was asked for
    outputs: Optional[list[Any]]  # of each micro-batch, on the last stage, when no loss was asked for


class _Links(NamedTuple):
    """Connections that a failed step leaves unusable."""

    mail: Mail
    average: Optional[ReplicaAverage]
    comm: Optional[Comm]  # that of the average


class Engine:
    """The stages of one rank and their connections to the others."""

    def __init__(self, layer: PipelineLayer, schedule: Union[str, Path, Plan, Schedule, None], timeout: float) -> None:
        """``timeout``: seconds that a rank waits for another's message."""
        self.runner: Optional[Runner] = None  # of the last step; of the last evaluation before the first one
        self._has_trained = False
        self._layer = layer
        self._grid = layer.grid
        self._comm: Comm = layer.comm
        self._schedule = schedule
        self._timeout = timeout
        self._plans: dict[tuple[int, bool], Plan] = {}
        self._prints: dict[int, str] = {}  # of training plans, by number of micro-batches
        self._weight_grads = WeightGrads(each for _, each in layer.named_layers())
        self._chunks = {chunk.virtual_stage: chunk for chunk in layer.chunks}
        self._stages = {
            virtual: Stage(self._run_of(chunk), _name(chunk), self._weight_grads)
            for virtual, chunk in self._chunks.items()
        }
        self._links: Optional[_Links] = None

    def plan(self, num_micro_batches: int, training: bool = True) -> Plan:
        """The plan of a step, proved, with transfers and reductions; :class:`UsageError` where there is none."""
        key = (num_micro_batches, training)
        if key not in self._plans:
            ranks, chunks = self._grid.num_stages, self._layer.segmentation.num_chunks
            plan = make_plan(self._schedule if training else "forward_only", ranks, num_micro_batches, chunks)
            if plan.stage_to_rank != round_robin(ranks, chunks):
                raise UsageError(
                    f"the plan has virtual stages 0, 1, ... on ranks {plan.stage_to_rank}, a PipelineLayer has them on "
                    f"{round_robin(ranks, chunks)}; deal them out in turns"
                )
            if training and not plan.has_backward:
                raise UsageError("the plan has no backward, so it cannot train; choose another schedule")
            plan = plan if plan.has_transfers else add_transfers(plan)
            reduces = any(action.kind is Kind.REDUCE for row in plan.actions for action in row)
            plan = add_grad_reduce(plan) if training and not reduces else plan
            check(plan)
            self._plans[key] = plan
        return self._plans[key]

    def run(
        self, data: Any, num_micro_batches: int, training: bool, loss_index: Optional[int], scale: float = 1.0
    ) -> Result:
        """One step over ``data``, or one evaluation.  Collective over the launch.

        ``loss_index``: the loss to differentiate; None for no loss, in an evaluation.  ``scale``: what gradients are
        multiplied by.  Raises StopIteration on every rank where an iterator has ended.  Gradients are added to those
        that are there already; after an error they are of no use.
        """
        word = "train" if training else "evaluate"
        batch, sizes = self._agree(data, num_micro_batches, training, loss_index, word)
        runner = self._make_runner(self.plan(len(sizes), training))
        if training or not self._has_trained:
            self.runner, self._has_trained = runner, training
        meter = None
        if loss_index is not None and self._holds_last:
            meter = LossMeter(self._layer, batch.labels, sizes, loss_index, scale)
        job = Job(batch.inputs, meter)
        failure: Optional[Exception] = None
        losses: Optional[Losses] = None
        try:
            self._layer.shared.synchronize_if_changed()
            if training:
                self._layer.shared.begin_gradients()
            with self._surroundings(training, splits=runner.has(Kind.I)):
                runner.run(job)
            losses = None if meter is None else meter.result()
        except Exception as error:
            failure = error
            self._tell(error)
        except BaseException:  # an interrupt: whoever waits for this rank's messages sees the connection end
            self._drop_mail()
            raise
        try:
            reports = agree_after(self._comm, f"end: {word}", failure, losses)
        except Exception:
            self.disconnect()
            raise
        if training:
            self._layer.random_step += 1
            self._finish_gradients()
        last = self._comm.ranks.index(self._grid.pipeline_ranks[-1])
        return Result(reports[last], job.outputs if meter is None and self._holds_last else None)

    def disconnect(self) -> None:
        """Forget the step and close the connections; the next step opens new ones.  Collective."""
        links = self._drop_mail()
        if links is not None and links.comm is not None:
            links.comm.close()  # what is under way there ends when the other replicas close theirs

    def _drop_mail(self) -> Optional[_Links]:
        links, self._links = self._links, None
        if links is not None:
            links.mail.close()
        for stage in self._stages.values():
            stage.reset()
        return links

    # ---------------------------------------------------------------------------------------------------------- parts

    @property
    def _holds_first(self) -> bool:
        return self._grid.stage == 0

    @property
    def _holds_last(self) -> bool:
        return self._grid.stage == self._grid.num_stages - 1

    def _agree(
        self, data: Any, count: int, training: bool, loss_index: Optional[int], word: str
    ) -> tuple[Batch, list[int]]:
        """This rank's data, and the samples of each micro-batch."""
        problem: Optional[Exception] = None
        plan: Optional[str] = None
        batch = Batch(None, None, [], count)
        try:
            if loss_index is not None and not 0 <= loss_index < len(self._layer.loss_fns):
                raise UsageError(
                    f"expected a loss function number {loss_index}, but the PipelineLayer has "
                    f"{len(self._layer.loss_fns)}; pass loss_fn to PipelineLayer (one, or a list of them)"
                )
            needs_labels = loss_index is not None and self._holds_last
            batch = cut(data, count, self._holds_first, needs_labels, fewer=not training)
            if training:
                plan = self._plan_print(count)
        except Exception as error:
            problem = error
        options = {"the number of micro-batches": count, "loss_fn_idx": loss_index, "the schedule": plan}
        facts, pipeline = Facts.of(batch, options), self._grid.pipeline_ranks
        return batch, agree_before(self._comm, word, problem, facts, not training, pipeline)

    def _plan_print(self, count: int) -> str:
        """What a training step's plan is called, and a number that tells it from others."""
        if count not in self._prints:
            is_name = isinstance(self._schedule, str) and not self._schedule.lower().endswith((".txt", ".csv"))
            name = self._schedule if is_name else "plan"  # a path may be another on every rank
            self._prints[count] = f"{name} ({zlib.crc32(str(self.plan(count)).encode()):08x})"
        return self._prints[count]

    def _make_runner(self, plan: Plan) -> Runner:
        if self._links is None:
            self._links = self._connect(plan)
        average = self._links.average
        if average is not None:
            order = [action.stage for action in plan.actions[self._grid.stage] if action.kind is Kind.REDUCE]
            params = {stage: self._chunks[stage].parameters() for stage in self._stages}
            average.expect(params_by_reduction(order, params))
        begin = (lambda stage: None) if average is None else average.begin
        return Runner(plan, self._grid.stage, self._stages, self._links.mail, begin)

    def _connect(self, plan: Plan) -> _Links:
        mail = Mail(self._comm, self._grid, plan, self._timeout)
        if self._grid.num_replicas == 1:
            return _Links(mail, None, None)
        comm = create_comm(Ranks(self._grid.replica_ranks), self._timeout)
        return _Links(mail, ReplicaAverage(comm), comm)

    def _finish_gradients(self) -> None:
        """Averages, then sums of shared weights; what raises on the ranks that take part raises on all."""
        average = None if self._links is None else self._links.average
        if average is None and not any(is_shared_desc(entry) for entry in self._layer.descs):
            return
        problem: Optional[GroupShardedError] = None
        try:
            if average is not None:
                average.finish()
            self._layer.shared.reduce_gradients()
        except GroupShardedError as error:
            problem = error
        agree((self._comm,), "gradients", problem)

    def _tell(self, error: Exception) -> None:
        if self._links is not None:
            self._links.mail.tell_failure(f"rank {self._grid.global_rank} failed: {error}")

    @contextlib.contextmanager
    def _surroundings(self, training: bool, splits: bool) -> Iterator[None]:
        """What holds while a plan runs: its own random numbers; layers in two halves, or no gradients."""
        states = RandomStates.now()
        try:
            with self._weight_grads.installed() if splits else contextlib.nullcontext():
                with contextlib.nullcontext() if training else paddle.no_grad():
                    yield
        finally:
            states.restore()

    def _run_of(self, chunk: Chunk) -> Any:
        replica = self._grid.replica

        def run(micro_batch: int, value: Any) -> Any:
            # As they are now, for a recompute of this pass too; a checkpoint brings those of the run that goes on.
            base, step = self._layer.base_seed, self._layer.random_step
            return chunk(value, lambda index: seed_layer(base, step, replica, micro_batch, index))

        return run


def _name(chunk: Chunk) -> str:
    return f"stage {chunk.virtual_stage} (layers {chunk.start} to {chunk.stop - 1})"

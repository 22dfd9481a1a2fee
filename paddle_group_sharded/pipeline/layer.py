"""A model described as a list of layers, of which each rank builds its own stages."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Callable, Optional

from paddle import nn

from ..comm.agreement import agree
from ..errors import GroupShardedError, UsageError
from .announce import announce
from .build import build_layers, check_built_layers, equalize_built_layers, function_of
from .chunk import Chunk
from .desc import class_name, is_shared_desc
from .grid import Grid
from .layer_state import load_layers, own_names, state_of_layers
from .naming import own_namespace
from .paddle_members import PaddleMembers
from .plan_layers import LayerPlan, plan_layers
from .report import classic, table
from .segment import SegMethod
from .sequential import SequentialModel, sequential_model
from .shared import SharedWeights

__all__ = ["PipelineLayer"]

Tensor = Any


class PipelineLayer(PaddleMembers, nn.Layer):  # type: ignore[misc]  # Paddle is Any
    """A list of layers cut into the stages of a pipeline; this rank holds, and ever allocates, its own stages only.

    ``layers`` holds descriptions (:class:`LayerDesc`, :class:`SharedLayerDesc`, Paddle's own too), layers that are
    built already, and functions of what the entry before returns.  ``num_stages`` is the number of ranks of a
    pipeline, and further ranks are replicas; or ``topology`` is Paddle's, else that of ``fleet.init``.  ``loss_fn`` is
    a function of (output, label), or a list of such.  ``seg_method`` says where to cut, see :func:`.segment.segment`;
    ``"time"`` and ``"memory"`` measure each layer on rank 0 with ``sample_input``, which is what the first layer gets
    for one micro-batch.  ``recompute_interval`` is the number of layers whose activations are computed again in
    backward, together; 0 keeps all.  ``num_virtual_pipeline_stages`` is the number of chunks per rank.

    Weights depend on ``seed`` (by default the next number of Paddle's generator on rank 0) and on the number of the
    layer in the list, never on the number of stages.  So do automatic names of parameters, which are those of one
    process that builds the same list.

    Without launch and with one stage it is an ordinary layer.  Collective over all ranks of the launch.

    Raises :class:`UsageError`, on every rank alike and before anything is built, for a grid that the ranks of the
    launch do not fill, for bounds or patterns that do not cut the list, for what cannot stand in it
    (:class:`DescTypeError`), and where ranks describe different models.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: Optional[int] = None,
        topology: Optional[Any] = None,
        loss_fn: Optional[Any] = None,
        seg_method: SegMethod = "uniform",
        recompute_interval: int = 0,
        recompute_ctx: Optional[Mapping[str, Any]] = None,
        num_virtual_pipeline_stages: Optional[int] = None,
        *,
        sample_input: Optional[Any] = None,
        seed: Optional[int] = None,
    ) -> None:
        super().__init__()
        self.grid = Grid.of(topology, num_stages)
        self.descs: list[Any] = list(layers)
        self.loss_fns = _check_losses(loss_fn)
        self.recompute_interval = _check_recompute(recompute_interval, recompute_ctx)
        self.recompute_ctx = recompute_ctx
        self.topology = topology
        self.shared_layers = nn.LayerDict()
        num_chunks = 1 if num_virtual_pipeline_stages is None else num_virtual_pipeline_stages

        self._plan: LayerPlan = plan_layers(self.descs, self.grid, seg_method, num_chunks, sample_input, seed)
        self.segmentation = self._plan.segmentation
        self.base_seed = self._plan.base_seed  # equal on every rank
        self.random_step = 0  # training steps so far, which random numbers depend on too
        self.comm = self._plan.comm  # over all ranks of the launch
        self._finalizer = weakref.finalize(self, self.comm.close)
        self._print()

        self._own = self._build()
        self.shared = SharedWeights(self.descs, self.segmentation, self.grid, self._own, self.comm)
        self._register()
        self.chunks = [self._chunk(virtual) for virtual in self.segmentation.virtual_stages_of(self.grid.stage)]
        for index, entry in enumerate(self.descs):
            if isinstance(entry, nn.Layer) and index not in self._own:
                self.descs[index] = Elsewhere(class_name(entry), str(entry))

    # ------------------------------------------------------------------------------------------------------- running

    def forward(self, input: Any, chunk_id: Optional[int] = None) -> Any:  # noqa: A002  (Paddle's name)
        """Run this rank's chunk ``chunk_id``; without it its only one, or with one stage all of them in order."""
        if chunk_id is not None:
            if not 0 <= chunk_id < len(self.chunks):
                raise UsageError(f"chunk_id goes from 0 to {len(self.chunks) - 1}, got {chunk_id!r}")
            return self.chunks[chunk_id](input)
        if self.grid.num_stages > 1 and len(self.chunks) > 1:
            raise UsageError(
                f"this rank holds {len(self.chunks)} chunks that do not follow each other; pass chunk_id, or train "
                f"with PipelineParallel"
            )
        for chunk in self.chunks:
            input = chunk(input)  # noqa: A001
        return input

    def compute_loss(self, output: Any, label: Any, index: int = 0) -> Tensor:
        """What loss function number ``index`` says of the model's ``output`` and the ``label``."""
        if not 0 <= index < len(self.loss_fns):
            raise UsageError(
                f"there are {len(self.loss_fns)} loss functions, got index {index}; they come from loss_fn"
            )
        return self.loss_fns[index](output, label)

    def to_sequential(self) -> SequentialModel:
        """The whole model as an ordinary layer of one process, with sublayers ``"0"``, ``"1"`` ...; not collective.

        It is built anew: with one stage it has the present weights, with several the initial ones of all stages.
        Raises :class:`UsageError` if the list has built layers that another rank keeps.
        """
        elsewhere = [index for index, entry in enumerate(self.descs) if isinstance(entry, Elsewhere)]
        if elsewhere:
            raise UsageError(
                f"layer {elsewhere[0]} of the list stands there as a built layer, which another rank keeps; describe "
                f"it with LayerDesc"
            )
        model = sequential_model(self.descs, self._plan.base_seed, self._plan.names, self.recompute_interval)
        if self.grid.num_stages == 1:
            model.set_state_dict(self.layer_state_dict())
        return model

    # --------------------------------------------------------------------------------------------------------- state

    def named_layers(self) -> Iterator[tuple[int, nn.Layer]]:
        """This rank's layers with their numbers in the list; functions are left out."""
        yield from sorted(self._own.items())

    def layer_state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters and buffers under the names of the one-process model, as ``"3.weight"``.

        They are the live tensors.  A shared weight stands under the name of every layer of this rank that has it.
        """
        return state_of_layers(self._own)

    def set_layer_state_dict(self, state_dict: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Load this rank's part of a one-process state; returns names that were missing and names nobody knows.

        A shared weight may be given under the name of any of its owners.  Values of a wrong shape raise
        :class:`UsageError`, and nothing has been changed.  Not collective: copies of shared weights are equal again if
        all ranks are given the same, and else after ``shared.synchronize()``.
        """
        return load_layers(self._own, self.shared, len(self.descs), state_dict)

    def set_state_dict(self, state_dict: Mapping[str, Any], use_structured_name: bool = True) -> Any:
        """Paddle's method, which also takes names of the one-process model and any name of a shared weight.

        Like :meth:`set_layer_state_dict`, it is not collective.
        """
        if use_structured_name:
            state_dict = own_names(super().state_dict(), self._own, self.shared, state_dict)
        return super().set_state_dict(state_dict, use_structured_name)

    set_dict = load_dict = set_state_dict

    def table(self) -> str:
        """Layers, parameters, bytes, balance and better bounds per stage, for people."""
        return table(self.segmentation, self._plan.facts)

    # ------------------------------------------------------------------------------------------------------ building

    def _print(self) -> None:
        losses = [getattr(loss, "__name__", type(loss).__name__) for loss in self.loss_fns]
        announce(classic(self.segmentation, self.descs, global_rank=self.grid.global_rank, losses=losses))

    def _build(self) -> dict[int, nn.Layer]:
        problem: Optional[GroupShardedError] = None
        own: dict[int, nn.Layer] = {}
        try:
            check_built_layers(self.descs, self.segmentation)
            indices = [index for part in self.segmentation.layers_of(self.grid.stage) for index in part]
            own = build_layers(self.descs, indices, self._plan.base_seed, self._plan.names)
        except GroupShardedError as error:
            problem = error
        agree((self.comm,), "build layers", problem)
        equalize_built_layers(self.descs, own, self.grid.replica_ranks)
        return own

    def _register(self) -> None:
        """Sublayers under Paddle's names: layer number, or start of the chunk and place in it; shared ones by key."""
        for virtual in self.segmentation.virtual_stages_of(self.grid.stage):
            part = self.segmentation.parts[virtual]
            home = self if self.segmentation.num_chunks == 1 else _container()
            for place, index in enumerate(part):
                entry = self.descs[index]
                if index not in self._own:
                    continue
                if is_shared_desc(entry) and entry.layer_name not in self.shared_layers:
                    self.shared_layers[entry.layer_name] = self._own[index]
                else:
                    home.add_sublayer(str(index if home is self else place), self._own[index])
            if home is not self:
                self.add_sublayer(str(part.start), home)

    def _chunk(self, virtual_stage: int) -> Chunk:
        part = self.segmentation.parts[virtual_stage]
        functions = [function_of(self.descs[index], self._own.get(index)) for index in part]
        return Chunk(virtual_stage, part.start, functions, self.recompute_interval)


class Elsewhere:
    """Stands in the list for a built layer that another rank keeps."""

    def __init__(self, name: str, text: str) -> None:
        self.__name__ = name  # what class_name() reads
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __call__(self, *_: Any) -> None:
        raise UsageError(f"layer {self._text} stands on another rank")


def _container() -> nn.Layer:
    with own_namespace():  # whose name must not depend on the number of chunks
        return nn.Layer()


def _check_losses(loss_fn: Any) -> list[Callable[..., Tensor]]:
    losses = [] if loss_fn is None else list(loss_fn) if isinstance(loss_fn, (list, tuple)) else [loss_fn]
    for loss in losses:
        if not callable(loss):
            raise UsageError(f"loss_fn is a function of (output, label) or a list of them; got {loss!r}")
        trained = [name for name, param in _params_of(loss) if not param.stop_gradient]
        if trained:
            raise UsageError(
                f"loss function {type(loss).__name__} has the parameter {trained[0]!r}, which nobody would train; put "
                f"it into the list of layers"
            )
    return losses


def _params_of(loss: Any) -> Sequence[tuple[str, Tensor]]:
    return list(loss.named_parameters()) if isinstance(loss, nn.Layer) else []


def _check_recompute(interval: int, ctx: Optional[Mapping[str, Any]]) -> int:
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 0:
        raise UsageError(f"recompute_interval is a number of layers, 0 for none; got {interval!r}")
    asked = [name for name in ("offload", "partition") if ctx and ctx.get(name)]
    if interval and asked:
        raise UsageError(f"recompute_ctx asks for {asked[0]!r}, which is not supported; set it to False")
    return interval

"""The facts of a model and its optimizer that :func:`.plan.plan` reckons with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Optional

import paddle
from paddle import nn

from .clipping import needs_norms
from .errors import UsageError
from .paddle_compat import element_size, has_memory, keeps_masters, param_groups, unwrapped_layer
from .sharding.buffers import MAX_IDLE
from .sharding.engine import EngineConfig, is_sharded, named_params, plan_groups
from .sharding.facts import GroupFacts, ParamFacts, StepFacts
from .sharding.layout import GroupLayout
from .sharding.model import ShardedModel
from .sharding.ops import LOW_PRECISION
from .sharding.optimizer import ShardedOptimizer
from .sharding.reduction import MAX_IN_FLIGHT
from .sharding.rehearsal import rehearse
from .sharding.replay import Kind, Limits, Moment, assumed_moments
from .sharding.rules import rounds_alike_everywhere, steps_pieces, unwrap_optimizer
from .sharding.state import StateSpec, probe_states, whole_shape

__all__ = ["ModelFacts"]

Tensor = Any


class ModelFacts:
    """Sizes of parameters, their states and their groups; nothing is allocated or changed to find them."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        """Raises :class:`UsageError` for a model or an optimizer that cannot be planned."""
        if not isinstance(model, nn.Layer):
            raise UsageError(f"model must be a paddle.nn.Layer, got {type(model).__name__}")
        if isinstance(model, ShardedModel) or isinstance(optimizer, ShardedOptimizer):
            raise UsageError("expected the plain model and optimizer, got wrapped ones; call plan() before wrapping")
        self._root = unwrapped_layer(model)
        self._entries = named_params(self._root)
        for names, _, param in self._entries:
            if is_sharded(param):
                raise UsageError(f"parameter {names[0]!r} belongs to a wrapped model; call plan() before wrapping")
        self._optimizer = None if optimizer is None else unwrap_optimizer(optimizer)
        groups = [] if self._optimizer is None else param_groups(self._optimizer)
        self._clips = [(clip, len(params)) for _, params, clip in groups]
        self._optimized = {id(param) for _, params, _ in groups for param in params}
        if self._optimizer is None:
            self._optimized = {id(param) for _, _, param in self._entries}
        self._whole = self._optimizer is not None and not steps_pieces(self._optimizer)
        self._on_host = paddle.get_device().startswith("cpu")
        self._moments: tuple[Moment, ...] = ()
        self._workspace = 0
        self._specs: dict[Any, dict[str, StateSpec]] = {}
        self._params = {kind: self._params_of(kind) for kind in (False, True)}

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(int(param.size) for _, _, param in self._entries)

    @property
    def optimizer_name(self) -> str:
        """Its class."""
        return "no optimizer" if self._optimizer is None else type(self._optimizer).__name__

    @property
    def limits(self) -> Limits:
        """What the engine allows itself here; accelerators keep idle memory by themselves."""
        return Limits(MAX_IN_FLIGHT, MAX_IDLE if self._on_host else 0)

    def params(self, wrapped: bool) -> list[ParamFacts]:
        """Each parameter, in the order of registration: as this package steps it if ``wrapped``, else as Paddle."""
        return self._params[wrapped]

    def groups(self, config: EngineConfig, world_size: int) -> list[GroupFacts]:
        """The groups that the engine would make."""
        found = []
        for group in plan_groups(self._root, self._optimized, config, world_size):
            shapes = [(self._entries[index][0][0], tuple(self._entries[index][2].shape)) for index in group.members]
            found.append(GroupFacts(group.members, GroupLayout.pack(shapes, world_size), group.sharded))
        return found

    def find_moments(
        self, config: EngineConfig, activations: int, sample: Optional[Callable[[], Tensor]]
    ) -> None:
        """In which order a step goes, measured by ``sample`` or assumed; ``config``: of the level ``p_g_os``."""
        groups = plan_groups(self._root, self._optimized, config, 2)
        gathered = [group.members for group in groups if group.sharded]
        params = self._params[True]
        if sample is None:
            self._moments = assumed_moments([p.numel if p.trainable else 0 for p in params], gathered, activations)
        else:
            self._moments, self._workspace = rehearse(
                self._root, gathered, [param.expects_grad for param in params], sample
            )
            self._drop_unreached({moment.number for moment in self._moments if moment.kind is Kind.GRAD})

    def _drop_unreached(self, reached: set[int]) -> None:
        """A parameter that no backward pass comes to never gets states; a master it has from the beginning."""
        for params in self._params.values():
            for number, param in enumerate(params):
                if number not in reached:
                    kept = 4 * param.numel if param.has_master else 0
                    params[number] = replace(param, reached=False, state_bytes=kept, scalar_bytes=0)

    def step(self, wrapped: bool) -> StepFacts:
        """What a step does besides."""
        no_rows = all(not spec.lead for specs in self._specs.values() for spec in specs.values())
        return StepFacts(
            moments=self._moments,
            workspace=self._workspace,
            other_bytes=sum(
                int(buffer.size) * element_size(buffer.dtype)
                for _, buffer in self._root.named_buffers()
                if has_memory(buffer)
            ),
            num_flags=sum(number for _, number in self._clips),
            num_norms=sum(number for clip, number in self._clips if needs_norms(clip)),
            clips=any(clip is not None for clip, _ in self._clips),
            steps_whole=wrapped and self._whole,
            joins_neighbours=self._optimizer is not None and rounds_alike_everywhere(self._optimizer) and no_rows,
        )

    def _params_of(self, wrapped: bool) -> list[ParamFacts]:
        found = []
        # Paddle has no kernels that step 16-bit parameters on the host: there the package always keeps masters.
        masters = self._optimizer is not None and (keeps_masters(self._optimizer) or (wrapped and self._on_host))
        for _, _, param in self._entries:
            master = masters and param.dtype in LOW_PRECISION
            itemsize = element_size(param.dtype)
            optimized = id(param) in self._optimized
            states, scalars = self._state_bytes(param, master) if optimized else (0, 0)
            found.append(
                ParamFacts(
                    numel=int(param.size),
                    itemsize=itemsize,
                    grad_itemsize=4 if hasattr(param, "main_grad") else itemsize,
                    trainable=not param.stop_gradient,
                    optimized=optimized,
                    state_bytes=states + (4 * int(param.size) if master else 0),
                    scalar_bytes=scalars,
                    has_master=master,
                )
            )
        return found

    def _state_bytes(self, param: Tensor, master: bool) -> tuple[int, int]:
        """Of states that follow the parameter's size, and of those that do not."""
        if self._optimizer is None:
            return 0, 0
        dtype = paddle.float32 if master else param.dtype
        key = (str(dtype), tuple(param.shape) if self._whole else None)
        if key not in self._specs:
            self._specs[key] = probe_states(self._optimizer, param, dtype, self._whole)
        sizes = [
            (spec.scalar, math.prod(whole_shape(spec, param.shape)) * element_size(spec.dtype))
            for spec in self._specs[key].values()
        ]
        return sum(size for scalar, size in sizes if not scalar), sum(size for scalar, size in sizes if scalar)

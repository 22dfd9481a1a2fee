"""The sharded optimizer: steps this rank's units with the user's own optimizer.

Alternatives considered: replacing ``step`` and ``clear_grad`` on the user's object (what Paddle's stage 3 does) cannot
be undone cleanly and hides the wrapper from type checks; an optimizer over flat shards loses the parameters' names, and
with them name-based decay, rates per parameter and the keys of the state.  Here the user's optimizer updates units that
carry the name and options of their parameter, and keeps its own tables of state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Optional, Union

import paddle
from paddle import nn

from ..clipping import check_clip, clip_factors, needs_norms
from ..comm.agreement import agree
from ..errors import GroupShardedError, StateError, UsageError
from ..paddle_compat import (
    copy_options,
    flat_view,
    keeps_masters,
    overflow_flag,
    param_groups,
    set_overflow_flag,
    step_units,
)
from ..wrapped_optimizer import WrappedOptimizer
from .engine import Engine
from .fusion import Batch, Fusion, Step
from .group import ParamGroup
from .matching import fingerprint, values_differ
from .param import ShardedParam
from .rules import steps_pieces
from .states import StateTable
from .unit import PieceUnit, WholeUnit
from .views import Views

__all__ = ["ShardedOptimizer"]

Tensor = Any
Unit = Union[PieceUnit, WholeUnit]

_logger = logging.getLogger(__name__)


@dataclass
class OptimGroup:
    """One parameter group of the user's optimizer."""

    options: dict[str, Any]  # rates, decays, betas; empty where the optimizer has no groups of its own
    params: list[ShardedParam]
    clip: Any


class ShardedOptimizer(WrappedOptimizer):
    """A ``paddle.optimizer.Optimizer`` whose states, and fp32 master weights, are sharded.

    ``step()``, ``clear_grad()``, ``state_dict()``, ``set_state_dict()`` and ``clip_grad_norm_()`` are collective over
    the sharding group.  Rates, schedulers and parameter groups are those of the wrapped optimizer.
    """

    _own = frozenset(
        (
            "_optim",
            "_engine",
            "_groups",
            "_units",
            "_owners",
            "_whole",
            "_master",
            "_unscaled",
            "offload",
            "skipped_steps",
            "_states",
            "_fusion",
            "views",
        )
    )
    _engine: Engine
    _groups: list[OptimGroup]
    _units: dict[ShardedParam, Unit]
    _owners: dict[ShardedParam, int]  # group rank of each parameter that is stepped whole
    _whole: bool  # units are whole parameters
    _master: bool  # 16-bit parameters are stepped as float32 copies
    _unscaled: bool  # the gradients have been through unscale() since the last step
    _states: StateTable
    views: Views
    offload: bool
    skipped_steps: int  # steps that an overflow of scaled gradients has skipped

    def __init__(self, inner: Any, engine: Engine, offload: bool = False) -> None:
        """Take over ``inner`` with the states that it has.  Collective."""
        super().__init__(inner)
        own = self.__dict__
        own["_engine"] = engine
        own["offload"] = offload
        own["skipped_steps"] = 0
        own["_unscaled"] = False
        own["_whole"] = not steps_pieces(inner)
        # Paddle has no CPU kernels that step 16-bit parameters: there a float32 master is the only way.
        own["_master"] = keeps_masters(inner) or not any(group.shard.place.is_gpu_place() for group in engine.groups)
        by_id = engine.by_id
        own["_groups"] = [
            OptimGroup(options, [by_id[id(tensor)] for tensor in tensors], clip)
            for options, tensors, clip in param_groups(inner)
        ]
        own["_owners"] = self._choose_owners()
        own["_units"] = self._build_units()
        self._read_options()
        own["_states"] = StateTable(inner, engine, self._units, self._owners, self._whole, self._master)
        own["_fusion"] = Fusion(inner, self._states.specs)
        self._states.before_change = self._fusion.dissolve
        self._states.adopt()
        own["views"] = Views(engine, self._states)  # whole gradients and states by name

    # ------------------------------------------------------------------------------------------------ construction

    def _read_options(self) -> None:
        """Options and clip objects of groups, which the user may change between steps."""
        now = param_groups(self._optim)
        expected = [len(group.params) for group in self._groups]
        if expected != [len(tensors) for _, tensors, _ in now]:
            raise StateError(
                f"expected parameter groups of {expected} parameters, got {[len(tensors) for _, tensors, _ in now]}; "
                "unwrap() the model and the optimizer, add or remove parameters, then wrap them again"
            )
        for group, (options, _, clip) in zip(self._groups, now):
            check_clip(clip)
            group.options, group.clip = options, clip

    @property
    def _params(self) -> list[ShardedParam]:
        return [param for group in self._groups for param in group.params]

    def _choose_owners(self) -> dict[ShardedParam, int]:
        """For whole tensors: the rank of each parameter, the next largest always to the one that has least."""
        if not self._whole:
            return {}
        load = [0] * self._engine.comm.world_size
        owners = {}
        for param in sorted(self._params, key=lambda param: -param.numel):
            owners[param] = load.index(min(load))
            load[owners[param]] += param.numel
        return owners

    def _build_units(self) -> dict[ShardedParam, Unit]:
        rank = self._engine.comm.rank
        if self._whole:
            own = (param for param in self._params if self._owners[param] == rank)
            return {param: WholeUnit(param, self._master, self.offload) for param in own}
        # A parameter of no elements has no piece, but states as unsharded: they are rank 0's.
        owned = (
            param
            for param in self._params
            if param.group.pieces[param.index] is not None or (param.numel == 0 and rank == 0)
        )
        return {param: PieceUnit(param, self._master, self.offload) for param in owned}

    # --------------------------------------------------------------------------------------------------------- step

    @paddle.no_grad()
    def step(self) -> None:
        """Update the parameters of this rank's pieces and let every rank see them.  Collective."""
        engine = self._engine
        engine.backward_error.check()
        engine.reducer.finish()  # _agree() asks for what is left
        if self._overflowed():
            self.__dict__["skipped_steps"] += 1
            _logger.warning(
                "step skipped: the scaled gradients overflowed (%d skipped so far)", self.__dict__["skipped_steps"]
            )
            engine.end_step()
            return
        self._states.refresh_rewritten()
        self._read_options()
        used, factors = self._agree()
        if self._whole:
            self._step_whole(used, factors)
            self._states.learn(used)
        else:
            self._step_pieces(used, factors)
        for param in used:
            self._states.stepped[param] = None
        engine.publish()

    def _overflowed(self) -> bool:
        found = overflow_flag(self._optim)
        if found is None or not self._unscaled:
            return False
        self.__dict__["_unscaled"] = False
        overflowed = bool(found)
        set_overflow_flag(self._optim, overflowed)
        return overflowed

    def _set_auxiliary_var(self, key: str, value: Any) -> None:
        """Called by ``GradScaler.step``; one that has not unscaled the sharded gradients would be silently wrong."""
        if key == "found_inf" and not self._unscaled:
            raise StateError(
                "this GradScaler does not know of the sharded gradients; pass it to group_sharded_parallel(scaler=...) "
                "and use the one that is returned"
            )
        self._optim._set_auxiliary_var(key, value)

    def _agree(self) -> tuple[list[ShardedParam], dict[ShardedParam, float]]:
        """Which parameters have a gradient on any rank, and what clipping multiplies it by: one small all-reduce.

        It also tells whether gradients are left on any rank; they are rare, and make it necessary to begin again.
        """
        params = self._params
        comm, dp_comm = self._engine.comm, self._engine.dp_comm
        reached = [float(param.reached and param.expects_grad) for param in params]
        clipped = [param for group in self._groups if needs_norms(group.clip) for param in group.params]
        sums = self._square_sums(clipped)
        written = self._engine.residency.take_written()
        flags = [float(written is not None), float(bool(self._engine.reducer.left))]
        vector = paddle.to_tensor([*flags, *reached, *sums], dtype="float64")
        comm.all_reduce(vector, "gradients used and their norms").wait()
        some_written, left, *values = vector.tolist()
        flags = [some_written, left, *values[: len(params)]]
        if dp_comm.world_size > 1:
            over_replicas = paddle.to_tensor(flags, dtype="float64")
            dp_comm.all_reduce(over_replicas, "gradients used", op="max").wait()
            flags = over_replicas.tolist()
        if flags[0] > 0:
            label = "parameters changed in a forward"
            written = next(filter(None, comm.exchange(written, label)), None)
            error = next(filter(None, dp_comm.exchange(written, label)))  # replicas may not have seen it themselves
            raise error
        if flags[1] > 0:
            self._engine.reducer.reduce_left()
            return self._agree()
        used = []
        for param, flag in zip(params, flags[2:]):
            param.reached = flag > 0
            if param.reached and param.expects_grad:
                used.append(param)
        return used, self._clip_factors(used, dict(zip(clipped, values[len(params) :])))

    def _square_sums(self, params: Iterable[ShardedParam]) -> list[float]:
        """Of this rank's part of each gradient; 0 where there is none."""
        params = list(params)
        by_group = {group: group.gradients.square_sums() for group in {param.group for param in params}}
        return [by_group[param.group].get(param.index, 0.0) if param.expects_grad else 0.0 for param in params]

    def _clip_factors(self, used: list[ShardedParam], sums: dict[ShardedParam, float]) -> dict[ShardedParam, float]:
        factors: dict[ShardedParam, float] = {}
        taking_part = set(used)
        for group in self._groups:
            if not needs_norms(group.clip):
                continue
            members = [p for p in group.params if p in taking_part and getattr(p.tensor, "need_clip", True)]
            factors.update(zip(members, clip_factors(group.clip, [sums[param] for param in members])))
        return factors

    def _clipped(self, tensor: Tensor, grad: Tensor, clip: Any, factor: float) -> Tensor:
        if isinstance(clip, nn.ClipGradByValue):
            return clip([(tensor, grad)])[0][1]
        return grad if factor == 1.0 else grad * factor

    def _step_pieces(self, used: list[ShardedParam], factors: dict[ShardedParam, float]) -> None:
        taking_part = set(used)
        plan = []
        originals: dict[str, Tensor] = {}
        stepped: list[PieceUnit] = []
        batched: list[Batch] = []
        for number, group in enumerate(self._groups):
            units = (self._units.get(param) for param in group.params if param in taking_part)
            steps = [Step(unit, factors.get(unit.param, 1.0)) for unit in units if isinstance(unit, PieceUnit)]
            batches, alone = self._fusion.batched(number, steps, group.options)
            pairs = []
            for unit, factor in alone:
                copy_options(unit.param.tensor, unit.tensor)
                originals[unit.tensor.name] = unit.param.tensor
                pairs.append((unit.tensor, self._clipped(unit.tensor, unit.grad(), group.clip, factor)))
                stepped.append(unit)
            for batch in batches:
                first = batch.units[0].param
                copy_options(first.tensor, batch.tensor)
                originals[batch.tensor.name] = first.tensor
                factor = factors.get(first, 1.0)
                pairs.append((batch.tensor, self._clipped(batch.tensor, batch.grad(), group.clip, factor)))
            batched += batches
            plan.append({**group.options, "params": pairs})
        step_units(self._optim, plan, originals)
        self._fusion.finish(batched)
        for unit in stepped:
            unit.store()

    def _step_whole(self, used: list[ShardedParam], factors: dict[ShardedParam, float]) -> None:
        """Owners get whole gradients, step whole parameters, and send them to the others: twice the volume."""
        by_group: dict[ParamGroup, list[ShardedParam]] = {}
        for param in used:
            by_group.setdefault(param.group, []).append(param)
        grads: dict[ShardedParam, Tensor] = {}
        for group, params in by_group.items():
            full_grad = self._engine.full_group(group, group.gradients.shard(), f"gradients {group.name}")
            group.gather()
            for param in params:
                unit = self._units.get(param)
                if isinstance(unit, WholeUnit):
                    slot = group.layout.slots[param.index]
                    grad = flat_view(full_grad, slot.start, slot.stop).reshape(unit.tensor.shape)
                    grad = grad.cpu() if unit.on_host else grad
                    grads[param] = grad if grad.dtype == unit.tensor.dtype else grad.astype(unit.tensor.dtype)
                    unit.load(group.full)
            group.release()
        plan = []
        for optim_group in self._groups:
            pairs = []
            for param in optim_group.params:
                unit = self._units.get(param)
                if param in grads and unit is not None:
                    copy_options(param.tensor, unit.tensor)
                    grad = self._clipped(unit.tensor, grads[param], optim_group.clip, factors.get(param, 1.0))
                    pairs.append((unit.tensor, grad))
            plan.append({**optim_group.options, "params": pairs})
        step_units(self._optim, plan, {param.tensor.name: param.tensor for param in grads})
        for group, params in by_group.items():
            self._send_whole(group, params)

    def _send_whole(self, group: ParamGroup, params: list[ShardedParam]) -> None:
        group.gather()
        for param in params:
            unit = self._units.get(param)
            if isinstance(unit, WholeUnit):
                unit.store(group.full)
            slot = group.layout.slots[param.index]
            view = flat_view(group.full, slot.start, slot.stop)
            self._engine.comm.broadcast(view, self._owners[param], f"stepped {param.name}").wait()
        group.store_full()
        group.rewritten = False
        group.release()  # else the whole model would be gathered at the end

    def unscale(self, scale: float) -> bool:
        """Divide the gradients by ``scale``; returns whether any rank found one that is not finite.  Collective."""
        self._engine.finish_grads()
        finite = True
        for group in self._engine.groups:
            for grad in group.gradients.storage:
                grad.scale_(1.0 / scale)
            finite = finite and group.gradients.finite()
        overflow = paddle.to_tensor([0.0 if finite else 1.0], dtype="float32")
        self._engine.comm.all_reduce(overflow, "overflow of the scaled gradients", op="max").wait()
        self.__dict__["_unscaled"] = True
        return bool(overflow.item() > 0)

    # ------------------------------------------------------------------------------------------- the rest of the API

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Forget the gradients.

        With ``set_to_zero`` a parameter that had a gradient counts as having a zero one at the next step (its moments
        decay), otherwise as having none (it is left alone), as with Paddle's own optimizers.
        """
        self._engine.drop_grads(keep_reached=set_to_zero)

    clear_gradients = clear_grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        """:meth:`clear_grad` by the name that newer Paddle releases offer too."""
        self.clear_grad(set_to_zero=not set_to_none)

    def apply_gradients(self, params_grads: Any) -> None:
        """Refused: gradients are sharded, and Paddle's own method would step nothing of them."""
        raise UsageError("apply_gradients() cannot see the sharded gradients; call step()")

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most ``max_norm``; returns the norm before.  Collective.

        ``paddle.nn.utils.clip_grad_norm_`` cannot see sharded gradients; this is the call for that purpose, and it
        computes the same.
        """
        self._engine.finish_grads()
        total = sum(self._square_sums(dict.fromkeys(self._params)))
        vector = paddle.to_tensor([total], dtype="float64")
        self._engine.comm.all_reduce(vector, "norm of the gradients").wait()
        norm = math.sqrt(float(vector.item()))
        factor = max_norm / (norm + 1e-6)  # Paddle's formula
        if not factor >= 1.0:  # nan spreads
            for group in self._engine.groups:
                for grad in group.gradients.storage:
                    grad.scale_(factor)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """The whole state on every rank, with the keys of an unsharded run.  Collective."""
        return self._states.whole(keep=True)

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a whole state, given alike on every rank, whose keys use this process's parameter names.  Collective.

        :class:`CheckpointError`, on every rank, names what does not fit; nothing is changed then.
        """
        problem: Optional[GroupShardedError] = None
        try:
            commit = self._states.prepare(state_dict)
        except GroupShardedError as error:
            problem = error
        comms = (self._engine.comm, self._engine.dp_comm)
        agree(comms, "optimizer.set_state_dict", problem, 0 if problem else fingerprint(state_dict), values_differ)
        commit()

    load_state_dict = set_state_dict

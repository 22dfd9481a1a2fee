"""The engine: the groups of one wrapped model, its reductions, and who may look at whole parameters when."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import nn

from ..comm.base import Comm
from ..errors import UsageError
from ..paddle_compat import element_size, has_memory, layer_params, share_memory
from .blocks import block_of_layers
from .buffers import BufferPool
from .group import ParamGroup
from .grouping import Group, ParamInfo, group_params
from .hooks import Handles, install
from .lazy import LazyValues
from .level import Level
from .param import ShardedParam
from .reduction import GradReducer
from .residency import Residency

__all__ = ["STATISTICS", "Engine", "EngineConfig", "is_sharded", "named_params", "plan_groups"]

Layer = Any
Tensor = Any


# Frozen parameters of BatchNorm and SpectralNorm which every forward writes, on each rank from its own data.
STATISTICS = ("_mean", "_variance", "weight_u", "weight_v")


@dataclass(frozen=True)
class EngineConfig:
    """How a model is sharded."""

    level: Level
    bucket_numel: int = 2**23  # elements of a bucket of whole parameters
    whole_numel: int = 0  # parameters of at most so many elements stay whole
    whole_layers: tuple[Any, ...] = ()  # class names and ids of layers whose parameters stay whole
    sync_buffers: bool = False  # broadcast rank 0's buffers before each forward


def named_params(layer: Layer) -> list[tuple[list[str], Layer, Tensor]]:
    """Every parameter once, in registration order: all its structured names, the first layer that owns it, itself."""
    found: dict[int, tuple[list[str], Layer, Tensor]] = {}
    for prefix, owner in layer.named_sublayers(include_self=True):
        for name, param in layer_params(owner).items():
            if param is None:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            found.setdefault(id(param), ([], owner, param))[0].append(full_name)
    return list(found.values())


def plan_groups(root: Layer, optimized: set[int], config: EngineConfig, world_size: int) -> list[Group]:
    """Which of :func:`named_params` of ``root`` share a group, by number; ``optimized``: see :class:`Engine`."""
    blocks = block_of_layers(root)
    whole = _whole_param_ids(root, config.whole_layers)
    shard_params = config.level.placements.param and world_size > 1
    infos = []
    for _, owner, tensor in named_params(root):
        sharded = shard_params and tensor.size > config.whole_numel and id(tensor) not in whole
        kind = (str(tensor.dtype), str(tensor.place), tensor.stop_gradient, id(tensor) in optimized)
        infos.append(ParamInfo(int(tensor.size), kind, blocks[id(owner)], sharded))
    return group_params(infos, config.bucket_numel)


def _whole_param_ids(root: Layer, chosen: tuple[Any, ...]) -> set[int]:
    ids: set[int] = set()
    for layer in root.sublayers(include_self=True):
        if type(layer).__name__ in chosen or id(layer) in chosen:
            ids.update(id(param) for param in layer.parameters())
        ids.update(
            id(param)
            for name, param in layer_params(layer).items()
            if param is not None and param.stop_gradient and name in STATISTICS
        )
    return ids


def is_sharded(param: Tensor) -> bool:
    """Whether ``param`` belongs to an engine; a deep copy of such a parameter does not."""
    return getattr(param, "group_sharded_id", None) == id(param)


class Engine:
    """Shards one model over ``comm`` and keeps replicas of it over ``dp_comm``."""

    def __init__(
        self, layer: Layer, names_root: Layer, optimized: set[int], config: EngineConfig, comm: Comm, dp_comm: Comm
    ) -> None:
        """Move the parameters into groups and install the hooks.  Collective over both groups.

        ``names_root`` is the layer inside ``layer`` whose structured names the user knows; ``optimized`` holds the
        ``id`` of each parameter that the optimizer was given.
        """
        self.layer = layer
        self.config = config
        self.comm = comm
        self.dp_comm = dp_comm
        self.names_root = names_root
        self._pool = BufferPool()
        self.groups = self._build_groups(names_root, optimized)
        self.params = [param for group in self.groups for param in group.params]
        self.by_id = {id(param.tensor): param for param in self.params}
        self.residency = Residency([g for g in self.groups if g.placements.param], self._pool)
        self.backward_error = self.residency.backward_error
        self.reducer = GradReducer(self.groups, comm, dp_comm, self.residency.on_round_end)
        self._broadcast_buffers()
        self._finalizer = weakref.finalize(self, _close_all, (comm, dp_comm))
        self.handles: Handles = install(self, layer)
        self._watch_gradients()  # now: layers may be called without the model's own forward
        for param in self.params:
            param.tensor.group_sharded_id = id(param.tensor)

    # ------------------------------------------------------------------------------------------------ construction

    def _build_groups(self, names_root: Layer, optimized: set[int]) -> list[ParamGroup]:
        entries = named_params(names_root)
        placements = self.config.level.placements
        groups = []
        lazy = LazyValues(tensor for _, _, tensor in entries)
        for plan in plan_groups(names_root, optimized, self.config, self.comm.world_size):
            members = [(entries[index][0][0], entries[index][2]) for index in plan.members]
            for _, tensor in members:
                lazy.fill(tensor)
            group = ParamGroup(
                name=f"{members[0][0]}.." if len(members) > 1 else members[0][0],
                tensors=members,
                placements=placements._replace(param=plan.sharded),
                comms=(self.dp_comm, self.comm),
                pool=self._pool,
            )
            for param in group.params:
                param.optimized = id(param.tensor) in optimized
            groups.append(group)
            self._pool.trim()  # never more than the model and one group
        return groups

    def _broadcast_buffers(self) -> None:
        for name, buffer in self.layer.named_buffers():
            if not has_memory(buffer):
                continue  # a cache that its layer fills later, such as an LSTM's dropout state
            for comm in (self.dp_comm, self.comm):
                comm.broadcast(buffer, 0, f"buffer {name}").wait()

    # ------------------------------------------------------------------------------------------------ training steps

    def before_forward(self) -> None:
        """A forward of the whole model begins."""
        self.backward_error.check()
        written, self.residency.written = self.residency.written, None
        if written is not None:  # there was no step, which raises it on every rank
            raise written
        self.residency.begin_forward()
        self.reducer.settle()
        self._watch_gradients()
        if self.config.sync_buffers:
            self._broadcast_buffers()

    def _watch_gradients(self) -> None:
        """Hook what is trainable by now."""
        if self.config.level.placements.grad:
            self.handles.watch_gradients(self, self.params)

    def finish_grads(self) -> None:
        """Make the gradients of this rank's pieces final.  Collective."""
        self.backward_error.check()
        self.reducer.finish()
        self.reducer.reduce_left()

    def publish(self) -> None:
        """The shards have new values: let every rank see them.  Collective."""
        works = [group.publish() for group in self.groups if group.expects_grad]
        for work in works:
            if work is not None:
                work.wait()
        self.end_step()

    def end_step(self) -> None:
        """The step is over, or has been skipped: nothing of it stays but the shards."""
        self.residency.release_all()
        self.residency.next_step()
        self.reducer.next_step()

    def drop_grads(self, keep_reached: bool) -> None:
        """Forget all gradients; with ``keep_reached`` parameters that had one count as having a zero one."""
        self.reducer.abandon()
        for group in self.groups:
            group.gradients.drop()
        if not keep_reached:
            for param in self.params:
                param.reached = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local inside the context."""
        self.reducer.settle()
        before, self.reducer.enabled = self.reducer.enabled, False
        try:
            yield
        finally:
            self.reducer.enabled = before

    # ------------------------------------------------------------------------------------------------- whole values

    def param_of(self, key: Any) -> ShardedParam:
        """The parameter that ``key`` (a structured name or the Parameter itself) means."""
        if isinstance(key, str):
            for names, _, tensor in named_params(self.names_root):
                if key in names:
                    return self.by_id[id(tensor)]
            raise UsageError(f"no parameter is called {key!r}; the model's state_dict() lists the names")
        if id(key) in self.by_id:
            return self.by_id[id(key)]
        raise UsageError(f"expected a structured name or a parameter of the wrapped model, got {type(key).__name__}")

    def groups_of(self, what: Any) -> list[ParamGroup]:
        """The groups of ``what``: None for the whole model, a layer, a parameter, a name, or a list of those."""
        if what is None:
            return list(self.groups)
        items = what if isinstance(what, (list, tuple)) else [what]
        groups: dict[ParamGroup, None] = {}
        for item in items:
            if isinstance(item, nn.Layer):
                tensors: Iterable[Tensor] = [tensor for _, _, tensor in named_params(item)]
            else:
                tensors = [self.param_of(item).tensor]
            for tensor in tensors:
                groups[self.param_of(tensor).group] = None
        return sorted(groups, key=self.groups.index)

    @contextmanager
    def gathered(self, what: Any, write_back: bool) -> Iterator[None]:
        """Show the whole parameters of ``what``; see :meth:`.model.ShardedModel.gathered`."""
        groups = self.groups_of(what)
        sharded = [group for group in groups if group.placements.param]
        self.residency.pin(sharded)
        written = False
        try:
            yield
            if write_back:
                for group in groups:
                    for comm in (self.dp_comm, self.comm):
                        comm.broadcast(group.full, 0, f"write back {group.name}").wait()
                    group.store_full()
                written = True
        finally:
            self.residency.unpin(sharded, written)
            if not self.residency.in_call:
                self._pool.trim()

    def write_param(self, param: ShardedParam, value: Tensor) -> None:
        """Set ``param`` from a whole tensor of its shape, given alike on every rank.  No communication."""
        if tuple(value.shape) != tuple(param.tensor.shape):
            raise UsageError(f"parameter {param}: expected shape {list(param.tensor.shape)}, got {list(value.shape)}")
        param.group.write(param.index, value)

    def full_group(self, group: ParamGroup, shard: Tensor, label: str) -> Tensor:
        """Every rank's ``shard`` of a group, one after the other.  Collective."""
        full = paddle.empty([group.layout.numel], dtype=shard.dtype)
        self.comm.all_gather(full, shard, label).wait()
        return full

    def memory_report(self) -> dict[str, int]:
        """Bytes of parameters that this rank keeps between steps, and of the whole parameters."""
        kept = whole = 0
        for group in self.groups:
            size = element_size(group.dtype)
            kept += size * (group.layout.shard_numel if group.placements.param else group.layout.numel)
            whole += size * group.layout.param_numel
        return {"kept": kept, "whole": whole}

    def close(self) -> None:
        """Give every parameter memory of its own again and remove the hooks.  Collective."""
        self.reducer.abandon()
        self.residency.release_all()
        self.handles.remove()
        for group in self.groups:
            group.gather()
            self.comm.serve(f"gather {group.name}", None)
            for param in group.params:
                param.tensor.group_sharded_id = None
                if param.numel:
                    own = param.tensor.clone().detach()
                    share_memory(own, param.tensor)
            group.full = None
        self._finalizer()


def _close_all(comms: tuple[Comm, ...]) -> None:
    for comm in comms:
        comm.close()

"""Which sharded groups are gathered, and until when.

A *frame* is one layer call under way.  A group is gathered when a layer that owns parameters of it is entered, or when
one of its parameters is read inside another layer's call, and belongs to the innermost frame at that moment.  When no
frame uses it any more it is idle, and an idle group is released when the next one is gathered, so neighbours that share
a group, and a layer called twice, cost one gather.  The one that will be needed right after the next one is kept, as it
would only be fetched ahead again: so the last two groups of a forward go on to backward without a second gather.

Backward needs the weights again: every frame that used groups registers a hook on its output tensors, and on those
that a user's layer keeps in its attributes (auxiliary losses), which gathers them before the layer's own backward runs.
Such a group stays until its gradients are complete.  Two kinds cannot be told in that way: a frame that leaves no
differentiable tensor behind, and a read outside any frame; their groups stay until the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import paddle

from ..errors import GroupShardedError, UsageError
from ..paddle_compat import on_backward_end, on_gradient
from .backward_error import BackwardError
from .buffers import BufferPool
from .group import GroupState, ParamGroup
from .param import ShardedParam
from .tree import results_of

__all__ = ["Residency"]

Tensor = Any


class Frame:
    """One layer call under way."""

    __slots__ = ("groups", "has_children")

    def __init__(self) -> None:
        self.groups: dict[ParamGroup, None] = {}  # an ordered set
        self.has_children = False


class BackwardHook:
    """Gathers what a frame used, when a gradient reaches its results.

    Paddle holds it as long as the graph lives, where Python's garbage collector cannot see it.
    """

    __slots__ = ("_groups", "_outer", "_residency")

    def __init__(self, residency: Residency, groups: tuple[ParamGroup, ...], outer: bool) -> None:
        self._residency = weakref.ref(residency)
        self._groups = groups
        self._outer = outer

    def __call__(self, grad: Tensor) -> None:
        residency = self._residency()
        if residency is not None:
            for group in self._groups:
                residency.use_in_backward(group, self._outer)


class Residency:
    """Gathers and releases the sharded groups of one model."""

    def __init__(self, groups: Sequence[ParamGroup], pool: BufferPool) -> None:
        """Manage ``groups``; all of them are sharded."""
        self.backward_error = BackwardError()
        self.written: Optional[UsageError] = None  # a layer has changed its parameters; waits for a call that can raise
        self._groups = list(groups)
        self._pool = pool
        self._frames: list[Frame] = []
        self._idle: dict[ParamGroup, None] = {}
        self._kept: Optional[ParamGroup] = None  # idle, but needed again so soon that it was not released
        self._held: dict[ParamGroup, None] = {}
        self._awaited: dict[ParamGroup, set[int]] = {}  # by the backward pass under way: slots without gradient so far
        self._pinned: dict[ParamGroup, int] = {}  # by gathered(); how many contexts show it
        self._trace: list[ParamGroup] = []  # gathers of this step, in order, with those that keeping a group has saved
        self._expected: list[ParamGroup] = []  # those of the step before: what is fetched ahead
        self._hooks: dict[tuple[ParamGroup, ...], BackwardHook] = {}  # of frames without frames inside

    # ------------------------------------------------------------------------------------------------------ forward

    def enter(self, groups: Iterable[ParamGroup]) -> None:
        """A layer that owns parameters of ``groups`` is called."""
        if self._frames:
            self._frames[-1].has_children = True
        elif not self._trace:
            self.adopt_writes()
        self._frames.append(Frame())
        for group in groups:
            self.read(group)

    def begin_forward(self) -> None:
        """A forward of the whole model begins."""
        self.reset_frames()
        if self._trace:  # else the first layer does
            self.adopt_writes()

    def adopt_writes(self) -> None:
        """Keep what the user has written to any parameter: other ranks may gather this rank's shards from now on."""
        for group in self._groups:
            group.adopt_writes()

    def read(self, group: ParamGroup) -> None:
        """A parameter of ``group`` is about to be used."""
        if self._frames:
            used = self._frames[-1].groups
            if group not in used:
                used[group] = None
                group.users += 1
                self._idle.pop(group, None)
                self._gather(group)
        elif group not in self._pinned:  # else gathered() shows it, and says itself whether changes count
            self._gather(group)
            group.touched_outside = True
            self._hold(group)

    def leave(self, layer: Any, outputs: Any) -> None:
        """The innermost call, of ``layer``, has returned ``outputs``."""
        if not self._frames:
            return  # the frames were reset by an error in between
        frame = self._frames.pop()
        if frame.groups:
            if paddle.is_grad_enabled():
                self._prepare_backward(frame, results_of(layer, outputs))
            for group in frame.groups:
                group.users -= 1
                if group.users == 0 and group not in self._held:
                    self._idle[group] = None
        if not self._frames and not paddle.is_grad_enabled():
            self.release_idle()
            self._pool.trim()
            self._trace.clear()  # only steps end a trace otherwise, and there may be none to come

    def _prepare_backward(self, frame: Frame, results: Iterable[Tensor]) -> None:
        hook = self._hook_of(frame)
        hooked = False
        for tensor in results:
            if not tensor.stop_gradient and not tensor.is_leaf:
                on_gradient(tensor, hook)
                hooked = True
        if not hooked:
            for group in frame.groups:
                if group.expects_grad:
                    self._hold(group)

    def _hook_of(self, frame: Frame) -> BackwardHook:
        groups = tuple(frame.groups)
        if frame.has_children:
            return BackwardHook(self, groups, outer=True)
        if groups not in self._hooks:
            self._hooks[groups] = BackwardHook(self, groups, outer=False)
        return self._hooks[groups]

    def use_in_backward(self, group: ParamGroup, outer: bool) -> None:
        """The backward of a call that used ``group`` begins; ``outer``: of one with other layers' calls inside."""
        if group in self._held and group.state is GroupState.FULL:
            return
        self._idle.pop(group, None)
        try:
            self._gather(group)
        except GroupShardedError as error:
            self.backward_error.keep(error)
            group.bind_anything()
        # A frozen group has no gradient that could tell its end: the next gather ends it, unless it was used around
        # other layers.
        if group.expects_grad or outer:
            self._hold(group)
        elif group.users == 0 and group not in self._held:
            self._idle[group] = None

    # ------------------------------------------------------------------------------------------------------- common

    def _gather(self, group: ParamGroup) -> None:
        if group.state is GroupState.FULL and group is not self._kept:
            return
        position = len(self._trace)
        self._trace.append(group)
        foreseen = self._expected[position : position + 2]
        following = foreseen[1:] if foreseen[:1] == [group] else []
        self.release_idle(but=following)
        group.gather()
        for other in following:
            other.start_gather()

    def _hold(self, group: ParamGroup) -> None:
        self._held[group] = None
        self._idle.pop(group, None)

    def release_idle(self, but: Sequence[ParamGroup] = ()) -> None:
        """Release every group that nothing needs, except ``but``."""
        self._kept = None
        for group in list(self._idle):
            if group in but:
                self._kept = group
            elif group not in self._pinned:
                del self._idle[group]
                self._end(group)

    def on_grad(self, param: ShardedParam) -> None:
        """The backward pass under way has finished with ``param``; with the last of its group's, with the group.

        Only gradients of one and the same pass count: a pass may reach a part of a group that another has not.
        """
        if not self._awaited:
            on_backward_end(self._awaited.clear)
        group = param.group
        if group not in self._awaited:
            self._awaited[group] = {member.index for member in group.params if member.expects_grad}
        self._awaited[group].discard(param.index)
        if not self._awaited[group]:
            self._end_use(group)

    def _end_use(self, group: ParamGroup) -> None:
        self._held.pop(group, None)
        if group.users == 0 and group not in self._pinned:
            self._idle.pop(group, None)
            self._end(group)

    def _end(self, group: ParamGroup) -> None:
        error = group.end_use()  # which releases the group, whatever was found before
        self.written = self.written or error

    def take_written(self) -> Optional[UsageError]:
        """What stands in :attr:`written`, which is forgotten, or what uses that have not ended would add to it."""
        error = self.written or next(filter(None, (group.written() for group in self._groups)), None)
        self.written = None
        return error

    def on_round_end(self) -> None:
        """A backward pass has been reduced: what it gathered into is given back."""
        self.release_idle()
        if not self._frames:
            self._pool.trim()

    def pin(self, groups: Sequence[ParamGroup]) -> None:
        """Gather ``groups`` and keep them until :meth:`unpin`."""
        for group in groups:
            group.adopt_writes()
            group.gather()
            self._pinned[group] = self._pinned.get(group, 0) + 1

    def unpin(self, groups: Sequence[ParamGroup], written: bool) -> None:
        """End one :meth:`pin`; groups that nothing else needs are released.

        Others stay whole; unless ``written`` says that what was changed in them counts, they get their values again.
        """
        for group in groups:
            self._pinned[group] -= 1
            if self._pinned[group] == 0:
                del self._pinned[group]
                if group.users == 0 and group not in self._held:
                    self._idle.pop(group, None)
                    group.release()
                elif not written:
                    group.reload()

    def reset_frames(self) -> None:
        """Forget calls that an exception has ended."""
        for frame in self._frames:
            for group in frame.groups:
                group.users = 0
                if group not in self._held:
                    self._idle[group] = None
        self._frames.clear()

    @property
    def in_call(self) -> bool:
        """Whether a layer of the model is being called."""
        return bool(self._frames)

    def release_all(self) -> None:
        """Release everything that is not pinned: between steps only the shards remain."""
        self.reset_frames()
        self._held.clear()
        self._idle.clear()
        self._kept = None
        for group in self._groups:
            if group not in self._pinned:
                group.release()
        self._pool.trim()

    def next_step(self) -> None:
        """The order of this step's gathers is what the next step's will be fetched ahead by."""
        self._expected, self._trace = self._trace, []

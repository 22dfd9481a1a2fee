"""One forward and backward pass of the plain model, watched: in which order a step gathers, and what it keeps.

Which layers are called when, which weights are read outside their own layer, and how much each pass keeps for backward
is known only by running.  The engine's own residency manager runs along, with groups that move nothing, so what it
would gather and release is what this finds.  The model is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Optional

import paddle

from ..errors import UsageError
from ..paddle_compat import drop_grad, element_size, has_grad, has_memory, layer_params, set_layer_params
from .allocator import PeakMeter
from .engine import STATISTICS, named_params
from .group import GroupState, ParamGroup
from .hooks import ReadThrough, frame_calls
from .replay import Kind, Moment
from .residency import Residency

__all__ = ["Rehearsal", "rehearse"]

Layer = Any
Tensor = Any


class Rehearsal(NamedTuple):
    """What one pass of the plain model has shown."""

    moments: tuple[Moment, ...]
    workspace: int  # bytes by which the peak was above every moment


class _Member:
    """A parameter, as the residency manager sees it."""

    def __init__(self, group: _Group, index: int, expects_grad: bool) -> None:
        self.group = group
        self.index = index
        self.expects_grad = expects_grad


class _Group:
    """A sharded group that moves nothing and tells what is asked of it."""

    def __init__(self, number: int, expects: Sequence[bool], note: Callable[[Kind, int], None]) -> None:
        self.state = GroupState.SHARDED
        self.users = 0
        self.touched_outside = False
        self.params = [_Member(self, index, expected) for index, expected in enumerate(expects)]
        self.expects_grad = any(expects)
        self._number = number
        self._note = note

    def start_gather(self) -> None:
        """Nothing is expected in the first step, so nothing is fetched ahead."""

    def gather(self) -> None:
        if self.state is GroupState.SHARDED:
            self.state = GroupState.FULL
            self._note(Kind.GATHER, self._number)

    def release(self) -> None:
        if self.state is GroupState.FULL:
            self.state = GroupState.SHARDED
            self._note(Kind.RELEASE, self._number)

    def end_use(self) -> None:
        self.release()

    def adopt_writes(self) -> None:
        """Nobody writes."""


class _NoPool:
    """In place of the pool of buffers."""

    def trim(self) -> None:
        """There are none."""


def rehearse(
    root: Layer, sharded: Sequence[tuple[int, ...]], expects_grad: Sequence[bool], sample: Callable[[], Tensor]
) -> Rehearsal:
    """Run ``sample()``, which calls ``root`` and returns a loss, and its backward pass.

    ``sharded``: the members of each group that would be sharded, by their number in :func:`.engine.named_params`;
    ``expects_grad``: of each parameter.  Gradients, buffers and Paddle's random numbers are as before afterwards.
    """
    entries = named_params(root)
    for names, _, param in entries:
        if param.size and not has_memory(param):
            raise UsageError(f"sample needs a model with values, but parameter {names[0]!r} is not initialised")
        if has_grad(param):
            raise UsageError(
                f"parameter {names[0]!r} has a gradient, which a sample pass would add to; call optimizer.clear_grad()"
            )
    recorder = _Recorder()
    groups = [
        _Group(number, [expects_grad[index] for index in members], recorder.note)
        for number, members in enumerate(sharded)
    ]
    residency: Any = Residency(groups, _NoPool())  # type: ignore[arg-type]
    members = {
        id(entries[index][2]): groups[number].params[position]
        for number, group in enumerate(sharded)
        for position, index in enumerate(group)
    }
    group_of: Any = {key: member.group for key, member in members.items()}
    with ExitStack() as stack:
        stack.enter_context(_state_kept(root, [param for _, _, param in entries]))
        for layer in root.sublayers(include_self=True):
            _watch_layer(layer, residency, group_of, stack)
        for index, (_, _, param) in enumerate(entries):
            if not param.stop_gradient:
                handle = param.register_hook(_on_grad(recorder, index, param, members.get(id(param)), residency))
                stack.callback(handle.remove)
        recorder.start()
        loss = sample()
        if not isinstance(loss, paddle.Tensor) or loss.stop_gradient or loss.size != 1:
            raise UsageError(f"sample must return a loss: a tensor of one element with a gradient, got {loss!r:.80}")
        recorder.note(Kind.NOTE, 0)
        loss.backward()
        recorder.note(Kind.NOTE, 0)
        del loss
        return recorder.finish()


class _Recorder:
    """Notes moments with the bytes that live, beside what lived before and the gradients so far."""

    def __init__(self) -> None:
        self._moments: list[Moment] = []
        self._grads = 0
        self._highest = 0
        self._meter: Optional[PeakMeter] = None

    def start(self) -> None:
        """From here on."""
        self._meter = PeakMeter()

    def note(self, kind: Kind, number: int) -> None:
        """Something happens."""
        if self._meter is not None:
            live = self._meter.live
            self._highest = max(self._highest, live)
            self._moments.append(Moment(kind, number, max(0, live - self._grads)))

    def add_grad(self, number: int, size: int) -> None:
        """The gradient of a parameter, of ``size`` bytes, is there."""
        self._grads += size
        self.note(Kind.GRAD, number)

    def finish(self) -> Rehearsal:
        """All that has been noted."""
        peak = self._meter.peak if self._meter is not None else None
        self._meter = None
        return Rehearsal(tuple(self._moments), max(0, (peak or 0) - self._highest))


def _on_grad(
    recorder: _Recorder, index: int, param: Tensor, member: Optional[_Member], residency: Any
) -> Callable[[Tensor], None]:
    def on_grad(grad: Tensor) -> None:
        recorder.add_grad(index, int(grad.size) * element_size(grad.dtype))
        if member is not None and member.expects_grad:
            residency.on_grad(member)

    return on_grad


def _watch_layer(layer: Layer, residency: Residency, group_of: dict[int, ParamGroup], stack: ExitStack) -> None:
    """What :mod:`.hooks` installs for sharded parameters, as far as it decides about gathers."""
    own = [group_of[id(param)] for param in layer_params(layer).values() if id(param) in group_of]
    groups = tuple(dict.fromkeys(own))

    stack.callback(frame_calls(layer, groups, residency))
    if groups:
        plain = layer_params(layer)
        set_layer_params(layer, ReadThrough(plain, group_of, residency))
        stack.callback(set_layer_params, layer, plain)


@contextmanager
def _state_kept(root: Layer, params: Sequence[Tensor]) -> Iterator[None]:
    """What a pass changes is as before after the context: random numbers, buffers, statistics, gradients."""
    random = paddle.get_rng_state()
    written = [buffer for _, buffer in root.named_buffers() if has_memory(buffer)]
    for layer in root.sublayers(include_self=True):
        written += [p for name, p in layer_params(layer).items() if p is not None and name in STATISTICS]
    values = [tensor.clone() for tensor in written]
    try:
        yield
    finally:
        with paddle.no_grad():
            for tensor, value in zip(written, values):
                tensor.set_value(value)
        for param in params:
            drop_grad(param)
        paddle.set_rng_state(random)

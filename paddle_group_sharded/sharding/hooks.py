"""Everything that the engine installs in a user's model, and how it is taken out again."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Optional

from ..errors import GroupShardedError
from ..paddle_compat import layer_params, on_grad_ready, set_layer_params
from .group import ParamGroup
from .loading import LoadWhole
from .param import ShardedParam
from .whole import WholeStateHook

if TYPE_CHECKING:
    from .engine import Engine
    from .residency import Residency

__all__ = ["Handles", "ReadThrough", "RootHook", "frame_calls", "install"]

Layer = Any


class ReadThrough(OrderedDict):  # type: ignore[type-arg]
    """A layer's parameters by name; reading one (``layer.name``, an item of a ``ParameterList``) gathers its group.

    ``parameters()``, ``named_parameters()`` and ``state_dict()`` iterate over items and do not come by here.
    """

    def __init__(self, params: Any, groups: dict[int, ParamGroup], residency: Residency) -> None:
        """Hold what ``params`` holds and tell ``residency`` when one is read whose ``id`` has a group."""
        super().__init__(params)
        self._groups = groups
        self._residency = residency

    def __getitem__(self, name: str) -> Any:
        """Return the parameter; its memory is there."""
        param = OrderedDict.__getitem__(self, name)
        group = self._groups.get(id(param))
        if group is not None:
            self._residency.read(group)
        return param

    def values(self) -> Any:
        """Each parameter; its memory is there when it comes.  This is how a ``ParameterList`` iterates."""
        return (self[name] for name in self)

    def __reduce__(self) -> Any:
        """Copy as the plain mapping: a copy of the layer is not managed."""
        return OrderedDict, (list(self.items()),)


def frame_calls(layer: Layer, groups: tuple[ParamGroup, ...], residency: Residency) -> Callable[[], None]:
    """Make each call of ``layer`` a frame of ``residency`` that uses ``groups``; returns what undoes it.

    The instance gets a ``forward`` of its own: hooks would take Paddle off the short way through ``Layer.__call__``,
    which costs a small layer a fifth of its time.  A copy of the layer is not managed.
    """
    attributes = layer.__dict__
    own = attributes.get("forward")  # the user's, in place of the class's
    plain = type(layer).forward if own is None else _as_function(own, layer)
    managed: Callable[[], Any] = weakref.ref(layer)

    @functools.wraps(plain)
    def forward(self: Layer, *inputs: Any, **kwargs: Any) -> Any:
        if self is not managed():
            return plain(self, *inputs, **kwargs)
        residency.enter(groups)
        outputs = plain(self, *inputs, **kwargs)
        residency.leave(self, outputs)
        return outputs

    installed = attributes["forward"] = MethodType(forward, layer)

    def undo() -> None:
        nonlocal managed
        managed = _no_layer  # what the user has put around this forward may go on calling it
        if attributes.get("forward") is installed:
            del attributes["forward"]
            if own is not None:
                attributes["forward"] = own

    return undo


def _no_layer() -> None:
    """In place of a reference to the layer that is managed."""


def _as_function(forward: Callable[..., Any], layer: Layer) -> Callable[..., Any]:
    """What stands on ``layer`` as its ``forward``, as a function of the layer and its inputs."""
    if isinstance(forward, MethodType) and forward.__self__ is layer:
        return forward.__func__
    return functools.wraps(forward)(lambda _, *inputs, **kwargs: forward(*inputs, **kwargs))


class RootHook:
    """Runs before each forward of the wrapped model; also the mark by which a wrapped model is known."""

    def __init__(self, engine: Engine) -> None:
        """Report to ``engine``."""
        self.engine: Optional[Engine] = engine

    def __deepcopy__(self, memo: Any) -> RootHook:
        """Do nothing in a copy of the layer, which is not managed."""
        copied = RootHook.__new__(RootHook)
        copied.engine = None
        return copied

    def __call__(self, layer: Layer, inputs: Any) -> None:
        """Start a forward of the whole model."""
        if self.engine is not None:
            self.engine.before_forward()


class GradReadyHook:
    """Tells the engine that a parameter's gradient is there; Paddle cannot remove it, so it can be closed."""

    def __init__(self, engine: Engine, param: ShardedParam) -> None:
        # Paddle holds this object where Python's garbage collector cannot see it: it must not hold the model.
        self._engine = weakref.ref(engine)
        self._param = weakref.ref(param)
        self._sharded = param.group.placements.param
        self.closed = False

    def __call__(self, *_: Any) -> None:
        engine, param = self._engine(), self._param()
        if self.closed or engine is None or param is None or not param.expects_grad or engine.backward_error.pending:
            return
        try:
            if self._sharded:
                engine.residency.on_grad(param)
            engine.reducer.mark_ready(param)
        except GroupShardedError as error:
            engine.backward_error.keep(error)


class Handles:
    """What was installed; :meth:`remove` leaves the model as it was."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._removers: list[Callable[[], None]] = []
        self._grad_hooks: dict[int, GradReadyHook] = {}

    def add(self, remover: Callable[[], None]) -> None:
        """Call ``remover`` on :meth:`remove`."""
        self._removers.append(remover)

    def watch_gradients(self, engine: Engine, params: list[ShardedParam]) -> None:
        """Hook the parameters that have become trainable since the last call."""
        for param in params:
            if param.expects_grad and id(param) not in self._grad_hooks:
                hook = self._grad_hooks[id(param)] = GradReadyHook(engine, param)
                on_grad_ready(param.tensor, hook)

    def remove(self) -> None:
        """Take everything out of the model."""
        for remover in reversed(self._removers):
            remover()
        self._removers.clear()
        for hook in self._grad_hooks.values():
            hook.closed = True
        self._grad_hooks.clear()


def install(engine: Engine, root: Layer) -> Handles:
    """Install what the levels of ``engine`` need on ``root`` and its layers."""
    handles = Handles()
    root_hook = RootHook(engine)
    handles.add(root.register_forward_pre_hook(root_hook).remove)
    sharded = {id(param.tensor): param.group for param in engine.params if param.group.placements.param}
    if sharded:
        whole_state = WholeStateHook(dict.fromkeys(sharded.values()))
        for layer in root.sublayers(include_self=True):
            _install_layer(engine, layer, sharded, handles, whole_state)
    return handles


def _install_layer(
    engine: Engine, layer: Layer, sharded: dict[int, ParamGroup], handles: Handles, whole_state: WholeStateHook
) -> None:
    own = [sharded[id(param)] for param in layer_params(layer).values() if id(param) in sharded]
    groups = tuple(dict.fromkeys(own))
    residency = engine.residency
    if not type(layer).__module__.startswith("paddle."):
        for group in groups:
            group.may_be_written = True

    handles.add(frame_calls(layer, groups, residency))
    if any(id(param) in sharded for param in layer.parameters()):
        handles.add(LoadWhole(engine, layer).remove)
    if not groups:
        return
    plain = layer_params(layer)
    set_layer_params(layer, ReadThrough(plain, sharded, residency))
    handles.add(layer.register_state_dict_hook(whole_state).remove)

    def restore() -> None:
        set_layer_params(layer, type(plain)(layer_params(layer).items()))

    handles.add(restore)

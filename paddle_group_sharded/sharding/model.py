"""The wrapped model that users call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paddle import nn

from ..errors import UsageError
from .engine import Engine, named_params
from .loading import load_whole
from .optimizer import ShardedOptimizer
from .whole import whole_params

__all__ = ["ShardedModel"]

Tensor = Any


class ShardedModel(nn.Layer):  # type: ignore[misc]
    """A model whose parameters, gradients or optimizer states are sharded, as its level says.

    Call it as the wrapped model, ``model._layer``; names in ``state_dict()`` are those of the wrapped model at every
    level.  Attributes that are not defined here are the wrapped model's.
    """

    def __init__(self, layer: nn.Layer, engine: Engine, optimizer: ShardedOptimizer) -> None:
        """Wrap ``layer``, which ``engine`` has sharded and ``optimizer`` steps."""
        super().__init__()
        self._layer = layer
        self.__dict__["_engine"] = engine
        self.__dict__["_optimizer"] = optimizer

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the wrapped model."""
        return self._layer(*inputs, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        """Refused: two models cannot share one set of groups and connections."""
        raise UsageError(
            "a model that has been through group_sharded_parallel cannot be copied; copy its layers while they are "
            "whole: with model.gathered() as layer: copied = copy.deepcopy(layer)"
        )

    def __getattr__(self, name: str) -> Any:
        """Read from the wrapped model what is not defined here."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_layer":
                raise
            return getattr(self._layer, name)

    # ----------------------------------------------------------------------------------------------------- contexts

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication: no backward pass inside is reduced.

        The next backward outside, or ``optimizer.step()``, reduces the sum.  Until then each rank holds whole
        gradients, at every level.
        """
        with self._engine.no_sync():
            yield

    @contextmanager
    def gathered(self, what: Any = None, write_back: bool = False) -> Iterator[nn.Layer]:
        """Show whole parameters inside the context; memory is as before afterwards.  Collective.

        ``what``: None for the whole model, a layer of it, a parameter, a structured name, or a list of those.  With
        ``write_back`` the values that group rank 0 leaves in them become everyone's; without, changes are undone where
        parameters are sharded.  Yields the wrapped model.
        """
        with self._engine.gathered(what, write_back):
            yield self._layer

    # --------------------------------------------------------------------------------------------------- whole state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's state under its own names; sharded parameters as whole copies.  Collective there.

        Where parameters are whole it holds the live tensors, as Paddle's own does.
        """
        return self._names_root.state_dict(*args, **kwargs)

    def to_static_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """:meth:`state_dict` with the buffers that are not persistable.  Collective where parameters are sharded."""
        return self._names_root.to_static_state_dict(*args, **kwargs)

    def set_state_dict(
        self, state_dict: Mapping[str, Any], use_structured_name: bool = True
    ) -> tuple[list[str], list[str]]:
        """Take whole values, given alike on every rank; returns the missing and the unexpected names.  Collective.

        Nothing is changed where a shape does not fit or the ranks give different values: :class:`UsageError`, on every
        rank, names the entry.
        """
        return load_whole(self._engine, self._names_root, state_dict, use_structured_name)

    @property
    def _names_root(self) -> nn.Layer:
        return self._engine.names_root

    load_dict = set_state_dict
    set_dict = set_state_dict

    def get_all_parameters(self, convert2cpu: bool = False) -> list[Tensor]:
        """Whole copies of all parameters, frozen ones too, in registration order.  Collective.

        The model itself stays sharded.  With ``convert2cpu`` the copies are on the host.
        """
        copies = {id(param): value for param, value in whole_params(self._engine.groups)}
        whole: list[Tensor] = [copies.get(id(tensor), tensor) for _, _, tensor in named_params(self._names_root)]
        return [tensor.cpu() if convert2cpu else tensor for tensor in whole]

    # ---------------------------------------------------------------------------------------------- layer interface

    def named_parameters(self, prefix: str = "", include_sublayers: bool = True, **kwargs: Any) -> Any:
        """The wrapped model's parameters under its own names."""
        return self._names_root.named_parameters(prefix=prefix, include_sublayers=include_sublayers, **kwargs)

    def named_buffers(self, prefix: str = "", include_sublayers: bool = True, **kwargs: Any) -> Any:
        """The wrapped model's buffers under its own names."""
        return self._names_root.named_buffers(prefix=prefix, include_sublayers=include_sublayers, **kwargs)

    def clear_gradients(self, set_to_zero: bool = True) -> None:
        """As ``optimizer.clear_grad``."""
        self._optimizer.clear_grad(set_to_zero)

    def _obtain_parameters_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """What ``paddle.DataParallel`` reads first: the gradients of this model are averaged already."""
        raise UsageError(
            "the model has been through group_sharded_parallel, which averages gradients and keeps weights equal over "
            "the ranks; call it as it is, without paddle.DataParallel or fleet.distributed_model around it"
        )

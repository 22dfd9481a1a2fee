"""What is saved and loaded: a model and an optimizer on one rank, seen as parts of named tensors.

The names are structured names of the unwrapped model.  One tensor has one *first name*; further ones are its aliases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from paddle import nn

from ..errors import UsageError
from ..paddle_compat import has_memory, unwrapped_layer
from ..sharding.engine import STATISTICS
from ..sharding.whole import plain_state
from .holding import Holding
from .match import StateOwner

__all__ = ["Names", "Subject", "differs_by_rank", "live_state"]

Tensor = Any

class Subject(Protocol):
    """A model, and an optimizer or none, on this rank."""

    names: Names
    level: str  # for people

    def model(self) -> list[Holding]:
        """The parts of parameters and buffers that this rank saves and loads."""

    def states(self) -> list[Holding]:
        """The parts of the optimizer's states, and of master weights, that this rank saves."""

    def owners(self) -> dict[str, StateOwner]:
        """The parameters of the optimizer, by first name; the ones of this rank's part of a pipeline."""

    def begin_load(self) -> None:
        """Weights are about to be written."""

    def end_weights(self) -> None:
        """Weights have been written: let what depends on them follow.  Collective."""

    def state_targets(self, wanted: Mapping[str, Iterable[str]]) -> list[Holding]:
        """Where to write the ``wanted`` states (by first name), which are made where they do not exist yet."""


class Names:
    """Names of one model's tensors."""

    def __init__(
        self, state: Mapping[str, Tensor], names_of: Callable[[str], Sequence[str]] = lambda name: (name,)
    ) -> None:
        """``state``: every name, with the tensor itself.

        ``names_of`` gives all names of the tensor that has a name, the first one first, where other ranks have more.
        """
        self.tensors: dict[str, Tensor] = {}  # by first name
        self.aliases: dict[str, str] = {}  # further name -> first name
        self._first: dict[int, str] = {}
        for name, tensor in state.items():
            every = names_of(name)
            first = self._first.setdefault(id(tensor), every[0])
            self.tensors.setdefault(first, tensor)
            self.aliases.update((other, first) for other in (name, *every) if other != first)
        self._by_parameter_name = {tensor.name: name for name, tensor in self.tensors.items()}

    @property
    def all(self) -> dict[str, list[str]]:
        """Every name of each tensor, by its first one."""
        names = {name: [name] for name in self.tensors}
        for alias, name in self.aliases.items():
            names[name].append(alias)
        return names

    @property
    def parameter_names(self) -> dict[str, str]:
        """Paddle's automatic names, by first name."""
        return {name: str(tensor.name) for name, tensor in self.tensors.items()}

    def of(self, tensor: Tensor) -> str:
        """The first name of ``tensor``; :class:`UsageError` where it is not of the model."""
        name = self._first.get(id(tensor)) or self._by_parameter_name.get(tensor.name)
        if name is None:
            raise UsageError(
                f"the optimizer has a parameter {tensor.name!r} {list(tensor.shape)} that the model's state_dict() "
                "does not have; pass the model that the optimizer was made for"
            )
        return name


def live_state(model: Any) -> dict[str, Tensor]:
    """Every tensor that ``model`` saves, itself and not a copy, by its name in the unwrapped model."""
    root = unwrapped_layer(model) if isinstance(model, nn.Layer) else model
    plain = type(root).state_dict is nn.Layer.state_dict
    state = plain_state(root) if plain else root.state_dict()
    # Without memory: a cache that its layer fills later, such as an LSTM's dropout state.
    return {name: tensor for name, tensor in state.items() if _is_parameter(tensor) or has_memory(tensor)}


def differs_by_rank(name: str, tensor: Tensor) -> bool:
    """Whether every rank computes ``tensor`` from its own data: buffers, statistics of BatchNorm."""
    return not _is_parameter(tensor) or (tensor.stop_gradient and name.rpartition(".")[2] in STATISTICS)


def _is_parameter(tensor: Tensor) -> bool:
    return hasattr(tensor, "optimize_attr")

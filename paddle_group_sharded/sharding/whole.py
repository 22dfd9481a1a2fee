"""Whole parameters for saving and back: the state of a model whose parameters may be sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Optional

import numpy as np
import paddle
from paddle import nn

from ..paddle_compat import flat_view, has_memory
from .group import ParamGroup
from .matching import is_array

__all__ = ["WholeStateHook", "as_tensor", "plain_state", "state_problems", "whole_params"]

Tensor = Any


def plain_state(layer: Any) -> dict[str, Tensor]:
    """``layer.state_dict()`` with the parameters themselves, which may hold no memory.  No communication."""
    state: dict[str, Tensor] = nn.Layer.state_dict(layer, use_hook=False)
    return state


def whole_params(
    groups: Iterable[ParamGroup], keep: bool = True, only: Optional[set[int]] = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole copies of the sharded parameters (those whose ``id`` is in ``only``), beside each its parameter.

    Collective, though it may be asked for by some ranks only, as any gather may.  One group is in memory at a time;
    nothing is yielded where ``keep`` is False.
    """
    for group in groups:
        group.adopt_writes()
        if not group.placements.param:
            continue
        wanted = [param for param in group.params if param.numel and (only is None or id(param.tensor) in only)]
        if not wanted:
            continue
        full = group.gathered_copy()
        for param in wanted if keep else ():
            slot = group.layout.slots[param.index]
            copy = flat_view(full, slot.start, slot.stop).clone().reshape(param.tensor.shape)
            copy.name = param.tensor.name
            copy.stop_gradient = param.tensor.stop_gradient
            yield param.tensor, copy
            del copy
        del full  # before the next one is there


class WholeStateHook:
    """Makes ``state_dict()`` of a layer with sharded parameters hold whole copies, not parameters without memory."""

    def __init__(self, groups: Iterable[ParamGroup]) -> None:
        """``groups``: all sharded ones of the model."""
        self._groups = list(groups)
        self._by_name = {param.tensor.name: param.tensor for group in self._groups for param in group.params}

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeStateHook:
        """A copy of a layer is not managed: it holds all that it has."""
        return WholeStateHook(())

    def __call__(self, state: dict[str, Tensor]) -> None:
        """Replace the parameters in ``state``.  Paddle calls it layer by layer, with what the others have put in."""
        wanted = {}
        copies = {}
        for key, value in state.items():
            param = self._by_name.get(value.name) if isinstance(value, paddle.Tensor) else None
            if param is None or not param.size:
                continue
            if value is param or not has_memory(value):  # without memory: what keep_vars=False has detached
                wanted[key] = param
            else:
                copies[id(param)] = value  # under another name of a tied parameter
        needed = {id(param) for param in wanted.values()} - set(copies)
        copies.update((id(param), copy) for param, copy in whole_params(self._groups, only=needed))
        for key, param in wanted.items():
            state[key] = copies[id(param)]


def state_problems(targets: Mapping[str, Tensor], entries: Mapping[str, Any]) -> list[str]:
    """What is wrong with those ``entries`` that have a target, each with its name."""
    problems = []
    for name, target in targets.items():
        if name not in entries:
            continue
        value, shape = entries[name], list(target.shape)
        if not is_array(value):
            problems.append(f"{name}: expected a tensor of shape {shape}, got {type(value).__name__}")
        elif list(value.shape) != shape:
            problems.append(f"{name}: expected shape {shape}, got {list(value.shape)}")
        elif _kind(value) != _kind(target):
            problems.append(f"{name}: expected dtype {target.dtype}, got {value.dtype}")
    return problems


def _kind(value: Any) -> str:
    """Values can be converted within a kind of dtype."""
    name = "float" if value.dtype == np.dtype("uint16") else str(value.dtype)  # so NumPy holds bfloat16
    return next((kind for kind in ("float", "complex", "bool") if kind in name), "int")


def as_tensor(value: Any) -> Tensor:
    """``value`` as a tensor whose elements lie one after the other."""
    tensor = value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)
    return tensor if tensor.is_contiguous() else tensor.contiguous()

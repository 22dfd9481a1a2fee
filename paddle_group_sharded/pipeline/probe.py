"""What a layer would be, found out without allocating it: the names that it uses up, its parameters, its bytes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import paddle

from ..comm import Comm
from ..errors import UsageError
from ..paddle_compat import element_size
from .desc import class_name, is_desc, is_shared_desc
from .naming import Counts, own_namespace
from .randomness import RandomStates
from .report import LayerFacts

__all__ = ["Probe", "probe_all"]

_PLAIN = (bool, int, float, str, type(None))


class Probe(NamedTuple):
    """What is known of one entry of the list, equal on every rank."""

    names: Counts  # automatic names that building it uses up
    facts: LayerFacts


class _Look(NamedTuple):
    """What one rank has found out, by number of the entry."""

    found: dict[int, Probe]
    failed: dict[int, str]  # why


def probe_all(entries: Sequence[Any], comm: Comm) -> list[Probe]:
    """Look at every entry; collective.  Raises :class:`UsageError` on every rank for what cannot be built anywhere.

    Descriptions of equal layers are looked at once.  A constructor may fail on ranks that will not hold the layer, as
    one that reads a file does: they believe the others.  Constructors that look at their weights, as Paddle 2.6's
    Embedding with a padding index, cannot be called without memory; such a layer is built in full, and dropped before
    the next.  Random states are left as they were.
    """
    states = RandomStates.now()
    found: dict[int, Probe] = {}
    failed: dict[int, str] = {}
    for guard in (paddle.LazyGuard, contextlib.nullcontext):
        unknown = [index for index in range(len(entries)) if index not in found]
        if not unknown:
            break
        for look in reversed(comm.exchange(_look_at(entries, unknown, guard), "look at layers")):
            found.update(look.found)  # of the lowest rank that knows, for all
            failed.update(look.failed)
    states.restore()
    for index, entry in enumerate(entries):
        if index not in found:
            raise UsageError(f"layer {index} of the list, {entry}, cannot be built: {failed[index]}")
    return [found[index] for index in range(len(entries))]


def _look_at(entries: Sequence[Any], indices: Sequence[int], guard: Any) -> _Look:
    """``guard``: what constructors are called under."""
    look = _Look({}, {})
    known: dict[object, Probe] = {}
    for index in indices:
        key = _signature(entries[index])
        try:
            probe = known.get(key) or _probe(entries[index], guard)
        except Exception as error:  # whatever a constructor raises
            look.failed[index] = str(error)
            continue
        look.found[index] = probe
        if key is not None:
            known[key] = probe
    return look


def _probe(entry: Any, guard: Any) -> Probe:
    if not is_desc(entry):
        return Probe({}, _facts(entry, entry))
    with own_namespace() as namespace, guard():
        facts = _facts(entry, entry.build_layer())
    return Probe(namespace.counts, facts)


def _facts(entry: Any, layer: Any) -> LayerFacts:
    tensors = [*layer.parameters(), *layer.buffers()] if isinstance(layer, paddle.nn.Layer) else []
    params = list(layer.parameters()) if tensors else []
    return LayerFacts(
        name=class_name(entry),
        parameters=sum(map(_numel, params)),
        frozen=sum(_numel(param) for param in params if param.stop_gradient),
        size_bytes=sum(_numel(tensor) * element_size(tensor.dtype) for tensor in tensors),
        shared=entry.layer_name if is_shared_desc(entry) else None,
    )


def _numel(tensor: Any) -> int:
    return math.prod(tensor.shape)


def _signature(entry: Any) -> Optional[object]:
    """Equal for descriptions of layers that are built alike; None where that cannot be told."""
    arguments = [*getattr(entry, "inputs", ()), *getattr(entry, "kwargs", {}).values()]
    if not is_desc(entry) or is_shared_desc(entry) or not hasattr(entry, "layer_func"):
        return None
    if not all(isinstance(value, _PLAIN) for value in arguments):
        return None
    return entry.layer_func, repr(entry.inputs), repr(sorted(entry.kwargs.items()))

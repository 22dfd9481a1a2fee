"""What a layer would be, found out without allocating it: the names that it uses up, its parameters, its bytes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import paddle

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


def probe_all(entries: Sequence[Any]) -> list[Probe]:
    """Look at every entry; descriptions of equal layers are looked at once.  Random states are left as they were."""
    known: dict[object, Probe] = {}
    probes = []
    for index, entry in enumerate(entries):
        key = _signature(entry)
        probe = known.get(key) if key is not None else None
        if probe is None:
            probe = _probe(index, entry)
            if key is not None:
                known[key] = probe
        probes.append(probe)
    return probes


def _probe(index: int, entry: Any) -> Probe:
    if not is_desc(entry):
        return Probe({}, _facts(entry, entry))
    states = RandomStates.now()
    try:
        with contextlib.suppress(Exception):  # whatever a constructor raises that looks at its weights
            return _look(entry, paddle.LazyGuard())  # parameters have a shape, but no memory
        return _look(entry, contextlib.nullcontext())  # built in full, and dropped before the next
    except Exception as error:
        raise UsageError(f"layer {index} of the list, {entry}, cannot be built: {error}") from error
    finally:
        states.restore()


def _look(desc: Any, guard: Any) -> Probe:
    with own_namespace() as namespace, guard:
        facts = _facts(desc, desc.build_layer())
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

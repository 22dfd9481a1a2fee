"""Cut a list of layers into the stages of a pipeline: every method gives a :class:`Segmentation`.

Layers are known here by their number and the name of their class alone; nothing is built and nothing runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, Optional, Union

from ..errors import UsageError
from .partition import Number, best_cuts, even_sizes

__all__ = [
    "MEASURES",
    "Measure",
    "SegMethod",
    "Segmentation",
    "by_bounds",
    "by_class_weight",
    "by_layer",
    "by_weight",
    "segment",
    "uniform",
]

SegMethod = Union[str, Sequence[int], Mapping[str, Number]]
Measure = Callable[[str], Sequence[Number]]  # from one of MEASURES to one number per layer

MEASURES = ("parameters", "time", "memory")  # methods whose weights have to be counted or measured


@dataclass(frozen=True)
class Segmentation:
    """Which layers stand on which virtual stage.

    Virtual stage ``i`` holds the layers ``bounds[i]`` to ``bounds[i + 1] - 1``; it is chunk ``i // num_stages`` of
    rank ``i % num_stages``.  By construction every layer stands on one virtual stage and none of them is empty.
    """

    bounds: tuple[int, ...]  # from 0 to the number of layers, strictly increasing
    num_chunks: int = 1
    method: str = "bounds"  # how it was asked for, for the printer
    weights: Optional[tuple[Number, ...]] = None  # of each layer, where the method weighs them

    def __post_init__(self) -> None:
        """Prove that the bounds are a cut."""
        bounds = self.bounds
        if len(bounds) < 2 or bounds[0] != 0 or any(a >= b for a, b in zip(bounds, bounds[1:])):
            raise UsageError(f"bounds go from 0 to the number of layers and always increase; got {list(bounds)}")
        if self.num_chunks < 1 or (len(bounds) - 1) % self.num_chunks:
            raise UsageError(
                f"{len(bounds) - 1} virtual stages cannot be dealt out as {self.num_chunks} chunks per stage; give "
                f"num_stages * num_chunks + 1 bounds"
            )
        if self.weights is not None and len(self.weights) != self.num_layers:
            raise UsageError(f"expected a weight for each of {self.num_layers} layers, got {len(self.weights)}")

    @property
    def num_layers(self) -> int:
        """Number of layers in the whole list."""
        return self.bounds[-1]

    @property
    def num_virtual_stages(self) -> int:
        """Number of intervals, ``num_stages * num_chunks``."""
        return len(self.bounds) - 1

    @property
    def num_stages(self) -> int:
        """Number of ranks of the pipeline."""
        return self.num_virtual_stages // self.num_chunks

    @property
    def parts(self) -> tuple[range, ...]:
        """Layer numbers of each virtual stage."""
        return tuple(range(a, b) for a, b in zip(self.bounds, self.bounds[1:]))

    def virtual_stages_of(self, rank: int) -> range:
        """Virtual stages that ``rank`` holds, its chunks in order."""
        return range(rank, self.num_virtual_stages, self.num_stages)

    def layers_of(self, rank: int) -> tuple[range, ...]:
        """Layer numbers of each chunk of ``rank``."""
        return tuple(self.parts[stage] for stage in self.virtual_stages_of(rank))

    def virtual_stage_of_layer(self, layer: int) -> int:
        """Virtual stage on which a layer stands."""
        for stage, part in enumerate(self.parts):
            if layer in part:
                return stage
        raise UsageError(f"layers go from 0 to {self.num_layers - 1}; got {layer}")

    def rank_of_layer(self, layer: int) -> int:
        """Rank on which a layer stands."""
        return self.virtual_stage_of_layer(layer) % self.num_stages

    def totals(self, weights: Sequence[Number]) -> tuple[Number, ...]:
        """Sum of per-layer ``weights`` over all that each rank holds."""
        return tuple(sum(weights[i] for part in self.layers_of(r) for i in part) for r in range(self.num_stages))

    def balance(self, weights: Optional[Sequence[Number]] = None) -> float:
        """Heaviest rank over the mean of all: 1 is perfect.  By default in the method's weights, or else in layers."""
        totals = self.totals(weights or self.weights or [1] * self.num_layers)
        return float(max(totals) * len(totals) / sum(totals)) if sum(totals) else 1.0


def segment(
    class_names: Sequence[str],
    num_stages: int,
    method: SegMethod = "uniform",
    num_chunks: int = 1,
    measure: Optional[Measure] = None,
) -> Segmentation:
    """Cut layers, given by their class names, as ``method`` says.

    ===========================  =================================================================================
    ``"uniform"``                equal numbers of layers; what is over goes to the last stages
    ``"layer:<regex>"``          equal numbers of the layers whose class name matches, see :func:`by_layer`
    ``"parameters"``             balance the numbers that ``measure("parameters")`` gives
    ``"time"``, ``"memory"``     likewise, measured on a sample input
    ``[0, 7, 15]``, ``[0, 7]``   first layer of each virtual stage; the end may be left out
    ``{"Embedding": 2, "*": 1}``  weights of classes, see :func:`by_class_weight`
    ===========================  =================================================================================
    """
    if isinstance(method, Mapping):
        return by_class_weight(class_names, method, num_stages, num_chunks)
    if not isinstance(method, str):
        return by_bounds(method, len(class_names), num_stages, num_chunks)
    if method == "uniform":
        return uniform(len(class_names), num_stages, num_chunks)
    if method.startswith("layer:"):
        return by_layer(class_names, method[len("layer:") :], num_stages, num_chunks)
    if method in MEASURES:
        if measure is None:
            raise UsageError(f"method {method!r} needs the layers themselves; give by_weight() their weights instead")
        return by_weight(measure(method), num_stages, num_chunks, method)
    raise UsageError(
        f"unknown method {method!r}; there are 'uniform', 'layer:<regex>', 'parameters', 'time', 'memory', a list of "
        f"bounds, and a dict of class weights"
    )


def uniform(num_layers: int, num_stages: int, num_chunks: int = 1) -> Segmentation:
    """Equal numbers of layers; what is over goes to the last stages: 10 layers over 4 stages are cut 0, 2, 4, 7, 10."""
    num_parts = _num_parts(num_layers, num_stages, num_chunks)
    return Segmentation(_accumulate(even_sizes(num_layers, num_parts)), num_chunks, "uniform")


def by_layer(class_names: Sequence[str], pattern: str, num_stages: int, num_chunks: int = 1) -> Segmentation:
    """Equal numbers of the layers whose class name matches; what is over goes to the last stages.

    ``pattern`` is a regular expression that is searched for anywhere in the class name, without regard to case (as
    in Paddle): ``Linear`` also finds ``ColumnParallelLinear``, ``^Linear$`` does not.  A stage ends right behind its
    last match, the last stage with the list; so layers in front of the first match go to the first stage.
    """
    name = f"layer:{pattern}"
    try:
        regex = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UsageError(f"{name!r} is not a regular expression: {error}") from error
    num_parts = _num_parts(len(class_names), num_stages, num_chunks)
    matches = [index for index, class_name in enumerate(class_names) if regex.search(class_name)]
    if not matches:
        raise UsageError(f"{name!r} matches none of the classes in the list: {', '.join(_in_order(class_names))}")
    if len(matches) < num_parts:
        raise UsageError(
            f"{name!r} matches {len(matches)} layers, too few for {_parts(num_stages, num_chunks)}; use at most "
            f"{len(matches)} of them, or a pattern that matches more"
        )
    last_matches = _accumulate(even_sizes(len(matches), num_parts))[1:-1]
    bounds = (0, *(matches[count - 1] + 1 for count in last_matches), len(class_names))
    weights = [int(index in set(matches)) for index in range(len(class_names))]
    return Segmentation(bounds, num_chunks, name, tuple(weights))


def by_weight(weights: Sequence[Number], num_stages: int, num_chunks: int = 1, method: str = "weights") -> Segmentation:
    """Balance per-layer weights of any unit: the heaviest virtual stage is as light as any contiguous cut allows.

    Where several cuts reach that, see :func:`.partition.best_cuts`.  Weights that are all zero count as equal.
    """
    for index, weight in enumerate(weights):
        if not math.isfinite(weight) or weight < 0:
            raise UsageError(f"weights are finite numbers from 0 on; got {weight!r} for layer {index}")
    num_parts = _num_parts(len(weights), num_stages, num_chunks)
    bounds = best_cuts(weights if any(weights) else [1] * len(weights), num_parts)
    return Segmentation(bounds, num_chunks, method, tuple(weights))


def by_class_weight(
    class_names: Sequence[str], class_weights: Mapping[str, Number], num_stages: int, num_chunks: int = 1
) -> Segmentation:
    """Balance weights of classes: ``{"Embedding": 2}`` counts an embedding double.

    Keys are whole class names; ``"*"`` is the weight of all classes that are not named, 1 by default.
    """
    unknown = [name for name in class_weights if name != "*" and name not in class_names]
    if unknown:
        raise UsageError(
            f"class weights name {', '.join(unknown)}, but the classes are {', '.join(_in_order(class_names))}"
        )
    others = class_weights.get("*", 1)
    weights = [class_weights.get(name, others) for name in class_names]
    return by_weight(weights, num_stages, num_chunks, str(dict(class_weights)))


def by_bounds(bounds: Sequence[int], num_layers: int, num_stages: int, num_chunks: int = 1) -> Segmentation:
    """Cut where the user says: the first layer of each virtual stage, then, if given, the number of layers."""
    num_parts = _num_parts(num_layers, num_stages, num_chunks)
    wrong = [bound for bound in bounds if not isinstance(bound, int) or isinstance(bound, bool)]
    if wrong:
        raise UsageError(f"bounds are layer numbers; got {wrong[0]!r} of type {type(wrong[0]).__name__}")
    full = (*bounds, *[num_layers] * (not bounds or bounds[-1] != num_layers))
    if len(full) != num_parts + 1:
        raise UsageError(
            f"bounds {list(bounds)} do not cut {num_layers} layers into {_parts(num_stages, num_chunks)}; give "
            f"{num_parts} first layers, then, if you like, {num_layers}"
        )
    return Segmentation(full, num_chunks, str(list(bounds)))


def _num_parts(num_layers: int, num_stages: int, num_chunks: int) -> int:
    for what, count in (("num_stages", num_stages), ("num_chunks", num_chunks)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UsageError(f"{what} is a whole number from 1 on; got {count!r}")
    if num_layers < num_stages * num_chunks:
        raise UsageError(
            f"{num_layers} layers cannot fill {_parts(num_stages, num_chunks)}, each needs one; use at most "
            f"{num_layers} of them, or describe the model in more, smaller layers"
        )
    return num_stages * num_chunks


def _parts(num_stages: int, num_chunks: int) -> str:
    if num_chunks == 1:
        return f"{num_stages} stages"
    return f"{num_stages * num_chunks} virtual stages ({num_stages} stages with {num_chunks} chunks each)"


def _accumulate(sizes: Sequence[int]) -> tuple[int, ...]:
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return tuple(bounds)


def _in_order(names: Sequence[str]) -> list[str]:
    """Each name once, in order of first appearance."""
    return list(dict.fromkeys(names))

"""Cut a batch into micro-batches, in every form in which Paddle's users hand one over.

``data`` is one of

* ``[inputs, labels]``: each a tensor or array whose axis 0 counts the samples, or a tuple or dict of such, nested at
  will; what has no axis 0 (None, numbers, 0-d tensors) goes to every micro-batch as it is.  A *list* inside of
  ``inputs`` or ``labels`` is a list of micro-batches that have been cut already, as in Paddle;
* an iterator, such as ``iter(data_loader)``, that gives ``(inputs, labels)`` of one micro-batch at a time;
* a function that returns one of these; or None on a rank that needs no data.

A batch that the number of micro-batches does not divide is cut as evenly as possible, the larger parts first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Optional

import numpy as np
import paddle

from ..errors import UsageError

__all__ = ["Batch", "Counted", "cut"]


class Counted(IntEnum):
    """By what the samples of micro-batches were counted; the more, the surer."""

    NOT = 0  # there was nothing to count
    WHOLE = 1  # the first tensor of each micro-batch, which came as it is
    CUT = 2  # axis 0 of what was cut here


@dataclass(frozen=True)
class Batch:
    """The micro-batches that a rank needs."""

    inputs: Optional[list[Any]]  # one each, or None where they are not needed
    labels: Optional[list[Any]]
    sizes: list[int]  # samples of each micro-batch; all 1 where nothing was counted; empty on a rank without data
    asked: int  # micro-batches asked for; an iterator may have ended before
    counted: Counted = Counted.NOT  # how sizes came about

    @property
    def ended(self) -> bool:
        """Whether an iterator had less than was asked for."""
        return self.asked != len(self.sizes) and (self.inputs is not None or self.labels is not None)


def cut(data: Any, num_micro_batches: int, inputs: bool, labels: bool, fewer: bool = False) -> Batch:
    """The micro-batches of ``data``; ``inputs`` and ``labels`` tell which of them this rank needs.

    With ``fewer``, as in an evaluation, a batch of fewer samples is cut into fewer micro-batches, and a list of
    micro-batches may have any length.  Raises :class:`UsageError` for anything that is not as described above.
    """
    if not inputs and not labels:
        return Batch(None, None, [], num_micro_batches)
    if callable(data) and not isinstance(data, paddle.Tensor):
        data = data()
    if hasattr(data, "__next__"):
        return _drawn(data, num_micro_batches, inputs, labels)
    first, second = _pair(data, "data")
    needed = [(first, "inputs", inputs), (second, "labels", labels)]
    found = {name: _parts(value, num_micro_batches, name, fewer) for value, name, needs in needed if needs}
    if len({len(each.sizes) for each in found.values() if each.counted}) > 1:
        raise UsageError(
            f"inputs give {len(found['inputs'].sizes)} micro-batches, but labels {len(found['labels'].sizes)}; give "
            f"equally many"
        )
    best = max(reversed([*found.values()]), key=lambda each: each.counted)  # labels first: a loss is a mean over them
    parts = [found[name][0] if name in found else None for name in ("inputs", "labels")]
    return Batch(parts[0], parts[1], best.sizes, len(best.sizes), best.counted)


def _drawn(source: Iterator[Any], count: int, inputs: bool, labels: bool) -> Batch:
    """Take micro-batches out of an iterator, all that this step will need."""
    drawn = []
    for _ in range(count):
        try:
            drawn.append(_pair(next(source), "a micro-batch"))
        except StopIteration:
            break
    first = [_whole(pair[0]) for pair in drawn] if inputs else None
    second = [_whole(pair[1]) for pair in drawn] if labels else None
    sizes = _sizes(second) or _sizes(first)
    return Batch(first, second, sizes or [1] * len(drawn), count, Counted.WHOLE if sizes else Counted.NOT)


class _Parts(NamedTuple):
    """Inputs or labels of each micro-batch."""

    parts: list[Any]
    sizes: list[int]
    counted: Counted


def _pair(data: Any, what: str) -> tuple[Any, Any]:
    if isinstance(data, (list, tuple)) and len(data) == 2:
        return data[0], data[1]
    if isinstance(data, dict):
        got = f"a dict of {', '.join(map(repr, data))}; write [inputs, labels] with the entries that the first layer "
        got += "and the loss take"
    elif isinstance(data, (list, tuple)):
        got = f"{len(data)} things; write [(x1, x2), labels] for several inputs"
    elif data is None:
        got = "None, which only ranks between the first and the last stage may give"
    elif hasattr(data, "__iter__") and not isinstance(data, paddle.Tensor):
        got = f"a {type(data).__name__}; give iter(...) of it to take micro-batches from it"
    else:
        got = f"a {type(data).__name__}; write [inputs, labels], with None for labels that are not needed"
    raise UsageError(f"expected {what} as [inputs, labels], got {got}")


def _parts(value: Any, count: int, name: str, fewer: bool) -> _Parts:
    """``value`` in ``count`` parts."""
    lists, samples = _lengths(value, name)
    if fewer:
        count = lists if lists is not None else min(count, samples) if samples else count
    if lists is not None and lists != count:
        raise UsageError(
            f"a list in {name} holds micro-batches, and {count} are asked for, but it has {lists}; write a tuple for "
            f"several {name}, or set accumulate_steps to {lists}"
        )
    if samples is not None and samples < count:
        raise UsageError(
            f"{samples} samples of {name} cannot be cut into {count} micro-batches; give at least {count}, or set "
            f"accumulate_steps to fewer"
        )
    size, larger = divmod(samples or 0, count)
    bounds = [index * size + min(index, larger) for index in range(count + 1)]
    parts = [_part(value, index, bounds[index], bounds[index + 1]) for index in range(count)]
    if samples is not None:
        return _Parts(parts, [stop - start for start, stop in zip(bounds, bounds[1:])], Counted.CUT)
    sizes = _sizes(parts)
    return _Parts(parts, sizes or [1] * count, Counted.WHOLE if sizes else Counted.NOT)


def _lengths(value: Any, name: str) -> tuple[Optional[int], Optional[int]]:
    """Length of the lists of micro-batches, and samples of the tensors, in ``value``; None where there are none."""
    lists: set[int] = set()
    samples: set[int] = set()

    def visit(item: Any) -> None:
        if isinstance(item, list):
            lists.add(len(item))
        elif isinstance(item, (tuple, dict)):
            for each in item.values() if isinstance(item, dict) else item:
                visit(each)
        elif _is_array(item) and len(item.shape) > 0:
            samples.add(int(item.shape[0]))

    visit(value)
    for found, what in ((lists, "lists of micro-batches"), (samples, "samples along axis 0")):
        if len(found) > 1:
            raise UsageError(
                f"{name} have {what} of different numbers: {', '.join(map(str, sorted(found)))}; give what is not cut "
                f"along axis 0 as a list with one entry for each micro-batch"
            )
    return next(iter(lists), None), next(iter(samples), None)


def _part(value: Any, index: int, start: int, stop: int) -> Any:
    if isinstance(value, list):
        return _whole(value[index])
    if isinstance(value, dict):
        return {key: _part(each, index, start, stop) for key, each in value.items()}
    if isinstance(value, tuple):
        return _like(value, [_part(each, index, start, stop) for each in value])
    if _is_array(value) and len(value.shape) > 0:
        return _whole(value[start:stop])
    return _whole(value)


def _whole(value: Any) -> Any:
    """A micro-batch as it will be used: tensors in the place of arrays, outside of autograd."""
    if isinstance(value, paddle.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        return paddle.to_tensor(value)
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return _like(value, [_whole(each) for each in value])
    return value


def _like(container: Any, items: list[Any]) -> Any:
    if isinstance(container, list):
        return items
    return type(container)._make(items) if hasattr(container, "_make") else tuple(items)


def _sizes(parts: Optional[Sequence[Any]]) -> list[int]:
    """Samples of each micro-batch; an empty list where one of them has nothing to count."""
    sizes = [_first_length(part) for part in parts or ()]
    return [] if None in sizes else [size for size in sizes if size is not None]


def _first_length(value: Any) -> Optional[int]:
    if isinstance(value, (list, tuple, dict)):
        lengths = (_first_length(each) for each in (value.values() if isinstance(value, dict) else value))
        return next((length for length in lengths if length is not None), None)
    return int(value.shape[0]) if _is_array(value) and len(value.shape) > 0 else None


def _is_array(value: Any) -> bool:
    return isinstance(value, (paddle.Tensor, np.ndarray))

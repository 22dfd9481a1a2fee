"""Plain values of a checkpoint as JSON, with the arrays inside of them taken out.

What JSON does not know is written as an object with one name that begins with ``$``::

    (1, 2)                 {"$tuple": [1, 2]}
    {3: "x"}               {"$dict": [[3, "x"]]}           a dict whose keys are not all texts, or begin with $
    float("nan")           {"$float": "nan"}               also inf, -inf
    an array, a tensor     {"$array": "0"}, {"$tensor": "0"}    its number under the key ("data", number)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Callable

import numpy as np
import paddle

from ..errors import CheckpointError, UsageError

__all__ = ["pack", "unpack"]


def pack(value: Any, arrays: dict[str, Any], where: str = "extra") -> Any:
    """``value`` as JSON; its arrays and tensors are added to ``arrays``.

    :class:`UsageError` names the place of what cannot be kept.
    """
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, (paddle.Tensor, np.ndarray)):
        number = str(len(arrays))
        arrays[number] = value
        return {"$tensor" if isinstance(value, paddle.Tensor) else "$array": number}
    if isinstance(value, list):
        return [pack(item, arrays, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [pack(item, arrays, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        pairs = [[pack(key, arrays, where), pack(item, arrays, f"{where}[{key!r}]")] for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$dict": pairs}
    raise UsageError(
        f"{where} is of type {type(value).__name__}, which a checkpoint cannot hold; expected numbers, texts, None, "
        "tensors, arrays, and lists, tuples and dicts of those"
    )


def unpack(value: Any, array: Callable[[str], Any]) -> Any:
    """The inverse of :func:`pack`; ``array(number)`` gives an array."""
    if isinstance(value, list):
        return [unpack(item, array) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: unpack(item, array) for key, item in value.items()}
    (kind, content), *_ = value.items()
    if kind == "$float":
        return float(content)
    if kind == "$array":
        return array(content)
    if kind == "$tensor":
        found = array(content)
        tensor = paddle.to_tensor(found)
        return tensor.view("bfloat16") if found.dtype == np.uint16 else tensor
    if kind == "$tuple":
        return tuple(unpack(item, array) for item in content)
    if kind == "$dict":
        return {unpack(key, array): unpack(item, array) for key, item in content}
    raise CheckpointError(f"the checkpoint has a value of kind {kind!r}, which this release does not know")

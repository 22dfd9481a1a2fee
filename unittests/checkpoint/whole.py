"""The state of a model and an optimizer as arrays under structured names, for comparison."""

from __future__ import annotations

from typing import Any

import numpy as np

from unittests.sharding.dygraph_load import to_arrays

__all__ = ["differing", "whole_state"]


def whole_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """Everything by name.  Keys of optimizer states end with a number that counts optimizers: it is left out."""
    live = model.state_dict()
    names: dict[str, str] = {}
    for name, tensor in live.items():
        names.setdefault(tensor.name, name)
    arrays: dict[str, Any] = {f"model {name}": value for name, value in to_arrays(live).items()}
    arrays["rate"] = optimizer.get_lr()
    state = to_arrays(optimizer.state_dict())
    arrays["scheduler"] = state.pop("LR_Scheduler", None)
    for key, value in state.pop("master_weights", {}).items():
        arrays[f"master {names[key.removesuffix('_fp32_master_0')]}"] = value
    for key, value in state.items():
        old = max((old for old in names if key.startswith(f"{old}_")), key=len)
        arrays[f"state {names[old]} {key[len(old) :].rpartition('_')[0]}"] = value
    return arrays


def differing(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The names under which two states do not have the same bits."""
    names = [*expected, *(name for name in found if name not in expected)]
    return [name for name in names if name not in found or name not in expected or _differ(expected[name], found[name])]


def _differ(expected: Any, found: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return bool(
            expected.dtype != found.dtype or expected.size != found.size or expected.tobytes() != found.tobytes()
        )
    return bool(expected != found)

"""The whole state of a model and an optimizer as arrays under structured names, for comparison."""

from __future__ import annotations

from typing import Any

import numpy as np

from unittests.sharding.dygraph_load import by_position, to_arrays

__all__ = ["differing", "whole_state"]


def whole_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """Everything by name.  Keys of optimizer states end with a number that counts optimizers: it is left out."""
    arrays = {f"model {name}": value for name, value in to_arrays(model.state_dict()).items()}
    state = to_arrays(by_position(model, optimizer.state_dict()))
    masters = state.pop("master_weights", {})
    arrays["scheduler"] = state.pop("LR_Scheduler", None)
    arrays["rate"] = optimizer.get_lr()
    names = {param.name: name for name, param in model.named_parameters()}
    arrays.update((f"master {names[key.removesuffix('_fp32_master_0')]}", value) for key, value in masters.items())
    arrays.update((f"state {key.rpartition('_')[0]}", value) for key, value in state.items())
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

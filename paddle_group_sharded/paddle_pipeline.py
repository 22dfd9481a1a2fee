"""Private Paddle names that only the pipeline uses, one documented function each; see :mod:`.paddle_compat`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Callable, Optional

import paddle

from .paddle_compat import innermost_optimizer

__all__ = [
    "auto_casts",
    "clip_of",
    "conv_options",
    "has_forward_hooks",
    "step_with_scaler",
    "unscale_grads",
    "update_scale",
    "without_clips",
]

Tensor = Any


def auto_casts() -> bool:
    """Whether an ``auto_cast`` is in force that changes the dtypes in which operations compute."""
    return int(paddle.base.framework._dygraph_tracer()._amp_level) != 0


def conv_options(layer: Any) -> Optional[dict[str, Any]]:
    """The keyword arguments by which the function of a convolution layer, and that of its gradient, are called.

    None where the gradient of the input is not simply the transposed function: other padding than by numbers of zeros.
    """
    padding = layer._padding
    if getattr(layer, "_padding_mode", "zeros") != "zeros" or not _is_number_of_zeros(padding):
        return None
    return {
        "stride": layer._stride,
        "padding": padding,
        "dilation": layer._dilation,
        "groups": layer._groups,
        "data_format": layer._data_format,
    }


def _is_number_of_zeros(padding: Any) -> bool:
    if isinstance(padding, (list, tuple)):
        return all(isinstance(each, int) for each in padding)
    return isinstance(padding, int)


def has_forward_hooks(layer: Any) -> bool:
    """Whether anything runs before or after the forward of ``layer``."""
    return bool(layer._forward_pre_hooks or layer._forward_post_hooks)


def clip_of(clip: Any) -> Any:
    """The clip object that the user gave, inside fleet's ``HybridParallelClipGrad``."""
    return clip._clip if type(clip).__name__ == "HybridParallelClipGrad" else clip


@contextlib.contextmanager
def without_clips(optimizer: Any, which: Callable[[Any], bool]) -> Iterator[None]:
    """Let ``optimizer`` step without those of its clip objects of which ``which`` is true."""
    groups = [group for group in optimizer._param_groups or [] if isinstance(group, dict)]
    places = [(group, "grad_clip") for group in groups] + [(vars(optimizer), "_grad_clip")]
    removed = [(place, key, place[key]) for place, key in places if place.get(key) is not None and which(place[key])]
    for place, key, _ in removed:
        place[key] = None
    try:
        yield
    finally:
        for place, key, clip in removed:
            place[key] = clip


def unscale_grads(scaler: Any, optimizer: Any) -> bool:
    """Divide this rank's gradients by the scale; returns whether one of them is not finite.

    fleet's ``distributed_scaler`` makes its scalers communicate here; this does not.
    """
    inner = innermost_optimizer(optimizer)
    type(scaler)._unscale(scaler, inner)
    if "state" in scaler._optimizer_states[id(inner)]:
        state = scaler._optimizer_states[id(inner)]["state"]
        scaler._optimizer_states[id(inner)]["state"] = type(state).UNSCALED
    return bool(scaler._found_inf)


def step_with_scaler(scaler: Any, optimizer: Any, overflow: bool) -> None:
    """``scaler.step`` and ``scaler.update`` after :func:`unscale_grads`, with a decision that was made elsewhere."""
    scaler._found_inf = paddle.to_tensor([overflow])
    scaler.step(innermost_optimizer(optimizer))
    update_scale(scaler, overflow)


def update_scale(scaler: Any, overflow: bool) -> None:
    """``scaler.update``, also where there was nothing to step."""
    scaler._cache_found_inf = scaler._cache_founf_inf = overflow  # the second one is Paddle 2.6's spelling
    scaler._scale = scaler._scale.reshape([])  # Paddle prints it as a float when it falls; NumPy 2.4 needs a scalar
    scaler.update()
    scaler._scale = scaler._scale.reshape([1])

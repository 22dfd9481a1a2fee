"""Weight gradients that are computed later than input gradients: what a zero-bubble schedule fills its bubble with.

While :class:`WeightGrads` is installed, each dense or convolution layer runs as two graphs over the same output:

    x ----> [input half] ----> y        backward of the main graph: dx from dy and the weight, in closed form
    weight -> [weight half] -> y        kept aside with dy; its own backward adds to ``weight.grad``, now or later

The weight half is Paddle's own graph of the layer's own forward, so its gradients, hooks, casts and accumulation are
Paddle's.  All other layers compute all gradients at once; so do layers with a forward of their own, be it of their
class or of one object, with hooks, and with a weight that is made anew for each call, such as by ``spectral_norm``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Callable, NamedTuple, Optional

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer

from ..paddle_pipeline import auto_casts, conv_options, has_forward_hooks

__all__ = ["Pending", "WeightGrads"]

Tensor = Any

_NOTHING = contextlib.nullcontext()

# (layer, its weight at the call, gradient of the output, shape of the input)
InputGrad = Callable[[Any, Tensor, Tensor, list[int]], Tensor]


class Pending:
    """Weight gradients that have been put off."""

    def __init__(self) -> None:
        self._halves: list[tuple[Tensor, Tensor]] = []  # output of a weight half, and its gradient

    def add(self, output: Tensor, grad: Tensor) -> None:
        """Put off the backward of a weight half."""
        self._halves.append((output, grad))

    def compute(self) -> None:
        """Add them to the gradients of the weights, in one pass, and forget them."""
        halves, self._halves = self._halves, []
        if halves:
            outputs, grads = zip(*halves)
            del halves
            paddle.autograd.backward(list(outputs), list(grads))


class WeightGrads:
    """The layers whose weight gradients can be put off."""

    def __init__(self, layers: Iterable[nn.Layer]) -> None:
        """``layers`` are searched with all their sublayers."""
        found = {id(each): each for layer in layers for each in layer.sublayers(include_self=True)}
        self._layers = [layer for layer in found.values() if _input_grad(layer) is not None]
        self._pending: Optional[Pending] = None  # where weight halves go at present; None: computed at once
        # A tensor that needs a gradient, so that a layer whose input needs none takes part in the backward.
        self._asks = paddle.zeros([1])
        self._asks.stop_gradient = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let the layers run as two halves within the block."""
        ours = [layer for layer in self._layers if "forward" not in vars(layer)]  # users replace that of one object
        for layer in ours:
            layer.forward = self._halved(layer, layer.forward)
        try:
            yield
        finally:
            for layer in ours:
                del layer.forward  # the one of its class shows again

    @contextlib.contextmanager
    def deferred(self) -> Iterator[Pending]:
        """Put off the weight gradients of a backward that runs within the block."""
        self._pending = Pending()
        try:
            yield self._pending
        finally:
            self._pending = None

    def take(self, output: Tensor, grad: Tensor) -> None:
        """A weight half has got its gradient."""
        if self._pending is not None:
            self._pending.add(output, grad)
        else:
            paddle.autograd.backward([output], [grad])

    def _halved(self, layer: nn.Layer, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        halves = _Layer(layer, forward, _input_grad(layer), self.take)

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args or kwargs or not paddle.is_grad_enabled() or not _waits(layer):
                return forward(x, *args, **kwargs)
            return _Halves.apply(halves, self._asks, x)

        return run


class _Layer(NamedTuple):
    """A layer that runs as two halves."""

    layer: nn.Layer
    forward: Callable[[Tensor], Tensor]
    input_grad: Any  # an InputGrad
    take: Callable[[Tensor, Tensor], None]  # of the weight half


class _Halves(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, halves: _Layer, asks: Tensor, x: Tensor) -> Tensor:
        with paddle.enable_grad():
            output = halves.forward(x.detach())
        ctx.halves, ctx.output, ctx.weight = halves, output, halves.layer.weight
        ctx.form = None if x.stop_gradient else (list(x.shape), x.dtype)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Optional[Tensor]]:
        halves = ctx.halves
        halves.take(ctx.output, grad)
        del ctx.output
        if ctx.form is None:
            return None, None
        shape, dtype = ctx.form
        with paddle.amp.auto_cast(enable=False) if auto_casts() else _NOTHING:  # in the dtype of the layer's output
            input_grad = halves.input_grad(halves.layer, ctx.weight, grad, shape)
        return None, input_grad if input_grad.dtype == dtype else input_grad.astype(dtype)


# ---------------------------------------------------------------------------------------------- gradients of the input


def _input_grad(layer: nn.Layer) -> Optional[InputGrad]:
    """How the gradient of the input of ``layer`` follows from that of its output; None where that is not known."""
    forward = type(layer).forward
    if forward is nn.Linear.forward:
        return _of_linear
    if forward in _CONVOLUTIONS and conv_options(layer) is not None:
        return _CONVOLUTIONS[forward]
    return None


def _waits(layer: nn.Layer) -> bool:
    """Whether the weights that ``layer`` is about to use are its own, some of them trained.

    A weight that was computed, or stands in for another one, has a graph of its own, which the main backward has to
    reach.  A hook may change it for one call.
    """
    used = [tensor for tensor in (layer.weight, layer.bias) if tensor is not None]
    own = {id(param) for param in layer.parameters(include_sublayers=False)}
    if has_forward_hooks(layer) or not all(id(tensor) in own and tensor.is_leaf for tensor in used):
        return False
    return not all(tensor.stop_gradient for tensor in used)


def _as(weight: Tensor, grad: Tensor) -> Tensor:
    weight = weight.detach()
    return weight if weight.dtype == grad.dtype else weight.astype(grad.dtype)


def _of_linear(layer: nn.Layer, weight: Tensor, grad: Tensor, shape: list[int]) -> Tensor:
    return paddle.matmul(grad, _as(weight, grad), transpose_y=True)


def _of_conv(transposed: Callable[..., Tensor]) -> InputGrad:
    """The gradient of a convolution is the transposed convolution with the same weight."""

    def grad_of(layer: nn.Layer, weight: Tensor, grad: Tensor, shape: list[int]) -> Tensor:
        options = conv_options(layer) or {}
        spatial = shape[1:-1] if options["data_format"].endswith("C") else shape[2:]
        return transposed(grad, _as(weight, grad), output_size=spatial, **options)

    return grad_of


def _of_transposed(conv: Callable[..., Tensor]) -> InputGrad:
    """And the other way round."""
    return lambda layer, weight, grad, shape: conv(grad, _as(weight, grad), **(conv_options(layer) or {}))


_CONVOLUTIONS: dict[Any, InputGrad] = {
    nn.Conv1D.forward: _of_conv(F.conv1d_transpose),
    nn.Conv2D.forward: _of_conv(F.conv2d_transpose),
    nn.Conv3D.forward: _of_conv(F.conv3d_transpose),
    nn.Conv1DTranspose.forward: _of_transposed(F.conv1d),
    nn.Conv2DTranspose.forward: _of_transposed(F.conv2d),
    nn.Conv3DTranspose.forward: _of_transposed(F.conv3d),
}

"""What stands in the list of a pipeline model: descriptions of layers that build nothing until their stage is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

from ..errors import UsageError

__all__ = [
    "DescTypeError",
    "LayerDesc",
    "SharedLayerDesc",
    "check_entries",
    "class_name",
    "is_desc",
    "is_shared_desc",
    "shared_attrs",
]


class DescTypeError(UsageError, TypeError):
    """Something in the list of layers, or in a description of one, that is of a wrong type."""


class LayerDesc:
    """All that is needed to build one layer: ``LayerDesc(nn.Linear, 8, 4, bias_attr=False)``.

    ``layer_func`` is the layer's class, ``inputs`` and ``kwargs`` are what it will be called with.  Nothing is
    allocated before :meth:`build_layer`, which the rank that holds the layer calls; the others do so under
    ``paddle.LazyGuard`` to learn names and sizes, which allocates nothing.
    """

    def __init__(self, layer_func: Any, *inputs: Any, **kwargs: Any) -> None:
        """Keep what is needed to build the layer; :class:`DescTypeError` unless ``layer_func`` is a Layer class."""
        from paddle import nn

        if not (isinstance(layer_func, type) and issubclass(layer_func, nn.Layer)):
            raise DescTypeError(
                f"{type(self).__name__} needs a class derived from paddle.nn.Layer, got {_what(layer_func)}; "
                f"functions and layers that are built already stand in the list as they are"
            )
        self.layer_func = layer_func
        self.inputs = inputs
        self.kwargs = kwargs

    def build_layer(self, **extra_kwargs: Any) -> Any:
        """Build the layer; ``extra_kwargs`` override the keyword arguments of the description."""
        return self.layer_func(*self.inputs, **{**self.kwargs, **extra_kwargs})

    def __repr__(self) -> str:
        """As the call would be written: ``Linear(8, 4, bias_attr=False)``."""
        arguments = [str(value) for value in self.inputs] + [f"{name}={value}" for name, value in self.kwargs.items()]
        return f"{self.layer_func.__name__}({', '.join(arguments)})"


class SharedLayerDesc(LayerDesc):
    """A layer that shares weights with all other layers of the same ``key``, on whatever stages they stand.

    ``shared_weight_attr`` names the attribute that is shared, or a list of them; dotted names reach into sublayers
    (``"linear.weight"``).  ``forward_func(layer, x)`` replaces the layer's own forward where it stands, as a head that
    multiplies by the embedding's weight does.
    """

    def __init__(
        self,
        key: str,
        layer_func: Any,
        forward_func: Optional[Callable[..., Any]] = None,
        shared_weight_attr: Union[str, Sequence[str]] = "weight",
        *inputs: Any,
        **kwargs: Any,
    ) -> None:
        """As :class:`LayerDesc`, with the key, the forward and the attributes first."""
        super().__init__(layer_func, *inputs, **kwargs)
        if forward_func is not None and not callable(forward_func):
            raise DescTypeError(
                f"forward_func of shared layer {key!r} is a function (layer, x), got {_what(forward_func)}"
            )
        self.layer_name = key
        self.forward_func = forward_func
        self.shared_weight_attr = shared_weight_attr
        shared_attrs(self)  # refuses wrong types here, where the mistake is


def is_desc(entry: object) -> bool:
    """Whether an entry of the list is a description, of this package or of Paddle."""
    return isinstance(entry, (LayerDesc, *_paddle_classes("LayerDesc")))


def is_shared_desc(entry: object) -> bool:
    """Whether an entry is a description of a shared layer, of this package or of Paddle."""
    return isinstance(entry, (SharedLayerDesc, *_paddle_classes("SharedLayerDesc")))


def shared_attrs(desc: Any) -> tuple[str, ...]:
    """Names of the attributes that a shared description ties; a single name and a list of names are both in use."""
    attrs = desc.shared_weight_attr
    names = (attrs,) if isinstance(attrs, str) else tuple(attrs) if isinstance(attrs, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise DescTypeError(
            f"shared_weight_attr of shared layer {desc.layer_name!r} is a name or a list of names, got {attrs!r}"
        )
    return names


def class_name(entry: Any) -> str:
    """Name that ``layer:`` patterns and class weights see: of the layer's class, built or not, or of the function."""
    if is_desc(entry):
        entry = entry.layer_func if hasattr(entry, "layer_func") else entry.layer_spec.layer  # Paddle's other form
    if isinstance(entry, tuple):  # (module, name) of that form
        return str(entry[-1])
    return str(getattr(entry, "__name__", type(entry).__name__))


def check_entries(entries: Sequence[Any]) -> None:
    """Raise :class:`DescTypeError`, naming the position and the type, for what cannot stand in the list of layers."""
    for index, entry in enumerate(entries):
        if isinstance(entry, type):
            raise DescTypeError(
                f"layer {index} of the list is the class {entry.__name__}; write LayerDesc({entry.__name__}, ...)"
            )
        if not is_desc(entry) and not callable(entry):
            raise DescTypeError(
                f"layer {index} of the list is {_what(entry)}; expected a LayerDesc, a layer or a function of its input"
            )


def _paddle_classes(name: str) -> tuple[Any, ...]:
    """Paddle's own classes of this name.  Imported late: whoever only reads the module needs no Paddle."""
    from paddle.distributed.fleet import meta_parallel

    return (getattr(meta_parallel, name),)


def _what(value: object) -> str:
    kind = "class" if isinstance(value, type) else type(value).__name__
    name = getattr(value, "__name__", None) or repr(value)
    return f"{kind} {name}"

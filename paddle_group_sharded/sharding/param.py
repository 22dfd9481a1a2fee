"""One parameter of a wrapped model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .group import ParamGroup

__all__ = ["ShardedParam"]


@dataclass(eq=False)
class ShardedParam:
    """A full parameter, where it lies, and what the optimizer has seen of it."""

    name: str  # structured name in the user's model; the first one of a tied parameter
    tensor: Any  # the user's own Parameter; its memory is a view of the group's full buffer, or released
    group: ParamGroup
    index: int  # of its slot in the group's layout
    optimized: bool  # the optimizer was given it
    numel: int  # elements of the full parameter
    reached: bool = False  # has had a gradient on this rank since clear_grad(set_to_zero=False)

    @property
    def expects_grad(self) -> bool:
        """Whether a gradient of it is reduced; may change between steps, on all ranks alike."""
        return self.optimized and not self.tensor.stop_gradient

    def __repr__(self) -> str:
        """Name and shape, as they stand in messages."""
        return f"{self.name!r} {list(self.tensor.shape)}"

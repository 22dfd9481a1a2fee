"""Members of Paddle's ``PipelineParallel`` that existing code reads, beside the two calls that train and evaluate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .layer import PipelineLayer

__all__ = ["ParallelMembers"]


class ParallelMembers:
    """Names of Paddle's class, each a line over the :class:`PipelineLayer`."""

    _layers: PipelineLayer
    plan: Any

    @property
    def num_stages(self) -> int:
        """Ranks of one pipeline."""
        return self._layers.grid.num_stages

    @property
    def stage_id(self) -> int:
        """This rank's number in its pipeline."""
        return self._layers.grid.stage

    def is_pipeline_first_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this rank holds the first layers."""
        return self.stage_id == 0

    def is_pipeline_last_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this rank holds the last layers."""
        return self.stage_id == self.num_stages - 1

    def set_virtual_pipeline_rank(self, rank: int) -> None:
        """Nothing to set: plans say which chunk each action is of."""

    def get_static_scheduler(self) -> str:
        """The plan of a step as text."""
        return str(self.plan)

    def parameters(self, include_sublayers: bool = True) -> list[Any]:
        """This rank's parameters."""
        return list(self._layers.parameters(include_sublayers))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """As those of the :class:`PipelineLayer`, without a prefix of the wrapper's."""
        yield from self._layers.named_parameters(*args, **kwargs)

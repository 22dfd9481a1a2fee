"""What fleet's strategy, or the arguments in its place, say about how a pipeline is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from ..errors import UsageError
from .action import Plan
from .grid import Grid
from .schedules import Schedule

__all__ = ["Settings"]

Choice = Union[str, Path, Plan, Schedule, None]


class Settings(NamedTuple):
    """Number and size of micro-batches, and the schedule."""

    micro_batches: int
    micro_batch_size: int
    schedule: Choice

    @classmethod
    def of(
        cls, grid: Grid, hcg: Optional[Any], strategy: Optional[Any], micro_batches: Optional[int], schedule: Choice
    ) -> Settings:
        """Arguments count before the strategy; :class:`UsageError` for what does not fit the grid."""
        if hcg is not None and int(hcg.get_pipe_parallel_world_size()) != grid.num_stages:
            raise UsageError(
                f"hcg has {hcg.get_pipe_parallel_world_size()} pipeline stages, the PipelineLayer {grid.num_stages}; "
                f"build the layer with topology=hcg.topology()"
            )
        configs = {} if strategy is None else strategy.pipeline_configs
        count = configs.get("accumulate_steps", 1) if micro_batches is None else micro_batches
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UsageError(f"the number of micro-batches is a whole number from 1 on; got {count!r}")
        # Paddle's "1F1B" stands for the interleaved schedule too, where there are several chunks.
        mode = configs.get("schedule_mode", "1F1B")
        chosen = schedule if schedule is not None or mode == "1F1B" else mode
        return cls(count, int(configs.get("micro_batch_size", 1)), chosen)

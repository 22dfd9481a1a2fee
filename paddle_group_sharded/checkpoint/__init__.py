"""Checkpoints that load anywhere: any level, any number of ranks and stages, plain Paddle, and back.

*tensor*: a parameter, a buffer or an optimizer state under a structured name; *piece*: an interval of its flattened
elements, the unit that is written; *holding*: the piece of one tensor that a rank has in memory; *manifest*: the file
that says where every piece lies, written last.  ``docs/checkpoint_format.md`` describes the files.
"""

from .load import load_checkpoint
from .manager import CheckpointManager
from .match import LoadReport
from .save import save_checkpoint

__all__ = ["CheckpointManager", "LoadReport", "load_checkpoint", "save_checkpoint"]

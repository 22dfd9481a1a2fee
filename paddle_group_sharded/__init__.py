"""Group sharding (ZeRO 1, 2, 3) and the LayerDesc pipeline for PaddlePaddle, on every backend that Paddle has."""

from .api import group_sharded_parallel, load_group_sharded_model, save_group_sharded_model, unwrap
from .checkpoint import CheckpointManager, LoadReport, load_checkpoint, save_checkpoint
from .errors import CheckpointError, CommError, GroupShardedError, StateError, UsageError
from .pipeline.desc import LayerDesc, SharedLayerDesc
from .pipeline.layer import PipelineLayer
from .pipeline.parallel import PipelineParallel, pipeline_parallel
from .plan import plan

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "CommError",
    "GroupShardedError",
    "LayerDesc",
    "LoadReport",
    "PipelineLayer",
    "PipelineParallel",
    "SharedLayerDesc",
    "StateError",
    "UsageError",
    "__version__",
    "group_sharded_parallel",
    "load_checkpoint",
    "load_group_sharded_model",
    "pipeline_parallel",
    "plan",
    "save_checkpoint",
    "save_group_sharded_model",
    "unwrap",
]

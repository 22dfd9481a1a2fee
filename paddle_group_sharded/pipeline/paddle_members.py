"""Members that code written for Paddle's own ``PipelineLayer`` reads; everything here is said by another name too."""

from __future__ import annotations

from typing import Any, Optional

from ..comm import Comm
from .chunk import Chunk
from .grid import Grid
from .layer_files import LayerFiles
from .segment import Segmentation
from .shared import SharedWeights

__all__ = ["PaddleMembers"]


class PaddleMembers:
    """Paddle's names for what :class:`.layer.PipelineLayer` has."""

    grid: Grid
    segmentation: Segmentation
    shared: SharedWeights
    descs: list[Any]
    chunks: list[Chunk]
    loss_fns: list[Any]
    topology: Optional[Any]
    recompute_interval: int
    base_seed: int
    comm: Comm
    _own: dict[int, Any]

    def get_stage_from_index(self, layer_idx: int) -> int:
        """The rank of the pipeline that holds a layer."""
        return self.segmentation.rank_of_layer(layer_idx)

    def get_num_virtual_stages(self) -> int:
        """Chunks per rank."""
        return self.segmentation.num_chunks

    def get_model_chunks(self) -> Optional[list[Chunk]]:
        """This rank's chunks, or None where each rank has one."""
        return None if self.segmentation.num_chunks == 1 else self.chunks

    def save_state_dict(self, path: str) -> None:
        """Write one file per layer into the folder ``path``, under Paddle's names; collective over all ranks.

        The first replica writes.  Files appear under their names when all ranks have written theirs; files of the same
        layers from a save with other chunks are then removed.  Raises :class:`CheckpointError` on every rank where one
        cannot write.
        """
        self._layer_files().save(path)

    def set_state_dir(self, path: str) -> None:
        """Read what :meth:`save_state_dict`, or Paddle's, has written at any number of stages and chunks; collective.

        Copies of shared weights are equal afterwards.  Raises :class:`CheckpointError` on every rank, naming the file,
        where one is missing, damaged, of another model or of another save; nothing has been changed then.
        """
        self._layer_files().load(path)

    def allreduce_shared_weight_gradients(self) -> None:
        """``shared.reduce_gradients()``."""
        self.shared.reduce_gradients()

    def _layer_files(self) -> LayerFiles:
        return LayerFiles(self._own, self.shared, self.segmentation, self.grid, self.comm)

    def _synchronize_shared_weights(self) -> None:
        self.shared.synchronize()

    @property
    def run_function(self) -> list[Any]:
        """What this rank runs, layer by layer."""
        return [layer for chunk in self.chunks for layer in chunk.layers]

    @property
    def segment_parts(self) -> list[int]:
        """The bounds of the virtual stages."""
        return list(self.segmentation.bounds)

    @property
    def global_rank(self) -> int:
        """This rank's number in the launch."""
        return self.grid.global_rank

    @property
    def _layers_desc(self) -> list[Any]:
        return self.descs

    @property
    def _num_layers(self) -> int:
        return self.segmentation.num_layers

    @property
    def _num_stages(self) -> int:
        return self.segmentation.num_stages

    @property
    def _stage_id(self) -> int:
        return self.grid.stage

    @property
    def _num_virtual_pipeline_stages(self) -> int:
        return self.segmentation.num_chunks

    @property
    def _total_stages_with_virtual_stages(self) -> int:
        return self.segmentation.num_virtual_stages

    @property
    def _loss_fn(self) -> list[Any]:
        return self.loss_fns

    @property
    def _topo(self) -> Optional[Any]:
        return self.topology

    @property
    def _recompute_interval(self) -> int:
        return self.recompute_interval

    @property
    def _base_seed(self) -> int:
        return self.base_seed

    @property
    def _model_chunks(self) -> list[Chunk]:
        return self.chunks

    @property
    def _start_poss(self) -> list[int]:
        return [chunk.start for chunk in self.chunks]

    @property
    def _end_poss(self) -> list[int]:
        return [chunk.stop for chunk in self.chunks]

    @property
    def _start_pos(self) -> int:
        return self.chunks[0].start

    @property
    def _end_pos(self) -> int:
        return self.chunks[-1].stop

"""From what a user passes to a :class:`.subject.Subject`, the ranks that belong together, and the inner optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from ..errors import UsageError
from ..pipeline.layer import PipelineLayer
from ..pipeline.optimizer import PipelineOptimizer
from ..pipeline.parallel import PipelineParallel
from ..sharding.model import ShardedModel
from ..sharding.optimizer import ShardedOptimizer
from ..sharding.rules import unwrap_optimizer
from ..sharding.whole import plain_state
from .plain import PlainSubject
from .sharded import ShardedSubject
from .subject import Names, Subject, live_state
from .team import Team, world_team

__all__ = ["check_optimizers", "gives_optimizer", "inner_optimizer", "pipeline_of", "subject_of", "team_of"]


def team_of(model: Any) -> Team:
    """All ranks that hold a part or a replica of ``model``."""
    if isinstance(model, ShardedModel):
        return Team((model._engine.comm, model._engine.dp_comm))
    stages = pipeline_of(model)
    return world_team() if stages is None else Team((stages.comm,))


def pipeline_of(model: Any) -> Optional[PipelineLayer]:
    """This rank's part of a pipeline, where ``model`` is or wraps one."""
    if isinstance(model, PipelineParallel):
        layers: PipelineLayer = model._layers
        return layers
    return model if isinstance(model, PipelineLayer) else None


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer of ``paddle.optimizer`` inside of all wrappers.

    None for None, and on a rank of a pipeline that has no parameters.
    """
    if isinstance(optimizer, (ShardedOptimizer, PipelineOptimizer)):
        return optimizer._optim
    return None if optimizer is None else unwrap_optimizer(optimizer)


def subject_of(model: Any, optimizer: Optional[Any]) -> Subject:
    """``model`` and ``optimizer`` as named parts; :class:`UsageError` where they do not go together."""
    if isinstance(model, ShardedModel):
        return ShardedSubject(model._engine, plain_state(model._names_root), optimizer)
    if not hasattr(model, "state_dict"):
        raise UsageError(f"model must be a paddle.nn.Layer or have a state_dict(), got {type(model).__name__}")
    if isinstance(optimizer, ShardedOptimizer):
        raise UsageError("optimizer has been through group_sharded_parallel but model has not; pass the wrapped model")
    inner = inner_optimizer(optimizer)
    stages = pipeline_of(model)
    if stages is None:
        return PlainSubject(Names(live_state(model)), inner)
    # A shared weight is saved once, under the name of its first owner, whichever stages hold a copy of it.
    return PlainSubject(Names(stages.layer_state_dict(), stages.shared.aliases), inner)


def gives_optimizer(subject: Subject, optimizer: Optional[Any]) -> Optional[bool]:
    """Whether this rank gives an optimizer; None where it gives none and has no parameter that one could train."""
    if inner_optimizer(optimizer) is not None:
        return True
    trainable = (
        hasattr(tensor, "optimize_attr") and not tensor.stop_gradient for tensor in subject.names.tensors.values()
    )
    return False if any(trainable) else None


def check_optimizers(given: Sequence[Optional[bool]]) -> bool:
    """Whether there is an optimizer, from what :func:`gives_optimizer` says on each rank.

    :class:`UsageError` where ranks differ: the states of some parameters would silently be left out.
    """
    without = [rank for rank, each in enumerate(given) if each is False]
    having = [rank for rank, each in enumerate(given) if each]
    if without and having:
        raise UsageError(
            f"rank {without[0]} gives no optimizer, but has parameters to train, and rank {having[0]} gives one; give "
            "the optimizer on every rank that has such parameters, or on none"
        )
    return bool(having)

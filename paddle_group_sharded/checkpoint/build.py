"""From what a user passes to a :class:`.subject.Subject` and the ranks that belong together."""

from __future__ import annotations

from typing import Any, Optional

from ..errors import UsageError
from ..sharding.model import ShardedModel
from ..sharding.optimizer import ShardedOptimizer
from ..sharding.whole import plain_state
from .plain import PlainSubject
from .sharded import ShardedSubject
from .subject import Subject
from .team import Team, world_team

__all__ = ["subject_of", "team_of"]


def team_of(model: Any) -> Team:
    """All ranks that hold a part or a replica of ``model``."""
    if isinstance(model, ShardedModel):
        return Team((model._engine.comm, model._engine.dp_comm))
    return world_team()


def subject_of(model: Any, optimizer: Optional[Any]) -> Subject:
    """``model`` and ``optimizer`` as named parts; :class:`UsageError` where they do not go together."""
    if isinstance(model, ShardedModel):
        return ShardedSubject(model._engine, plain_state(model._names_root), optimizer)
    if not hasattr(model, "state_dict"):
        raise UsageError(f"model must be a paddle.nn.Layer or have a state_dict(), got {type(model).__name__}")
    if isinstance(optimizer, ShardedOptimizer):
        raise UsageError("optimizer has been through group_sharded_parallel but model has not; pass the wrapped model")
    return PlainSubject(model, optimizer)

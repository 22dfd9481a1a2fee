"""What one rank could write: holdings of the model and the optimizer, and the plain values beside them."""

from __future__ import annotations

import json
import zlib
from typing import Any, NamedTuple, Optional

import numpy as np

from ..errors import UsageError
from ..paddle_compat import lr_scheduler
from .build import gives_optimizer, inner_optimizer, pipeline_of, subject_of
from .data import pack
from .holding import Holding, whole_holding
from .random_state import get_random_states

__all__ = ["Extras", "Parts", "collect"]


class Extras(NamedTuple):
    """What is saved and loaded beside a model and an optimizer."""

    scaler: Optional[Any] = None
    scheduler: Optional[Any] = None  # not the optimizer's own
    extra: Any = None


class Parts(NamedTuple):
    """All that one rank could write, and what rank 0 puts into the manifest."""

    holdings: list[Holding]
    rank_holdings: list[Holding]  # what only this rank has
    aliases: dict[str, str]
    parameter_names: dict[str, str]
    data: Any
    extra_checksum: Optional[int]  # None where no extra was given
    level: str
    optimizer: Optional[bool]  # see gives_optimizer()


def collect(rank: int, model: Any, optimizer: Optional[Any], extras: Extras) -> Parts:
    """Look at everything and copy nothing.  :class:`UsageError` for what cannot be saved."""
    subject = subject_of(model, optimizer)
    arrays: dict[str, Any] = {}
    data = {"extra": pack(extras.extra, arrays)}
    checksum = None if extras.extra is None else _checksum(data["extra"], arrays)
    data.update(pack(_settings(model, optimizer, extras), arrays, "the state"))
    holdings = [*subject.model(), *subject.states()]
    if rank == 0:
        holdings += [whole_holding(("data", number), value, own=True) for number, value in arrays.items()]
    random_states = np.frombuffer(json.dumps(get_random_states()).encode("ascii"), np.uint8)
    return Parts(
        holdings=holdings,
        rank_holdings=[whole_holding(("rank", str(rank), "random"), random_states)],
        aliases=subject.names.aliases,
        parameter_names=subject.names.parameter_names,
        data=data,
        extra_checksum=checksum,
        level=subject.level,
        optimizer=gives_optimizer(subject, optimizer),
    )


def _settings(model: Any, optimizer: Optional[Any], extras: Extras) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    stages = pipeline_of(model)
    if stages is not None:
        settings["random_step"] = stages.random_step
        settings["base_seed"] = stages.base_seed
    inner = inner_optimizer(optimizer)
    if inner is not None:
        own = lr_scheduler(inner)
        settings["optimizer"] = type(inner).__name__
        if own is None:
            settings["learning_rate"] = float(inner.get_lr())
        else:
            settings["scheduler"] = own.state_dict()
            if extras.scheduler is own:
                extras = extras._replace(scheduler=None)
    for name, part in (("lr_scheduler", extras.scheduler), ("scaler", extras.scaler)):
        if part is not None:
            if not hasattr(part, "state_dict"):
                raise UsageError(f"{name} must have a state_dict(), got {type(part).__name__}")
            settings[name] = part.state_dict()
    return settings


def _checksum(packed: Any, arrays: dict[str, Any]) -> int:
    checksum = zlib.crc32(json.dumps(packed).encode("ascii"))
    for number, value in arrays.items():
        checksum = zlib.crc32(whole_holding(("data", number), value).array().tobytes(), checksum)
    return checksum

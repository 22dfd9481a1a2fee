"""``save_checkpoint``: every rank writes what it holds, then the manifest makes it count."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

import paddle

from ..errors import UsageError
from .assign import Offer, assign
from .background import IN_FLIGHT, PendingSave
from .build import check_optimizers, team_of
from .collect import Extras, Parts, collect
from .holding import Holding
from .job import Piece, SaveJob, compose
from .manifest import Key, Manifest, key_text
from .team import Team

__all__ = ["save_checkpoint", "write_checkpoint"]

_logger = logging.getLogger(__name__)

_LABEL = "save_checkpoint"
_SAVE_BYTES = 8
_OF_THE_OPTIMIZER = ("optimizer", "learning_rate", "scheduler")


def save_checkpoint(
    path: Any,
    model: Any,
    optimizer: Optional[Any] = None,
    scaler: Optional[Any] = None,
    lr_scheduler: Optional[Any] = None,
    extra: Any = None,
    *,
    async_save: bool = False,
) -> PendingSave:
    """Write a checkpoint that loads at any level, number of ranks and number of stages.  Collective: call on all ranks.

    Args:
        path: a folder, made if it does not exist.  A complete checkpoint in it stays until the new one is complete,
            whatever ends the processes, and is then removed.
        model: a plain layer, what :func:`.group_sharded_parallel` returned, or one rank's part of a pipeline.
        optimizer: the one of ``model``, or None on every rank; a rank without parameters to train may always give None.
        scaler: a ``paddle.amp.GradScaler`` or None.
        lr_scheduler: a scheduler that is not the optimizer's own, which is saved with it.
        extra: numbers, texts, None, arrays, tensors, and lists, tuples and dicts of those: the position in the data,
            the step.  That of rank 0 counts; the other ranks give an equal one, or None.
        async_save: return as soon as everything is copied to host memory, and write while training goes on.  One save
            at a time: the next call waits for it, and raises what went wrong.

    Returns:
        The save, which is over unless ``async_save`` is set; its ``wait()`` is collective.

    Raises:
        UsageError: on every rank, for arguments that do not go together.
        CheckpointError: on every rank, naming the file, for what the system refuses; an earlier checkpoint is then as
            it was.
        CommError: on every rank, where only some of them call.

    Saved are parameters, buffers, optimizer states, fp32 masters, rates, schedulers, scaler, and each rank's random
    states.  Replicas are written once.  Training goes on as if nothing had happened.  Memory grows by one tensor at
    most where tensors are on a device, else not at all; with ``async_save`` by a copy of what this rank writes.

    Example:
        >>> import paddle, tempfile
        >>> from paddle_group_sharded import load_checkpoint, save_checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> model = paddle.nn.Linear(4, 2)
        >>> _ = save_checkpoint(folder, model, extra={"step": 7})
        >>> load_checkpoint(folder, paddle.nn.Linear(4, 2))
        {'step': 7}
    """
    return write_checkpoint(path, model, optimizer, Extras(scaler, lr_scheduler, extra), async_save=async_save)


def write_checkpoint(
    path: Any,
    model: Any,
    optimizer: Optional[Any],
    extras: Extras,
    *,
    async_save: bool,
    info: Optional[dict[str, Any]] = None,
    after: Callable[[], None] = lambda: None,
) -> PendingSave:
    """:func:`save_checkpoint` with more ``info`` for people; rank 0 runs ``after`` when the checkpoint is complete."""
    IN_FLIGHT.settle()
    team = team_of(model)
    folder, parts = team.together(lambda: (_folder(path), collect(team.rank, model, optimizer, extras)), _LABEL)
    plan = _plan(team, folder.name, parts)
    manifest = Manifest(
        save=plan.save,
        world_size=team.world_size,
        tensors={},
        aliases=plan.aliases,
        parameter_names=plan.parameter_names,
        data=plan.data,
        info={"level": parts.level, "paddle": paddle.version.full_version, **(info or {})},
    )
    job = SaveJob(folder, plan.save, team.rank, plan.pieces)
    pending = PendingSave(team, job, lambda reports: compose(plan.shapes, reports, manifest), after)
    try:
        team.together(lambda: job.open() if team.rank == 0 else None, _LABEL)
        if async_save:
            team.together(job.hold_copies, _LABEL)
    except BaseException:
        job.close()
        raise
    if async_save:
        IN_FLIGHT.start(pending)
    else:
        pending.run()
    return pending


def _folder(path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"path must be the path of a folder, got {type(path).__name__}")
    return Path(path).absolute()


class _Plan(NamedTuple):
    save: str
    shapes: dict[Key, tuple[str, tuple[int, ...]]]  # dtype and shape of every tensor
    pieces: list[Piece]  # of this rank
    aliases: dict[str, str]
    parameter_names: dict[str, str]
    data: Any


class _Said(NamedTuple):
    """What every rank tells the others."""

    save: str
    folder: str
    offers: list[Offer]
    aliases: dict[str, str]
    parameter_names: dict[str, str]
    data: Any
    extra_checksum: Optional[int]
    optimizer: Optional[bool]


def _plan(team: Team, folder: str, parts: Parts) -> _Plan:
    """Let all ranks know what each holds, and decide who writes what.  Collective; raises on every rank alike."""
    offers = team.together(lambda: [holding.offer() for holding in parts.holdings], _LABEL)
    mine = _Said(
        save=os.urandom(_SAVE_BYTES).hex(),
        folder=folder,
        offers=offers,
        aliases=parts.aliases,
        parameter_names=parts.parameter_names,
        data=parts.data,
        extra_checksum=parts.extra_checksum,
        optimizer=parts.optimizer,
    )
    said: list[_Said] = team.exchange(mine, _LABEL)
    for rank, every in enumerate(said):
        if every.folder != said[0].folder:
            raise UsageError(
                f"rank 0 saves into {said[0].folder!r} and rank {rank} into {every.folder!r}; give the same path on "
                "every rank"
            )
    check_optimizers([every.optimizer for every in said])
    data = _common_data(said)
    chosen = assign([every.offers for every in said])
    pieces = [_piece(parts.holdings[number]) for number in chosen[team.rank]]
    drifted = _drifted(said)
    if drifted and team.rank == 0:
        _logger.warning(
            "ranks hold different values of %s%s; those of the first rank count, and the others' are kept for the case "
            "that as many ranks load them",
            drifted[0],
            f" and of {len(drifted) - 1} more" if len(drifted) > 1 else "",
        )
    pieces += [_piece(holding) for holding in [*parts.rank_holdings, *_differing(team.rank, parts, said)]]
    aliases: dict[str, str] = {}
    parameter_names: dict[str, str] = {}
    for every in said:
        aliases.update(every.aliases)
        for name, parameter_name in every.parameter_names.items():
            parameter_names.setdefault(name, parameter_name)
    stored = {offer.key[1] for every in said for offer in every.offers if offer.key[0] == "model"}
    aliases = {alias: name for alias, name in aliases.items() if alias not in stored}
    shapes = {offer.key: (offer.dtype, offer.shape) for every in said for offer in every.offers}
    return _Plan(said[0].save, shapes, pieces, aliases, parameter_names, data)


def _common_data(said: Sequence[_Said]) -> Any:
    """Rank 0's values; what other ranks give as ``extra`` must be equal to what it gives."""
    first = said[0].extra_checksum
    for rank, every in enumerate(said):
        if every.extra_checksum not in (None, first):
            raise UsageError(
                f"extra differs between rank 0 and rank {rank}; give the same on every rank, for example a list with "
                "an entry for each rank"
            )
    data = dict(said[0].data)
    for every in said:
        for name in _OF_THE_OPTIMIZER:  # the first rank of a pipeline may have no parameters, and so no optimizer
            if name in every.data:
                data.setdefault(name, every.data[name])
    return data


def _first_checksums(said: Sequence[_Said]) -> dict[tuple[Key, int, int], int]:
    """Of each interval, by its key and its bounds, the checksum of the first rank that holds it."""
    first: dict[tuple[Key, int, int], int] = {}
    for every in said:
        for offer in every.offers:
            first.setdefault((offer.key, offer.start, offer.stop), offer.checksum)
    return first


def _drifted(said: Sequence[_Said]) -> list[str]:
    """Tensors that should be the same on all ranks that hold them, and are not."""
    first = _first_checksums(said)
    offers = (offer for every in said for offer in every.offers)
    other = (offer for offer in offers if not offer.own and offer.checksum != first[offer.key, offer.start, offer.stop])
    return list(dict.fromkeys(key_text(offer.key) for offer in other))


def _differing(rank: int, parts: Parts, said: Sequence[_Said]) -> list[Holding]:
    """Values of this rank that are not what will be saved for all: they are kept beside it, for this rank alone."""
    first = _first_checksums(said)
    return [
        replace(holding, key=("rank", str(rank), "/".join(holding.key)))
        for holding, offer in zip(parts.holdings, said[rank].offers)
        if holding.is_whole and offer.checksum != first[offer.key, offer.start, offer.stop]
    ]


def _piece(holding: Holding) -> Piece:
    return Piece(holding.key, holding.dtype, holding.shape, holding.start, holding.stop, holding.blob())

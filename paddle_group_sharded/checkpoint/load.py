"""``load_checkpoint``: look at everything, agree, and only then write into memory."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple, Optional, Union, overload

from ..errors import CheckpointError, UsageError
from ..paddle_compat import lr_scheduler as scheduler_of
from ..pipeline.layer import PipelineLayer
from .background import IN_FLIGHT
from .build import check_optimizers, gives_optimizer, inner_optimizer, pipeline_of, subject_of, team_of
from .collect import Extras
from .holding import Holding
from .manifest import Manifest, TensorEntry
from .match import MASTER, LoadReport, Match, match_model, match_states
from .random_state import set_random_states
from .read import pieces_of, read_data, read_manifest, read_whole, verify_pieces
from .subject import Subject
from .team import Team
from .tensor_file import TensorFiles

__all__ = ["Loaded", "load_checkpoint", "read_checkpoint"]

_LABEL = "load_checkpoint"

_logger = logging.getLogger(__name__)


@overload
def load_checkpoint(
    path: Any,
    model: Any,
    optimizer: Optional[Any] = ...,
    scaler: Optional[Any] = ...,
    lr_scheduler: Optional[Any] = ...,
    *,
    strict: Literal[True] = ...,
) -> Any: ...
@overload
def load_checkpoint(
    path: Any,
    model: Any,
    optimizer: Optional[Any] = ...,
    scaler: Optional[Any] = ...,
    lr_scheduler: Optional[Any] = ...,
    *,
    strict: Literal[False],
) -> tuple[Any, LoadReport]: ...


def load_checkpoint(
    path: Any,
    model: Any,
    optimizer: Optional[Any] = None,
    scaler: Optional[Any] = None,
    lr_scheduler: Optional[Any] = None,
    *,
    strict: bool = True,
) -> Union[Any, tuple[Any, LoadReport]]:
    """Read what :func:`.save_checkpoint` has written, at whatever level and number of ranks.  Collective.

    Args:
        path: the folder.
        model: a plain layer, what :func:`.group_sharded_parallel` returned, or one rank's part of a pipeline.
        optimizer: the one of ``model``; None, on every rank that has parameters to train, reads weights only.
        scaler: a ``paddle.amp.GradScaler``, or None to leave it out.
        lr_scheduler: a scheduler that is not the optimizer's own, or None.
        strict: whether everything has to fit.  If not, what does not is left as it was.

    Returns:
        ``extra`` of the save; with ``strict=False`` a pair of it and a :class:`.LoadReport`.

    Raises:
        UsageError: on every rank, for arguments that do not go together.
        CheckpointError: on every rank, where the checkpoint does not fit, naming everything that differs at once, or is
            incomplete, damaged or of another version, naming the file.  Nothing in memory has been changed then.

    Every checksum is compared before the first byte is taken over, each rank doing its share.  A rank reads the parts
    that it needs, straight into the place where they belong.  With an optimizer, random states are restored where the
    number of ranks is that of the save.

    Values are converted where an element type differs.  Of a 16-bit parameter that is float32 here, the float32 master
    is read, if the checkpoint has one.  Of a float32 parameter that is 16-bit here, the master starts from the float32
    value, if an optimizer that keeps masters is given.
    """
    loaded = read_checkpoint(path, model, optimizer, Extras(scaler, lr_scheduler), strict=strict)
    return loaded.extra if strict else (loaded.extra, loaded.report)


class Loaded(NamedTuple):
    """What a load has brought beside the values in memory."""

    extra: Any
    report: LoadReport
    info: dict[str, Any]  # of the manifest


def read_checkpoint(path: Any, model: Any, optimizer: Optional[Any], extras: Extras, *, strict: bool) -> Loaded:
    """:func:`load_checkpoint`."""
    IN_FLIGHT.settle()
    team = team_of(model)
    job = team.together(lambda: _Load.prepare(path, model, optimizer, strict), _LABEL)
    job, report = _agree(team, job, strict)
    with job.files:
        data = team.together(lambda: _verified(team, job), _LABEL)
        team.together(lambda: _check_data(job, data, optimizer, extras, strict), _LABEL)
        # From here on nothing can fail but the hardware.
        team.together(lambda: _write_weights(team, job), _LABEL)
        job.subject.end_weights()
        team.together(lambda: _write_states(team, job), _LABEL)
        team.together(lambda: _restore(team, job, data, model, optimizer, extras), _LABEL)
    return Loaded(data["extra"], report, job.manifest.info)


class _Load(NamedTuple):
    """What this rank has found out before anybody has changed anything."""

    folder: Path
    manifest: Manifest
    files: TensorFiles
    subject: Subject
    match: Match
    optimizer: Optional[bool]  # see gives_optimizer(); after _agree whether any rank gives one
    masters: bool  # whether a weight is read from a master; after _agree of any rank

    @classmethod
    def prepare(cls, path: Any, model: Any, optimizer: Optional[Any], strict: bool) -> _Load:
        if not isinstance(path, (str, os.PathLike)):
            raise UsageError(f"path must be the path of a folder, got {type(path).__name__}")
        folder = Path(path).absolute()
        subject = subject_of(model, optimizer)
        manifest = read_manifest(folder)
        without_states = not manifest.section("optimizer") and "optimizer" not in (manifest.data or {})
        if optimizer is not None and without_states and strict:
            raise CheckpointError(f"{folder} has no optimizer state; pass optimizer=None to read the weights only")
        match = Match()
        names = subject.names.all
        holdings = {holding.key[1]: holding for holding in subject.model()}
        match_model(manifest, names, {name: (held.shape, held.dtype) for name, held in holdings.items()}, match)
        if optimizer is not None:
            match_states(manifest, names, subject.owners(), match)
        given, masters = gives_optimizer(subject, optimizer), any(key[0] == "model" for key in match.instead)
        return cls(folder, manifest, TensorFiles(folder, manifest.files), subject, match, given, masters)


def _agree(team: Team, job: _Load, strict: bool) -> tuple[_Load, LoadReport]:
    """What does not fit, of all ranks; raises where ``strict`` forbids it.  Collective."""
    known = [name for names in job.subject.names.all.values() for name in names]
    said = team.exchange((job.manifest.save, known, job.match.report, job.optimizer, job.masters), _LABEL)
    for rank, (save, *_) in enumerate(said):
        if save != said[0][0]:
            raise CheckpointError(
                f"{job.folder}: rank 0 and rank {rank} read different saves; give every rank the same folder, and do "
                "not save into it meanwhile"
            )
    optimizer = check_optimizers([each[3] for each in said])
    report: LoadReport = said[0][2].merge(each[2] for each in said[1:])
    everywhere = {name for each in said for name in each[1]}
    resolved = {job.manifest.resolve(name) for name in everywhere}
    unknown = [name for name in job.manifest.model_names() if job.manifest.resolve(name) not in resolved]
    report.unexpected[:0] = unknown
    if report and strict:
        raise CheckpointError(f"{job.folder} does not fit; {report}")
    if report:
        _logger.warning("%s does not fit everywhere; %s", job.folder, report)
    return job._replace(optimizer=optimizer, masters=any(each[4] for each in said)), report


def _wanted(team: Team, job: _Load) -> list[TensorEntry]:
    """All that any rank will read."""
    model = list(job.manifest.section("model").values())
    optimizer = job.manifest.section("optimizer").items()
    states = [entry for key, entry in optimizer if job.optimizer or (job.masters and key[1] == MASTER)]
    own = list(job.manifest.section("rank").values()) if job.manifest.world_size == team.world_size else []
    return [*model, *states, *own, *job.manifest.section("data").values()]


def _verified(team: Team, job: _Load) -> Any:
    verify_pieces(job.files, pieces_of(_wanted(team, job)), team.rank, team.world_size)
    return read_data(job.files, job.manifest)


def _check_data(job: _Load, data: Any, optimizer: Optional[Any], extras: Extras, strict: bool) -> None:
    """Whether what the caller wants to have restored was saved, and fits: Paddle finds out half-way."""
    missing = []
    if extras.scaler is not None and extras.scaler.is_enable() and not data.get("scaler"):
        missing.append("scaler")
    inner = inner_optimizer(optimizer)
    own = None if inner is None else scheduler_of(inner)
    if own is not None and "scheduler" not in data:
        missing.append("the state of the optimizer's lr_scheduler")
    if extras.scheduler is not None and extras.scheduler is not own and "lr_scheduler" not in data:
        missing.append("lr_scheduler")
    for name, scheduler in (("scheduler", own), ("lr_scheduler", extras.scheduler)):
        if scheduler is not None and name in data:
            lacking = [key for key in scheduler.state_dict() if key not in data[name]]
            if lacking:
                raise CheckpointError(
                    f"{job.folder} has the state of another {name} than {type(scheduler).__name__}, which keeps "
                    f"{', '.join(lacking)} too; give the scheduler that was saved"
                )
    if missing and strict:
        raise CheckpointError(f"{job.folder} does not fit; missing: {', '.join(missing)}")


def _write_weights(team: Team, job: _Load) -> None:
    job.subject.begin_load()
    for holding in job.subject.model():
        entry = job.match.model.get(holding.key[1])
        if entry is not None:
            holding.load(job.files, _own_entry(team, job, holding, entry))


def _own_entry(team: Team, job: _Load, holding: Holding, entry: TensorEntry) -> TensorEntry:
    """What this very rank had under the name, where the ranks are those of the save and it differed from the rest."""
    if not holding.is_whole or team.world_size != job.manifest.world_size:
        return entry
    key = job.match.instead.get(holding.key, holding.key)
    own = job.manifest.tensors.get(("rank", str(team.rank), "/".join(key)), entry)
    return own if own.shape == entry.shape else entry


def _write_states(team: Team, job: _Load) -> None:
    targets = job.subject.state_targets({name: list(found) for name, found in job.match.states.items() if found})
    for holding in targets:
        _, name, state = holding.key
        holding.load(job.files, _own_entry(team, job, holding, job.match.states[name][state]))


def _restore(team: Team, job: _Load, data: Any, model: Any, optimizer: Optional[Any], extras: Extras) -> None:
    """Rates, schedulers, the scaler and, where training is to go on as before, the random states."""
    if extras.scaler is not None and data.get("scaler"):
        extras.scaler.load_state_dict(data["scaler"])
    own = None
    inner = inner_optimizer(optimizer)
    if inner is not None:
        own = scheduler_of(inner)
        if own is not None and "scheduler" in data:
            own.set_state_dict(data["scheduler"])
        elif own is None and "learning_rate" in data:
            inner.set_lr(data["learning_rate"])
    if extras.scheduler is not None and extras.scheduler is not own and "lr_scheduler" in data:
        extras.scheduler.set_state_dict(data["lr_scheduler"])
    if job.optimizer:  # of any rank: one without parameters draws random numbers too
        _restore_random(team, job)
        _restore_steps(job, data, pipeline_of(model))


def _restore_steps(job: _Load, data: Any, stages: Optional[PipelineLayer]) -> None:
    """What the random numbers of a pipeline depend on."""
    if "random_step" not in data:
        return
    if stages is not None:
        stages.random_step, stages.base_seed = data["random_step"], data["base_seed"]
    else:
        _logger.warning(
            "%s was written by a pipeline; its random_step and base_seed have no place in a model without stages, "
            "whose dropout draws other random numbers",
            job.folder,
        )


def _restore_random(team: Team, job: _Load) -> None:
    entry = job.manifest.tensors.get(("rank", str(team.rank), "random"))
    if entry is None or job.manifest.world_size != team.world_size:
        _logger.info("random states stay: the checkpoint has none, or those of %d ranks", job.manifest.world_size)
        return
    states = json.loads(read_whole(job.files, entry).tobytes())
    if not set_random_states(states):
        _logger.warning("random states were written by another release of Paddle, or on another device, and stay")

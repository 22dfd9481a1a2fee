"""``CheckpointManager``: a folder of checkpoints by step, the newest few of which are kept.

One folder belongs to one *run*: a training from its first step on, however often it is stopped and restored.  Its name
is in every checkpoint; a job that has not restored from the folder is another run and does not write into it.  While a
job writes it holds a lock, so two jobs of one run are told apart as well.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ..errors import CheckpointError, UsageError
from .background import IN_FLIGHT, PendingSave
from .build import team_of
from .collect import Extras
from .durable import FolderLock, make_folder, remove
from .load import read_checkpoint
from .manifest import MANIFEST_FILE
from .match import LoadReport
from .read import is_complete, read_manifest
from .save import write_checkpoint

__all__ = ["CheckpointManager", "Restored"]

_LABEL = "CheckpointManager"
_STEP_FOLDER = re.compile(r"step-(\d{10})")

_logger = logging.getLogger(__name__)


class Restored(NamedTuple):
    """What :meth:`CheckpointManager.restore` brings beside the values in memory."""

    step: int
    extra: Any
    report: LoadReport  # empty where everything fitted


class CheckpointManager:
    """Checkpoints of one training, by step.

    >>> import paddle, tempfile
    >>> from paddle_group_sharded import CheckpointManager
    >>> model = paddle.nn.Linear(4, 2)
    >>> manager = CheckpointManager(tempfile.mkdtemp(), keep=2)
    >>> manager.restore(model) is None  # nothing yet: a new run
    True
    >>> for step in (10, 20, 30):
    ...     _ = manager.save(step, model, extra={"seen": 64 * step})
    >>> manager.steps(), manager.latest()
    ([20, 30], 30)
    >>> manager.restore(model).extra
    {'seen': 1920}
    """

    def __init__(self, folder: Any, keep: Optional[int] = 3) -> None:
        """Use ``folder``, made with the first save.  ``keep``: how many of the newest stay; None for all."""
        if not isinstance(folder, (str, os.PathLike)):
            raise UsageError(f"folder must be a path, got {type(folder).__name__}")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise UsageError(f"keep must be a number of checkpoints, at least 1, or None for all, got {keep!r}")
        self.folder = Path(folder).absolute()
        self.keep = keep
        self._lock: Optional[FolderLock] = None
        self._run: Optional[str] = None  # known after a restore, or the first save
        self._last = -1  # step saved or restored last

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order.  Not collective."""
        return sorted(step for step, path in self._step_folders() if is_complete(path))

    def latest(self) -> Optional[int]:
        """The step of the newest complete checkpoint, or None.  Not collective."""
        return next(reversed(self.steps()), None)

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of ``step``, for :func:`.load_checkpoint` and the command line."""
        return self.folder / f"step-{step:010d}"

    def save(
        self,
        step: int,
        model: Any,
        optimizer: Optional[Any] = None,
        scaler: Optional[Any] = None,
        lr_scheduler: Optional[Any] = None,
        extra: Any = None,
        *,
        async_save: bool = False,
    ) -> PendingSave:
        """:func:`.save_checkpoint` for ``step``; older ones are removed when the new one is complete.  Collective.

        Also removed are later steps of this run, after a restore of an earlier one, and what killed saves have left.
        :class:`CheckpointError`, on every rank, where the folder belongs to another run or another job is writing.
        """
        team = team_of(model)
        IN_FLIGHT.settle()
        team.together(lambda: self._check_step(step), _LABEL)
        team.together(lambda: self._claim() if team.rank == 0 else None, _LABEL)
        pending = write_checkpoint(
            self.path(step),
            model,
            optimizer,
            Extras(scaler, lr_scheduler, extra),
            async_save=async_save,
            info={"run": self._run, "step": step},
            after=lambda: self._tidy(step),
        )
        self._last = step
        return pending

    def restore(
        self,
        model: Any,
        optimizer: Optional[Any] = None,
        scaler: Optional[Any] = None,
        lr_scheduler: Optional[Any] = None,
        *,
        step: Optional[int] = None,
        strict: bool = True,
    ) -> Optional[Restored]:
        """:func:`.load_checkpoint` of ``step``, or of the newest complete one; None where there is none.  Collective.

        The job goes on with the run that wrote it.
        """
        IN_FLIGHT.settle()
        team = team_of(model)
        team.together(lambda: None if step is None else _check_number(step), _LABEL)
        newest = team.exchange(self.latest() if team.rank == 0 else None, _LABEL)[0]
        chosen = newest if step is None else step
        if chosen is None:
            return None
        extras = Extras(scaler, lr_scheduler)
        loaded = read_checkpoint(self.path(chosen), model, optimizer, extras, strict=strict)
        self._run = loaded.info.get("run")
        self._last = chosen
        return Restored(chosen, loaded.extra, loaded.report)

    def close(self) -> None:
        """Wait for a save under way, and let other jobs write into the folder.  Collective."""
        IN_FLIGHT.settle()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _check_step(self, step: Any) -> None:
        _check_number(step)
        if step < self._last:
            raise UsageError(f"step {step} comes after step {self._last}; save in the order of training")

    def _claim(self) -> None:
        """On rank 0: nobody else writes here, and what is here is of this run."""
        if self._lock is None:
            make_folder(self.folder)
            self._lock = FolderLock(self.folder)
        if self._run is None:
            newest = self.latest()
            if newest is not None:
                run = read_manifest(self.path(newest)).info.get("run")
                raise CheckpointError(
                    f"{self.folder} holds checkpoints of another run ({run}, up to step {newest}); call restore() to "
                    "go on with it, or give every run a folder of its own"
                )
            self._run = os.urandom(8).hex()

    def _step_folders(self) -> list[tuple[int, Path]]:
        if not self.folder.is_dir():
            return []
        found = ((_STEP_FOLDER.fullmatch(path.name), path) for path in self.folder.iterdir())
        return [(int(match[1]), path) for match, path in found if match]

    def _tidy(self, step: int) -> None:
        """On rank 0, when the checkpoint of ``step`` is complete."""
        older = [known for known in self.steps() if known <= step]
        kept = older if self.keep is None else older[-self.keep :]
        for known, path in self._step_folders():
            if known in kept:
                continue
            if known > step and is_complete(path):
                _logger.warning("%s is removed: the run went back to an earlier step and has passed %d", path, step)
            # The manifest first: what is left of a removal that is cut off is an unfinished save, never a damaged one.
            remove(path / MANIFEST_FILE)
            shutil.rmtree(path, ignore_errors=True)


def _check_number(step: Any) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"step must be a number from 0 on, got {step!r}")

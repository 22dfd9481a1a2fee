"""Checkpoints of train_gpt.py, by which a run that was killed goes on by itself when it is started again."""

from __future__ import annotations

from typing import Any

from corpus import CorpusError
from train_options import FIXED

from paddle_group_sharded import CheckpointManager

__all__ = ["Checkpoints"]


class Checkpoints:
    """Those of one trainer; all calls are collective."""

    def __init__(self, trainer: Any) -> None:
        """Use the folder of ``--checkpoint``."""
        self._trainer = trainer
        self._manager = CheckpointManager(trainer.options.checkpoint, keep=2)
        # They describe the weights and the order of the data: a run that goes on cannot have others.
        self._facts = {name: getattr(trainer.options, name) for name in FIXED}
        self._facts["text"] = trainer.corpus.checksum

    def restore(self) -> int:
        """Go on with the newest one, of whatever level and number of ranks; the steps it has done, 0 without one."""
        trainer = self._trainer
        restored = self._manager.restore(trainer.model, trainer.optimizer, getattr(trainer, "scaler", None))
        if restored is None:
            return 0
        other = [name for name, value in restored.extra.items() if self._facts.get(name) != value]
        if other:
            raise CorpusError(f"--checkpoint {trainer.options.checkpoint}: that run has another {', '.join(other)}")
        return restored.step

    def after_step(self, done: int, last: bool) -> None:
        """Save every ``--checkpoint-every`` steps, while training goes on, and at the end."""
        if last or done % self._trainer.options.checkpoint_every == 0:
            trainer = self._trainer
            scaler = getattr(trainer, "scaler", None)
            self._manager.save(done, trainer.model, trainer.optimizer, scaler, extra=self._facts, async_save=not last)

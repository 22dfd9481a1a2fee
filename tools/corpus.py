"""Text to train on, as bytes, and the windows that each rank reads from it.

What a rank reads is a function of (seed, step, rank) alone: a resumed run continues where it stopped without any
state of its own, and any number of ranks reads the same total batch.
"""

from __future__ import annotations

import random
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Corpus", "CorpusError", "Windows"]

STDLIB_LIMIT = 8 << 20  # bytes that are read at most
VALIDATION_SHARE = 20  # one byte of so many is held out, at the end
# Not code that a person writes by hand: installed packages, tests (two thirds of all) and tables of characters.
SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"})


class CorpusError(Exception):
    """There is no text, or too little of it."""


@dataclass(frozen=True)
class Windows:
    """A batch: ``inputs`` and the byte after each of them, both int64 [windows, seq]; ``weights`` float [windows]."""

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray  # 0 marks a window that only fills up the batch


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, both uint8 and 1-D."""

    source: str
    train: np.ndarray
    validation: np.ndarray

    @staticmethod
    def of_file(path: str) -> Corpus:
        """All of one file."""
        try:
            return Corpus._split(path, Path(path).read_bytes())
        except OSError as error:
            raise CorpusError(f"--data {path}: {error.strerror}; give a readable text file") from error

    @staticmethod
    def of_stdlib(limit: int = STDLIB_LIMIT) -> Corpus:
        """Source of Python's own standard library, ``limit`` bytes of it: text that every machine has."""
        root = Path(sysconfig.get_path("stdlib"))
        files = [path for path in sorted(root.rglob("*.py")) if not SKIPPED & set(path.relative_to(root).parts)]
        random.Random(0).shuffle(files)  # so that the part held out, at the end, is like the rest
        parts: list[bytes] = []
        size = 0
        for path in files:
            if size >= limit:
                break
            parts.append(path.read_bytes())
            size += len(parts[-1])
        return Corpus._split(f"Python's standard library, {root}", b"".join(parts)[:limit])

    @staticmethod
    def _split(source: str, text: bytes) -> Corpus:
        data = np.frombuffer(text, dtype=np.uint8)
        held_out = len(data) // VALIDATION_SHARE
        return Corpus(source, data[: len(data) - held_out], data[len(data) - held_out :])

    def check(self, seq: int) -> None:
        """Raise CorpusError unless each part holds at least one window of ``seq`` bytes and the byte after it."""
        need = (seq + 1) * VALIDATION_SHARE
        if min(len(self.train), len(self.validation)) <= seq:
            have = len(self.train) + len(self.validation)
            raise CorpusError(f"{self.source}: {have} bytes of text, but --seq {seq} needs {need}; give --data FILE")

    @property
    def checksum(self) -> int:
        """Tells whether a run is resumed on the same text."""
        return zlib.crc32(self.validation, zlib.crc32(self.train))

    def batch(self, *, seed: int, step: int, seq: int, windows: int, rank: int, ranks: int) -> Windows:
        """This rank's ``windows / ranks`` of the ``windows`` that all ranks together read in ``step``."""
        starts = np.random.default_rng((seed, step)).integers(0, len(self.train) - seq, size=windows)
        mine = starts.reshape(ranks, windows // ranks)[rank]
        return _cut(self.train, mine, np.ones(len(mine), dtype="float32"), seq)

    def held_out(self, *, seq: int, windows: int, rank: int = 0, ranks: int = 1) -> Windows:
        """This rank's part of at most ``windows`` windows spread evenly over the validation text.

        Every rank gets the same number, as a forward of a sharded model is collective: the last ones may weigh 0.
        """
        fitting = len(self.validation) // (seq + 1)
        count = min(windows, fitting)
        starts = np.arange(count) * fitting // count * (seq + 1)
        filled = -(-count // ranks) * ranks
        weights = (np.arange(filled) < count).astype("float32")
        return _cut(self.validation, np.resize(starts, filled)[rank::ranks], weights[rank::ranks], seq)


def _cut(text: np.ndarray, starts: np.ndarray, weights: np.ndarray, seq: int) -> Windows:
    windows = text[starts[:, None] + np.arange(seq + 1)].astype("int64")
    return Windows(windows[:, :-1], windows[:, 1:], weights)

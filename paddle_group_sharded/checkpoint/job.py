"""One save: the files of each rank, and the manifest that makes them count."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Optional

from ..errors import CheckpointError
from .durable import TEMPORARY_SUFFIX, FolderLock, create, make_folder, remove, sync_folder
from .manifest import MANIFEST_FILE, FileInfo, Key, Manifest, PieceEntry, TensorEntry
from .progress import progress
from .tensor_file import Blob, write_tensors

__all__ = ["Piece", "SaveJob", "Written", "compose"]

_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.2
_FILE_OF_A_SAVE = re.compile(r"([0-9a-f]{16})-\d{5}\.(safetensors|done)(\.writing)?")


class Piece(NamedTuple):
    """A part of a tensor that this rank writes."""

    key: Key
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    stop: int
    blob: Blob


class Written(NamedTuple):
    """What one rank has written."""

    file: str
    info: Optional[FileInfo]  # None where it had nothing to write, and there is no file
    pieces: list[tuple[Key, str, tuple[int, ...], PieceEntry]]  # key, dtype, shape of the whole tensor, piece


class SaveJob:
    """The files that one rank adds to ``folder``; rank 0 also locks it, publishes, and removes what is no longer used.

    What other ranks do is none of its business: whoever uses it calls ``open`` on rank 0 first, then ``write`` on all
    ranks, then ``publish`` on rank 0 with what all of them have returned, then ``close``, also after an error.
    """

    def __init__(self, folder: Path, save: str, rank: int, pieces: Sequence[Piece]) -> None:
        """``save``: digits that no other save has."""
        self.folder = folder
        self.save = save
        self.rank = rank
        self._pieces = list(pieces)
        self._lock: Optional[FolderLock] = None

    @property
    def file(self) -> str:
        """Name of this rank's file."""
        return f"{self.save}-{self.rank:05d}.safetensors"

    def report_path(self, rank: int) -> Path:
        """Where a rank says what it has written, when nobody waits for it."""
        return self.folder / f"{self.save}-{rank:05d}.done"

    def open(self) -> None:
        """Make the folder and keep other jobs away from it."""
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is a file, expected a folder or a new name")
        make_folder(self.folder)
        self._lock = FolderLock(self.folder)

    def hold_copies(self) -> None:
        """Copy what will be written, so that training may go on before it is."""
        self._pieces = [piece._replace(blob=_copied(piece.blob)) for piece in self._pieces]

    def write(self) -> Written:
        """Write this rank's file."""
        if not self._pieces:
            return Written(self.file, None, [])
        make_folder(self.folder)  # a network disk may not show rank 0's to this host yet
        blobs = [piece.blob for piece in self._pieces]
        with progress(f"rank {self.rank} writes", sum(blob.size for blob in blobs), self.rank == 0) as on_bytes:
            checksums, info = write_tensors(self.folder / self.file, blobs, on_bytes)
        entries = []
        for piece, checksum in zip(self._pieces, checksums):
            entry = PieceEntry(self.file, piece.blob.key, piece.start, piece.stop, checksum)
            entries.append((piece.key, piece.dtype, piece.shape, entry))
        self._pieces.clear()  # copies are given up
        return Written(self.file, info, entries)

    def publish(self, manifest: Manifest) -> None:
        """Make the save count: from here on readers see it."""
        self._await_files(manifest)
        try:
            with create(self.folder / MANIFEST_FILE) as file:
                file.write(manifest.to_bytes())
        except BaseException:
            if not self._counts():
                for name in manifest.files:
                    with suppress(OSError):
                        remove(self.folder / name)
            raise
        self._remove_unused(set(manifest.files))

    def _await_files(self, manifest: Manifest) -> None:
        """All of them are there, but a network disk may show them a little later than their writers say."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            here = {path.name: path.stat().st_size for path in self.folder.iterdir() if path.name in manifest.files}
            missing = [name for name, info in manifest.files.items() if here.get(name) != info.size]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self.folder / missing[0]}, which another rank has written, is not there with its "
                    f"{manifest.files[missing[0]].size} bytes; all ranks must write to one shared folder"
                )
            time.sleep(_POLL_SECONDS)

    def _counts(self) -> bool:
        """Whether this save may be the one that readers see, for all that can be told."""
        try:
            return self.save.encode() in (self.folder / MANIFEST_FILE).read_bytes()
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def _remove_unused(self, used: set[str]) -> None:
        """Files of the save before, and of saves that were killed."""
        for path in list(self.folder.iterdir()):
            if path.name not in used and _FILE_OF_A_SAVE.fullmatch(path.name):
                with suppress(OSError):  # no reason to fail: the new checkpoint is complete
                    remove(path)
        remove(self.folder / (MANIFEST_FILE + TEMPORARY_SUFFIX))
        sync_folder(self.folder)

    def discard(self) -> None:
        """Remove this rank's file, where it is known that nobody publishes it.

        A rank that has lost rank 0 does not know: the file stays, and the next save removes it if it is not used.
        """
        with suppress(OSError):
            remove(self.folder / self.file)

    def close(self) -> None:
        """Let others write into the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def compose(
    shapes: dict[Key, tuple[str, tuple[int, ...]]], reports: Sequence[Written], rest: Manifest
) -> Manifest:
    """The manifest of what all ranks have written.

    ``shapes``: dtype and shape of the tensors, of those at least that have no elements and are in no file.
    """
    shapes = dict(shapes)
    pieces: dict[Key, list[PieceEntry]] = {key: [] for key in shapes}
    for report in reports:
        for key, dtype, shape, piece in report.pieces:
            shapes.setdefault(key, (dtype, shape))
            pieces.setdefault(key, []).append(piece)
    rest.tensors = {
        key: TensorEntry(*shapes[key], tuple(sorted(found, key=lambda piece: piece.start)))
        for key, found in pieces.items()
    }
    rest.files = {report.file: report.info for report in reports if report.info is not None}
    rest.check(MANIFEST_FILE)
    return rest


def _copied(blob: Blob) -> Blob:
    array = blob.fetch().copy()
    return blob._replace(fetch=lambda: array)

"""Files that are there whole or not at all, whatever ends the process, and folders that one job writes at a time."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, ClassVar

from ..errors import CheckpointError

__all__ = ["FolderLock", "create", "make_folder", "remove", "sync_folder"]

TEMPORARY_SUFFIX = ".writing"


@contextmanager
def create(path: Path) -> Iterator[BinaryIO]:
    """A new file to write; it gets its name when the block is left without an error and its bytes are on the disk."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with open(temporary, "wb", buffering=0) as file:
            yield _Whole(file)  # type: ignore[misc]
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            os.remove(temporary)
        if isinstance(error, OSError):
            error.filename = os.fspath(path)  # the system names no file when a write fails
        raise
    sync_folder(path.parent)


class _Whole:
    """A raw file whose ``write`` writes all it is given."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, content: bytes) -> int:
        """Write all of ``content``; the system may take a part only, as when the disk fills up."""
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]
        return len(content)


def make_folder(path: Path) -> None:
    """Make ``path`` and its parents, so that they survive a power failure."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Force the names in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file that may be gone already."""
    with suppress(FileNotFoundError):
        os.remove(path)


class FolderLock:
    """Keeps other jobs from writing into a folder; the system gives it up when the process ends, however it ends.

    To the system a process is one owner, and closing any descriptor of the file gives the lock up.  So locks of this
    process are told apart here, before the file is opened.  One that nobody holds any more is released.
    """

    FILE = ".lock"

    # By device and number of the folder.
    _held: ClassVar[weakref.WeakValueDictionary[tuple[int, int], FolderLock]] = weakref.WeakValueDictionary()

    def __init__(self, folder: Path) -> None:
        """Take the lock of ``folder``, or raise :class:`CheckpointError` where this or another process has it."""
        found = os.stat(folder)
        self._folder = (found.st_dev, found.st_ino)
        if self._folder in self._held:
            raise CheckpointError(
                f"{folder} is being written by this process already; close() the CheckpointManager that saves there, "
                "or give every one a folder of its own"
            )
        descriptor = os.open(folder / self.FILE, os.O_RDWR | os.O_CREAT, 0o644)
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False  # a save in the background may still be under way then
        try:
            # Not flock(): a data loader's worker, forked, would hold that on when its parent has been killed.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            self.release()
            raise CheckpointError(
                f"{folder} is being written by another job ({holder}); give every job a folder of its own"
            ) from None
        except OSError:  # a file system without locks: those of this process are told apart all the same
            self._held[self._folder] = self
            return
        self._held[self._folder] = self
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)

    def release(self) -> None:
        """Let others write; safe to call twice."""
        if self._held.get(self._folder) is self:
            del self._held[self._folder]
        self._close()

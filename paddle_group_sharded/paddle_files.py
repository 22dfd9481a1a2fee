"""One Paddle file: written so that a reader sees the old or the new one, sealed so that damage is found.

The file is what ``paddle.save`` writes, and plain ``paddle.load`` reads it.  After the pickle, where ``paddle.load``
does not look, stands a *seal*: which save the file belongs to, and a checksum of the bytes before.  A file without one
was written by plain Paddle; only what unpickling notices can be found out about it.
"""

from __future__ import annotations

import os
import pickle
import zlib
from typing import Any, NamedTuple, Optional

import paddle

from .errors import CheckpointError

__all__ = ["Contents", "FileSet", "read_file"]

_SEAL = b"\ngroup_sharded %s %08x\n"
_SAVE_DIGITS = 16
_SEAL_BYTES = len(_SEAL % (b"0" * _SAVE_DIGITS, 0))
_CHUNK = 1 << 16  # bytes


class Contents(NamedTuple):
    """What a file holds."""

    entries: dict[str, Any]
    save: Optional[str]  # equal for the files that were written together; None where the file has no seal
    checksum: int  # of all bytes before the seal


class FileSet:
    """Files of one folder that appear under their names together, when all of them are complete."""

    def __init__(self, folder: str, save: Optional[str] = None) -> None:
        """Write into ``folder``; ``save``: 16 characters that all writers of one save have agreed on, else random."""
        self._folder = folder
        self._save = (save or os.urandom(_SAVE_DIGITS // 2).hex()).encode()
        self._written: list[str] = []

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Write ``value`` under a temporary name and force it to the disk."""
        self._written.append(name)
        try:
            with open(self._temporary(name), "wb+") as file:
                _pickle(value, file)
                checksum = _checksum(file, file.tell())
                file.seek(0, os.SEEK_END)
                file.write(_SEAL % (self._save, checksum))
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            self.discard()  # at once: other ranks may look into the folder as soon as they know
            raise

    def publish(self) -> None:
        """Give the files their names."""
        for name in self._written:
            os.replace(self._temporary(name), os.path.join(self._folder, name))
        self._written.clear()

    def discard(self) -> None:
        """Remove what has not been published."""
        for name in self._written:
            if os.path.exists(self._temporary(name)):
                os.remove(self._temporary(name))
        self._written.clear()

    def _temporary(self, name: str) -> str:
        return os.path.join(self._folder, f"{name}.writing")


def _pickle(value: dict[str, Any], file: Any) -> None:
    """As ``paddle.save`` does where all tensors are arrays, but without a second copy of them in the pickler's memo."""
    pickler = pickle.Pickler(file, protocol=4)
    pickler.fast = True
    pickler.dump(value)


def read_file(path: str) -> Contents:
    """Read a file of ``paddle.save`` that holds a dict; :class:`CheckpointError` tells what is wrong with another."""
    if not os.path.isfile(path):
        raise CheckpointError(f"{path} does not exist; expected a file of save_group_sharded_model or paddle.save")
    try:
        save, checksum = _check_seal(path)
        entries = paddle.load(path, keep_name_table=True)
    except CheckpointError:
        raise
    except Exception as error:  # whatever unpickling a damaged file raises
        raise CheckpointError(f"{path} cannot be read, it is damaged or not a Paddle file: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} holds a {type(entries).__name__}, expected the dict of a state_dict()")
    return Contents(entries, save, checksum)


def _check_seal(path: str) -> tuple[Optional[str], int]:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        file.seek(max(0, size - _SEAL_BYTES))
        tail = file.read()
        if len(tail) < _SEAL_BYTES or not tail.startswith(_SEAL[: _SEAL.index(b"%")]):
            return None, _checksum(file, size)
        checksum = _checksum(file, size - _SEAL_BYTES)
    save = tail.split()[1]
    if tail != _SEAL % (save, checksum):
        raise CheckpointError(f"{path} is damaged: its bytes do not have the checksum that stands at its end")
    return save.decode(errors="replace"), checksum


def _checksum(file: Any, size: int) -> int:
    file.seek(0)
    checksum = 0
    while size > 0:
        chunk = file.read(min(size, _CHUNK))
        if not chunk:
            break
        checksum = zlib.crc32(chunk, checksum)
        size -= len(chunk)
    return checksum

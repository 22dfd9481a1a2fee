"""Tensor files in safetensors' format, written as a stream and read by slices.

The library of that name takes all tensors as bytes objects at once, a second copy of everything that a rank holds, and
gives no checksum of what it writes; the format itself is a length, a JSON header and the bytes one after the other
(https://huggingface.co/docs/safetensors), so they are written here one at a time.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Callable, NamedTuple, Optional

import numpy as np

from ..errors import CheckpointError, UsageError
from .dtypes import code_of, itemsize, name_of_code, numpy_dtype
from .durable import create
from .manifest import FileInfo

__all__ = ["Blob", "FileEntry", "TensorFiles", "write_tensors"]

_CHUNK = 1 << 22  # bytes that are summed and written at a time: still in the cache for the second
_MAX_HEADER = 100_000_000  # bytes, the library's own limit
_LENGTH = 8  # bytes of the number before the header


class Blob(NamedTuple):
    """A tensor to write."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    fetch: Callable[[], Any]  # its elements as a contiguous NumPy array; called once, when they are written

    @property
    def size(self) -> int:
        """Bytes."""
        return itemsize(self.dtype) * math.prod(self.shape)


def write_tensors(
    path: Path,
    blobs: Sequence[Blob],
    on_bytes: Callable[[int], Any] = lambda size: None,
    made_for: str = "pd",
) -> tuple[list[str], FileInfo]:
    """Write ``blobs`` into ``path``, which appears when all of it is on the disk.

    Returns the checksum of each blob and what is to know of the file; ``on_bytes`` is told of each part that is
    written.  ``made_for``: the library that readers of safetensors expect to be told of.
    """
    order = sorted(range(len(blobs)), key=lambda index: -itemsize(blobs[index].dtype))  # so all of them are aligned
    header: dict[str, Any] = {"__metadata__": {"format": made_for}}
    offset = 0
    for index in order:
        blob = blobs[index]
        if blob.key in header:
            raise UsageError(f"two tensors would be called {blob.key!r} in {path}; rename one of them")
        header[blob.key] = {
            "dtype": code_of(blob.dtype),
            "shape": list(blob.shape),
            "data_offsets": [offset, offset + blob.size],
        }
        offset += blob.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(_LENGTH, "little") + text
    checksums = [""] * len(blobs)
    with create(path) as file:
        file.write(head)
        for index in order:
            checksums[index] = _write_one(file, blobs[index], on_bytes)
    return checksums, FileInfo(len(head) + offset, f"{zlib.crc32(head):08x}")


def _write_one(file: BinaryIO, blob: Blob, on_bytes: Callable[[int], Any]) -> str:
    array = blob.fetch()
    content = memoryview(array.reshape(-1).view(np.uint8))
    if content.nbytes != blob.size:
        raise CheckpointError(f"{blob.key}: expected {blob.size} bytes, got {content.nbytes}")
    checksum = 0
    for start in range(0, content.nbytes, _CHUNK):
        part = content[start : start + _CHUNK]
        checksum = zlib.crc32(part, checksum)
        file.write(part)
        on_bytes(part.nbytes)
    return f"{checksum:08x}"


class FileEntry(NamedTuple):
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    size: int  # bytes


class TensorFiles:
    """The tensor files of one folder, opened when they are first asked for; use it as a context."""

    def __init__(self, folder: Path, files: Optional[Mapping[str, FileInfo]] = None) -> None:
        """``files``: what each file must be, by its name."""
        self.folder = folder
        self._expected = files or {}
        self._open: dict[str, tuple[BinaryIO, dict[str, FileEntry]]] = {}

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; they are opened again when they are asked for."""
        for file, _ in self._open.values():
            file.close()
        self._open.clear()

    def entries(self, name: str) -> dict[str, FileEntry]:
        """What the file ``name`` holds, by key."""
        return self._file(name)[1]

    def entry(self, name: str, key: str) -> FileEntry:
        """The tensor ``key`` of the file ``name``."""
        entries = self.entries(name)
        if key not in entries:
            raise CheckpointError(f"{self.folder / name} has no tensor {key!r}")
        return entries[key]

    def read_into(self, name: str, key: str, start: int, array: Any) -> None:
        """Fill the 1-D NumPy ``array`` with the elements of ``key`` from ``start`` on."""
        entry = self.entry(name, key)
        width = itemsize(entry.dtype)
        if array.nbytes == 0:
            return
        content = memoryview(array.view(np.uint8))
        if start < 0 or start * width + content.nbytes > entry.size:
            raise CheckpointError(f"{self.folder / name}: {key!r} has no elements up to {start + array.size}")
        self._read(name, entry.offset + start * width, content)

    def read(self, name: str, key: str) -> Any:
        """The whole tensor ``key`` as an array of its shape."""
        entry = self.entry(name, key)
        array = np.empty(entry.shape, numpy_dtype(entry.dtype))
        self.read_into(name, key, 0, array.reshape(-1))
        return array

    def checksum(self, name: str, key: str) -> str:
        """crc32 of the bytes of ``key``."""
        entry = self.entry(name, key)
        checksum, done = 0, 0
        content = memoryview(bytearray(min(_CHUNK, entry.size)))
        while done < entry.size:
            part = content[: min(_CHUNK, entry.size - done)]
            self._read(name, entry.offset + done, part)
            checksum = zlib.crc32(part, checksum)
            done += part.nbytes
        return f"{checksum:08x}"

    def _read(self, name: str, offset: int, content: memoryview) -> None:
        file, _ = self._file(name)
        done = 0
        while done < content.nbytes:
            count = os.preadv(file.fileno(), [content[done:]], offset + done)
            if count == 0:
                raise CheckpointError(f"{self.folder / name} is truncated, expected more than {offset + done} bytes")
            done += count

    def _file(self, name: str) -> tuple[BinaryIO, dict[str, FileEntry]]:
        if name not in self._open:
            path = self.folder / name
            try:
                file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
            try:
                entries = _header(file, path, self._expected.get(name))
            except BaseException:
                file.close()
                raise
            self._open[name] = (file, entries)
        return self._open[name]


def _header(file: BinaryIO, path: Path, expected: Optional[FileInfo]) -> dict[str, FileEntry]:
    size = os.fstat(file.fileno()).st_size
    if expected is not None and size != expected.size:
        kind = "truncated" if size < expected.size else "damaged"
        raise CheckpointError(f"{path} is {kind}: it has {size} bytes, expected {expected.size}")
    length = int.from_bytes(os.pread(file.fileno(), _LENGTH, 0), "little")
    if not 2 <= length <= min(_MAX_HEADER, size - _LENGTH):
        raise CheckpointError(f"{path} is damaged or no safetensors file: its header would have {length} bytes")
    head = os.pread(file.fileno(), _LENGTH + length, 0)
    if expected is not None and expected.header != f"{zlib.crc32(head):08x}":
        raise CheckpointError(f"{path} is damaged: its header does not have the checksum {expected.header}")
    try:
        header = json.loads(head[_LENGTH:])
        header.pop("__metadata__", None)
        return {key: _file_entry(key, value, _LENGTH + length, size, path) for key, value in header.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {error!r}") from error


def _file_entry(key: str, value: Any, base: int, file_size: int, path: Path) -> FileEntry:
    start, stop = value["data_offsets"]
    dtype, shape = name_of_code(value["dtype"], f"{path}: {key!r}"), tuple(int(size) for size in value["shape"])
    size = itemsize(dtype) * math.prod(shape)
    if not 0 <= start <= stop or stop - start != size:
        raise ValueError(f"{key!r} {list(shape)} of {dtype} lies at bytes {start} to {stop}")
    if base + stop > file_size:
        raise CheckpointError(f"{path} is truncated, expected {base + stop} bytes for {key!r}, got {file_size}")
    return FileEntry(dtype, shape, base + start, size)

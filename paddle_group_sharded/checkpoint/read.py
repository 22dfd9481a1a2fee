"""Reading a checkpoint's folder: its manifest, its plain values, and whether its bytes are what was written."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .data import unpack
from .dtypes import CODES, numpy_dtype
from .manifest import MANIFEST_FILE, Manifest, PieceEntry, TensorEntry, key_text
from .progress import progress
from .tensor_file import TensorFiles

__all__ = ["is_complete", "pieces_of", "read_data", "read_manifest", "read_whole", "verify_pieces"]


def is_complete(folder: Path) -> bool:
    """Whether a save into ``folder`` has come to its end."""
    return (folder / MANIFEST_FILE).is_file()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of ``folder``; :class:`CheckpointError` where there is none or it is damaged."""
    path = folder / MANIFEST_FILE
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; expected one that save_checkpoint has written")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist: the folder holds no checkpoint, or one whose save was not finished"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    manifest = Manifest.from_bytes(content, os.fspath(path))
    for key, entry in manifest.tensors.items():
        if entry.dtype not in CODES:
            raise CheckpointError(
                f"{path} is damaged: {key_text(key)} has dtype {entry.dtype!r}, expected one of {sorted(CODES)}"
            )
    return manifest


def pieces_of(entries: Iterable[TensorEntry]) -> list[tuple[PieceEntry, str]]:
    """All pieces of ``entries``, each with its element type, in the order in which they should be read."""
    found = {(piece.file, piece.key): (piece, entry.dtype) for entry in entries for piece in entry.pieces}
    return list(found.values())


def verify_pieces(
    files: TensorFiles, pieces: Sequence[tuple[PieceEntry, str]], share: int = 0, shares: int = 1
) -> None:
    """Compare element types, sizes and checksums; of several ranks, each does its ``share``.

    All files are looked at by each.

    :class:`CheckpointError` names the file and the tensor.
    """
    for name in dict.fromkeys(piece.file for piece, _ in pieces):
        files.entries(name)
    mine = _share(pieces, share, shares)
    size = sum(files.entry(piece.file, piece.key).size for piece, _ in mine)
    with progress("verifying", size, share == 0) as on_bytes:
        for piece, dtype in mine:
            entry = files.entry(piece.file, piece.key)
            path = files.folder / piece.file
            if entry.dtype != dtype:
                raise CheckpointError(f"{path}: {piece.key!r} is {entry.dtype}, expected {dtype} as in {MANIFEST_FILE}")
            count = math.prod(entry.shape)
            if count != piece.stop - piece.start:
                expected = piece.stop - piece.start
                raise CheckpointError(f"{path}: {piece.key!r} has {count} elements, expected {expected}")
            checksum = files.checksum(piece.file, piece.key)
            if checksum != piece.checksum:
                raise CheckpointError(
                    f"{path} is damaged: {piece.key!r} has the checksum {checksum}, expected {piece.checksum}"
                )
            on_bytes(entry.size)


def _share(pieces: Sequence[tuple[PieceEntry, str]], share: int, shares: int) -> list[tuple[PieceEntry, str]]:
    """Large ones first, in turn, so that every rank has about as much to do."""
    ordered = sorted(pieces, key=lambda each: (each[0].start - each[0].stop, each[0].file, each[0].key))
    return ordered[share::shares]


def read_whole(files: TensorFiles, entry: TensorEntry) -> Any:
    """One whole tensor as an array of its shape; bfloat16 as its bits."""
    array = np.empty(entry.numel, numpy_dtype(entry.dtype))
    for piece in entry.pieces:
        files.read_into(piece.file, piece.key, 0, array[piece.start : piece.stop])
    return array.reshape(entry.shape)


def read_data(files: TensorFiles, manifest: Manifest) -> Any:
    """The plain values: rates, scheduler, scaler, extra."""
    return unpack(manifest.data, lambda number: read_whole(files, manifest.tensors["data", number]))

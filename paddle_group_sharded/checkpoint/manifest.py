"""The manifest: which interval of which named tensor lies where.  Plain values and JSON; no tensors.

A tensor is cut into pieces, intervals of its flattened elements, which tile it exactly::

    weight [3, 4]    elements 0 .. 12
    piece            0 .. 7    in a4..-00000.safetensors under "weight[0:7]"
    piece            7 .. 12   in a4..-00001.safetensors under "weight[7:12]"

Tensors have a *key*: ``("model", name)``, ``("optimizer", name, state)``, ``("data", number)`` for arrays inside of
``extra``, or ``("rank", number, name)`` for what only that rank has.  Names are the structured names of the unwrapped
model.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import CheckpointError

__all__ = [
    "FORMAT",
    "FileInfo",
    "MANIFEST_FILE",
    "VERSION",
    "Key",
    "Manifest",
    "PieceEntry",
    "TensorEntry",
    "key_text",
    "overlaps",
    "piece_name",
    "tiling_problem",
]

FORMAT = "paddle_group_sharded.checkpoint"
VERSION = 1
MANIFEST_FILE = "manifest.json"

Key = tuple[str, ...]

_DEPTHS = {"model": 2, "optimizer": 3, "data": 2, "rank": 3}  # parts of a key, by its first one
_SEAL = ', "checksum": "%08x"}\n'  # the end of the file; crc32 of all bytes before


@dataclass(frozen=True)
class PieceEntry:
    """An interval of a tensor's flattened elements, and where its bytes are; never empty."""

    file: str  # name inside the folder
    key: str  # of the tensor in that file
    start: int  # first element, counted inside the whole tensor
    stop: int
    checksum: str  # crc32 of the bytes, eight hexadecimal digits


@dataclass(frozen=True)
class FileInfo:
    """A tensor file."""

    size: int  # bytes
    header: str  # crc32 of all bytes before those of the first tensor


@dataclass(frozen=True)
class TensorEntry:
    """One whole tensor."""

    dtype: str  # Paddle's name, "float32"
    shape: tuple[int, ...]
    pieces: tuple[PieceEntry, ...]  # in order; none where there are no elements

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass
class Manifest:
    """All that a reader has to know beside the tensor files."""

    save: str  # random digits of one save; its files' names begin with them
    world_size: int  # ranks that wrote
    tensors: dict[Key, TensorEntry]
    aliases: dict[str, str] = field(default_factory=dict)  # further name of a tied tensor -> the name it is under
    parameter_names: dict[str, str] = field(default_factory=dict)  # structured name -> Paddle's automatic name
    files: dict[str, FileInfo] = field(default_factory=dict)  # by name
    data: Any = None  # rates, scheduler, scaler, extra; as data.pack() makes it
    info: dict[str, Any] = field(default_factory=dict)  # for people: versions, level

    def section(self, kind: str) -> dict[Key, TensorEntry]:
        """The tensors whose keys begin with ``kind``, by the rest of the key."""
        return {key[1:]: entry for key, entry in self.tensors.items() if key[0] == kind}

    def resolve(self, name: str) -> str:
        """The name under which the tensor ``name`` is kept."""
        return self.aliases.get(name, name)

    def model_names(self) -> list[str]:
        """Every name of the model, those of tied tensors too."""
        return [*(key[1] for key in self.tensors if key[0] == "model"), *self.aliases]

    def to_bytes(self) -> bytes:
        """The content of the file: JSON that ends with a checksum of itself."""
        sections: dict[str, Any] = {kind: {} for kind in _DEPTHS}
        for key, entry in self.tensors.items():
            place = sections
            for part in key[:-1]:
                place = place.setdefault(part, {})
            place[key[-1]] = {**asdict(entry), "pieces": [asdict(piece) for piece in entry.pieces]}
        body = {
            "format": FORMAT,
            "version": VERSION,
            "save": self.save,
            "world_size": self.world_size,
            "info": self.info,
            "files": {name: asdict(file) for name, file in self.files.items()},
            "aliases": self.aliases,
            "parameter_names": self.parameter_names,
            "data": self.data,
            "tensors": sections,
        }
        text = json.dumps(body, allow_nan=False)[:-1].encode("ascii")
        return text + (_SEAL % zlib.crc32(text)).encode("ascii")

    @classmethod
    def from_bytes(cls, content: bytes, path: str) -> Manifest:
        """Read and check the content of ``path``; :class:`CheckpointError` says what is wrong with another one."""
        body = _parse(content, path)
        try:
            tensors = {key: _entry(value) for key, value in _leaves(body["tensors"])}
            manifest = cls(
                save=body["save"],
                world_size=body["world_size"],
                tensors=tensors,
                aliases=body["aliases"],
                parameter_names=body["parameter_names"],
                files={name: FileInfo(**file) for name, file in body["files"].items()},
                data=body["data"],
                info=body["info"],
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is no manifest of version {VERSION}: {error!r}") from error
        manifest.check(path)
        return manifest

    def check(self, path: str) -> None:
        """:class:`CheckpointError` where a value cannot be what it should, or pieces do not tile their tensor."""
        if isinstance(self.world_size, bool) or not isinstance(self.world_size, int) or self.world_size < 1:
            raise CheckpointError(f"{path} is damaged: world_size is {self.world_size!r}, expected a number of ranks")
        for key, entry in self.tensors.items():
            problem = tiling_problem(entry.numel, [(piece.start, piece.stop) for piece in entry.pieces])
            if problem:
                raise CheckpointError(f"{path} is damaged at {key_text(key)} {list(entry.shape)}: {problem}")
            for piece in entry.pieces:
                if piece.file not in self.files or "/" in piece.file:
                    raise CheckpointError(f"{path}: {key_text(key)} lies in {piece.file!r}, which is not listed")
        for alias, name in self.aliases.items():
            if ("model", name) not in self.tensors:
                raise CheckpointError(f"{path}: {alias!r} is another name of {name!r}, which is not listed")


def key_text(key: Key) -> str:
    """``key`` as it stands in messages and as a name inside tensor files: ``weight``, ``optimizer/weight/moment1``."""
    return key[1] if key[0] == "model" else "/".join(key)


def piece_name(key: Key, numel: int, start: int, stop: int) -> str:
    """What elements ``start`` to ``stop`` of ``key`` are called inside a tensor file; just the name where it is whole.

    >>> piece_name(("model", "weight"), 12, 0, 7), piece_name(("model", "weight"), 12, 0, 12)
    ('weight[0:7]', 'weight')
    """
    return key_text(key) if (start, stop) == (0, numel) else f"{key_text(key)}[{start}:{stop}]"


def tiling_problem(numel: int, intervals: Sequence[tuple[int, int]]) -> str:
    """What keeps ``intervals``, in order, from covering elements 0 to ``numel`` exactly once; empty if nothing."""
    expected = 0
    for start, stop in intervals:
        if start != expected or stop <= start:
            return f"expected a piece that begins at element {expected}, got {start} to {stop}"
        expected = stop
    return "" if expected == numel else f"the pieces end at element {expected} of {numel}"


def overlaps(pieces: Sequence[PieceEntry], start: int, stop: int) -> Iterator[tuple[PieceEntry, int, int]]:
    """The pieces that have elements between ``start`` and ``stop``, each with the first and last of those elements.

    >>> halves = [PieceEntry("f", "a", 0, 5, ""), PieceEntry("f", "b", 5, 9, "")]
    >>> [(piece.key, low, high) for piece, low, high in overlaps(halves, 3, 7)]
    [('a', 3, 5), ('b', 5, 7)]
    """
    for piece in pieces:
        low, high = max(start, piece.start), min(stop, piece.stop)
        if low < high:
            yield piece, low, high


def _parse(content: bytes, path: str) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except ValueError as error:  # also a byte that is no text
        raise CheckpointError(f"{path} is damaged, expected JSON: {error}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no manifest of a checkpoint; expected a file of save_checkpoint")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {body.get('version')!r} of the format, this release reads version {VERSION}; "
            "read it with the release that wrote it"
        )
    length = len(_SEAL % 0)
    if content[-length:] != (_SEAL % zlib.crc32(content[:-length])).encode("ascii"):
        raise CheckpointError(f"{path} is damaged: its bytes do not have the checksum that stands at its end")
    return body


def _leaves(sections: Mapping[str, Any]) -> Iterator[tuple[Key, Any]]:
    for kind, depth in _DEPTHS.items():
        level: list[tuple[Key, Any]] = [((kind,), sections[kind])]
        for _ in range(depth - 1):
            level = [((*key, part), value) for key, place in level for part, value in place.items()]
        yield from level


def _entry(value: Mapping[str, Any]) -> TensorEntry:
    pieces = tuple(PieceEntry(**piece) for piece in value["pieces"])
    return TensorEntry(value["dtype"], tuple(value["shape"]), pieces)

"""The manifest as values: round trips, tiling, intersection, who writes what, what does not fit."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_group_sharded import CheckpointError, LoadReport, UsageError
from paddle_group_sharded.checkpoint.assign import Offer, assign
from paddle_group_sharded.checkpoint.manifest import (
    FileInfo,
    Manifest,
    PieceEntry,
    TensorEntry,
    overlaps,
    tiling_problem,
)
from paddle_group_sharded.checkpoint.match import Match, StateOwner, match_model, match_states

names = st.text(min_size=1, max_size=12)
cuts = st.lists(st.integers(1, 59), unique=True, max_size=6).map(lambda inner: [0, *sorted(inner), 60])


def entry(bounds: list[int], dtype: str = "float32") -> TensorEntry:
    pieces = [PieceEntry(f"f{a % 3}", f"k{a}", a, b, f"{a:08x}") for a, b in zip(bounds, bounds[1:])]
    return TensorEntry(dtype, (5, 12), tuple(pieces))


def manifest(tensors: dict[tuple[str, ...], TensorEntry]) -> Manifest:
    files = {piece.file: FileInfo(100, "00000000") for value in tensors.values() for piece in value.pieces}
    return Manifest("0" * 16, 3, tensors, files=files, data={"extra": [1, None]}, info={"level": "os"})


@given(st.dictionaries(names, cuts, max_size=5), st.dictionaries(st.tuples(names, names), cuts, max_size=5))
def test_json_both_ways(model: dict[str, list[int]], states: dict[tuple[str, str], list[int]]) -> None:
    tensors = {("model", name): entry(bounds) for name, bounds in model.items()}
    tensors.update((("optimizer", *key), entry(bounds, "bfloat16")) for key, bounds in states.items())
    tensors["rank", "2", "random"] = TensorEntry("uint8", (0,), ())
    written = manifest(tensors)
    written.aliases = {f"{name}.tied": name for name in model}
    content = written.to_bytes()
    assert content.isascii() and json.loads(content)["format"] == "paddle_group_sharded.checkpoint"
    assert Manifest.from_bytes(content, "m") == written


@given(st.integers(0, 100_000), st.integers(1, 255))
def test_a_flipped_byte_is_found(position: int, flip: int) -> None:
    content = bytearray(manifest({("model", "weight"): entry([0, 7, 60])}).to_bytes())
    content[position % len(content)] ^= flip
    with pytest.raises(CheckpointError, match="m.json"):
        Manifest.from_bytes(bytes(content), "m.json")


@given(st.integers(0, 1_000))
def test_a_truncated_manifest_is_found(length: int) -> None:
    content = manifest({("model", "weight"): entry([0, 7, 60])}).to_bytes()
    with pytest.raises(CheckpointError, match="m.json"):
        Manifest.from_bytes(content[: length % len(content)], "m.json")


def reseal(content: bytes) -> bytes:
    text = content[: content.rindex(b', "checksum"')]
    return text + b', "checksum": "%08x"}\n' % zlib.crc32(text)


def test_another_version_and_another_format() -> None:
    content = manifest({}).to_bytes()
    with pytest.raises(CheckpointError, match="m.json has version 2 of the format, this release reads version 1"):
        Manifest.from_bytes(reseal(content.replace(b'"version": 1', b'"version": 2')), "m.json")
    with pytest.raises(CheckpointError, match="m.json is no manifest"):
        Manifest.from_bytes(b'{"metadata": {}, "weight_map": {}}', "m.json")
    with pytest.raises(CheckpointError, match="m.json is no manifest of version 1: KeyError"):
        Manifest.from_bytes(reseal(content.replace(b'"aliases"', b'"ALIASES"')), "m.json")


@pytest.mark.parametrize(
    ("bounds", "problem"),
    [
        ([(0, 7), (7, 60)], ""),
        ([(0, 7), (8, 60)], "begins at element 7, got 8 to 60"),
        ([(0, 8), (7, 60)], "begins at element 8, got 7 to 60"),
        ([(1, 60)], "begins at element 0, got 1 to 60"),
        ([(0, 59)], "end at element 59 of 60"),
        ([(0, 60), (60, 60)], "begins at element 60, got 60 to 60"),
        ([], "end at element 0 of 60"),
    ],
)
def test_pieces_tile(bounds: list[tuple[int, int]], problem: str) -> None:
    found = tiling_problem(60, bounds)
    assert problem in found and bool(problem) == bool(found)
    pieces = tuple(PieceEntry("f0", str(a), a, b, "") for a, b in bounds)
    content = manifest({("model", "weight"): TensorEntry("float32", (60,), pieces)})
    content.files["f0"] = FileInfo(1, "")
    if problem:
        with pytest.raises(CheckpointError, match=r"weight \[60\]: "):
            Manifest.from_bytes(content.to_bytes(), "m.json")


def test_files_outside_of_the_folder_are_refused() -> None:
    written = manifest({("model", "weight"): TensorEntry("int8", (1,), (PieceEntry("../f", "k", 0, 1, ""),))})
    with pytest.raises(CheckpointError, match="weight lies in '../f', which is not listed"):
        Manifest.from_bytes(written.to_bytes(), "m.json")


@given(cuts, st.integers(0, 60), st.integers(0, 60))
def test_overlaps_cover_an_interval_once(bounds: list[int], one: int, other: int) -> None:
    start, stop = sorted((one, other))
    found = list(overlaps(entry(bounds).pieces, start, stop))
    assert [element for _, low, high in found for element in range(low, high)] == list(range(start, stop))
    assert all(piece.start <= low < high <= piece.stop for piece, low, high in found)


# ----------------------------------------------------------------------------------------------------- who writes what


@given(cuts, st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_every_interval_is_written_once(bounds: list[int], ranks: int, replicas: int, tensors: int) -> None:
    """``ranks * replicas`` ranks: the pieces of each tensor in turn, each held by every replica."""
    held: list[list[Offer]] = [[] for _ in range(ranks * replicas)]
    for number in range(tensors):
        for index, (a, b) in enumerate(zip(bounds, bounds[1:])):
            for replica in range(replicas):
                held[replica * ranks + (index + number) % ranks].append(
                    Offer(("model", str(number)), "int8", (60,), a, b, b - a)
                )
    chosen = assign(held)
    written = [held[rank][index] for rank, indexes in enumerate(chosen) for index in indexes]
    assert sorted((offer.key, offer.start, offer.stop) for offer in written) == sorted(
        (("model", str(number)), a, b) for number in range(tensors) for a, b in zip(bounds, bounds[1:])
    )


def test_replicas_share_the_work() -> None:
    offers = [Offer(("model", str(index)), "int8", (size,), 0, size, size) for index, size in enumerate((9, 5, 4, 2))]
    chosen = assign([offers, offers])
    assert [sum(offers[index].size for index in indexes) for indexes in chosen] == [11, 9]


def test_the_first_rank_counts_where_values_differ() -> None:
    offers = [[Offer(("model", "mean"), "int8", (4,), 0, 4, 4, checksum)] for checksum in (1, 2, 2)]
    assert assign([[], *offers]) == [[], [0], [], []]
    busy = Offer(("model", "weight"), "int8", (9,), 0, 9, 9)
    own = Offer(("model", "mean"), "int8", (4,), 0, 4, 4, own=True)
    assert assign([[busy, own], [own]]) == [[0, 1], []]
    assert assign([[busy, own._replace(own=False)], [own._replace(own=False)]]) == [[0], [0]]


def test_parts_that_do_not_fit_together() -> None:
    whole = Offer(("model", "weight"), "int8", (4,), 0, 4, 4)
    with pytest.raises(UsageError, match=r"weight is int8 \[4\] on rank 0 and int8 \[2, 2\] on rank 1"):
        assign([[whole], [whole._replace(shape=(2, 2))]])
    with pytest.raises(UsageError, match=r"weight \[4\] is not whole on the ranks together: the pieces end at"):
        assign([[whole._replace(stop=2)], []])
    with pytest.raises(UsageError, match=r"optimizer/weight/moment1 \[4\] is not whole"):
        key = ("optimizer", "weight", "moment1")
        assign([[whole._replace(key=key)], [whole._replace(key=key, start=2)]])


# ----------------------------------------------------------------------------------------------------- what is read


def saved() -> Manifest:
    tensors = {("model", name): entry([0, 60]) for name in ("weight", "old", "base")}
    for name in ("weight", "base"):
        tensors.update((("optimizer", name, state), entry([0, 60])) for state in ("moment1", "moment2"))
    tensors["optimizer", "weight", "power"] = TensorEntry("float32", (1,), (PieceEntry("f0", "p", 0, 1, ""),))
    written = manifest(tensors)
    written.aliases = {"head": "weight"}
    return written


def model_match(names: dict[str, list[str]], shape: tuple[int, ...] = (5, 12), dtype: str = "float16") -> Match:
    match = Match()
    match_model(saved(), names, {name: (shape, dtype) for name in names}, match)
    return match


def test_any_name_of_a_tied_tensor_finds_it() -> None:
    for every in (["weight", "head"], ["head", "weight"], ["new", "head"], ["weight"], ["head"]):
        match = model_match({every[0]: every})
        assert match.model == {every[0]: entry([0, 60])} and not match.report
    assert model_match({"new": ["new"]}).report.missing == ["new"]


def test_other_shapes_and_kinds() -> None:
    report = model_match({"weight": ["weight"]}, shape=(12, 5)).report
    assert str(report) == "weight: expected shape [12, 5], got [5, 12]"
    report = model_match({"weight": ["weight"]}, dtype="int64").report
    assert str(report) == "weight: expected dtype int64, got float32"


def owner(*states: str, has_states: bool = True, shape: tuple[int, ...] = (5, 12)) -> StateOwner:
    return StateOwner({state: shape for state in states} | {"power": ()}, frozenset(("power",)), has_states)


def state_match(owners: dict[str, StateOwner]) -> Match:
    match = Match()
    match_states(saved(), {name: [name, f"{name}.tied"] for name in owners}, owners, match)
    return match


def test_states_of_one_optimizer() -> None:
    match = state_match({"weight": owner("moment1", "moment2")})
    assert not match.report and sorted(match.states["weight"]) == ["moment1", "moment2", "power"]


def test_states_are_taken_all_or_none() -> None:
    match = state_match({"base": owner("moment1", "moment2"), "weight": owner("moment1", "moment2", shape=(60,))})
    assert match.states == {}
    assert str(match.report) == (
        "missing: optimizer/base/power; optimizer/weight/moment1: expected shape [60], got [5, 12]; "
        "optimizer/weight/moment2: expected shape [60], got [5, 12]"
    )


def test_states_of_another_optimizer() -> None:
    match = state_match({"weight": owner("velocity")})
    assert match.report == LoadReport(
        missing=["optimizer/weight/velocity"], unexpected=["optimizer/weight/moment1", "optimizer/weight/moment2"]
    )


def test_a_parameter_that_was_never_stepped() -> None:
    assert not state_match({"adapter": owner("moment1", has_states=False)}).report
    missing = state_match({"adapter": owner("moment1", has_states=True)}).report.missing
    assert missing == ["optimizer/adapter/moment1", "optimizer/adapter/power"]


def test_reports_of_several_ranks_become_one() -> None:
    one, other = LoadReport(missing=["a"]), LoadReport(missing=["a", "b"], mismatched=["c: expected"])
    assert one.merge([other]) == LoadReport(missing=["a", "b"], mismatched=["c: expected"])
    assert not LoadReport() and replace(one, missing=[]) == LoadReport()

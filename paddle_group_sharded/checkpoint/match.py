"""Which tensor of a checkpoint goes where, and all that does not fit.  Plain values; no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .manifest import Key, Manifest, TensorEntry

__all__ = ["MASTER", "LoadReport", "Match", "StateOwner", "match_model", "match_states"]


MASTER = "master_weight"  # the name of a float32 master among an optimizer's states
_LOW = ("float16", "bfloat16")
_HIGH = ("float32", "float64")


class StateOwner(NamedTuple):
    """A parameter of the optimizer."""

    states: Mapping[str, tuple[int, ...]]  # shape of each whole state that it has or would get, by name
    scalars: frozenset[str]  # those whose shape may be any of one element
    has_states: bool


@dataclass
class LoadReport:
    """What :func:`.load_checkpoint` has left out, each with its name: empty where everything fitted."""

    missing: list[str] = field(default_factory=list)  # here, not in the checkpoint: left as it was
    unexpected: list[str] = field(default_factory=list)  # in the checkpoint, not here
    mismatched: list[str] = field(default_factory=list)  # another shape or kind of dtype: left as it was

    def __bool__(self) -> bool:
        """Whether anything was left out."""
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        """All of it in one line."""
        parts = [f"missing: {name}" for name in self.missing]
        parts += [f"unexpected: {name}" for name in self.unexpected]
        return "; ".join([*parts, *self.mismatched])

    def merge(self, others: Iterable[LoadReport]) -> LoadReport:
        """This report and ``others`` as one, each line once."""
        merged = LoadReport()
        for report in (self, *others):
            for name in ("missing", "unexpected", "mismatched"):
                lines = getattr(merged, name)
                lines += [line for line in getattr(report, name) if line not in lines]
        return merged


@dataclass
class Match:
    """What is read."""

    model: dict[str, TensorEntry] = field(default_factory=dict)  # by first name of the tensor here
    states: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)  # likewise, then by state
    report: LoadReport = field(default_factory=LoadReport)
    instead: dict[Key, Key] = field(default_factory=dict)  # what is here -> the key that is read for it, where another


def match_model(
    manifest: Manifest, names: Mapping[str, list[str]], shapes: Mapping[str, tuple[tuple[int, ...], str]], match: Match
) -> None:
    """Find the entry of each tensor of ``names`` (all names by first name) under any of its names.

    ``shapes``: shape and dtype by first name.  What is unexpected can be told by all ranks together only.

    A tensor that has more digits here than in the checkpoint is read from its float32 master there.
    """
    entries = {key[0]: entry for key, entry in manifest.section("model").items()}
    for first, every in names.items():
        saved = next((found for name in every if (found := manifest.resolve(name)) in entries), None)
        entry = None if saved is None else entries[saved]
        shape, dtype = shapes[first]
        if entry is None:
            match.report.missing.append(first)
        elif entry.shape != shape:
            match.report.mismatched.append(f"{first}: expected shape {list(shape)}, got {list(entry.shape)}")
        elif _kind(entry.dtype) != _kind(dtype):
            match.report.mismatched.append(f"{first}: expected dtype {dtype}, got {entry.dtype}")
        else:
            match.model[first] = entry
            key = ("optimizer", saved or first, MASTER)
            master = manifest.tensors.get(key)
            if master is not None and master.shape == shape and entry.dtype in _LOW and dtype in _HIGH:
                match.model[first] = master
                match.instead["model", first] = key


def match_states(
    manifest: Manifest, names: Mapping[str, list[str]], owners: Mapping[str, StateOwner], match: Match
) -> None:
    """Find the states of each of ``owners`` (by first name), after :func:`match_model`.

    A parameter that was never stepped before the save may lack all of its states if it has none here either.  States of
    parameters that the optimizer here does not have, such as a frozen base under an adapter, are left out silently.  A
    master that the checkpoint does not have starts from the weight, where that has its digits.
    """
    saved: dict[str, dict[str, TensorEntry]] = {}
    for (name, state), entry in manifest.section("optimizer").items():
        saved.setdefault(name, {})[state] = entry
    for first, owner in owners.items():
        found = next((saved[at] for name in names[first] if (at := manifest.resolve(name)) in saved), {})
        wanted = {state for state in owner.states if state != MASTER}
        if found or owner.has_states:
            match.report.missing += [f"optimizer/{first}/{state}" for state in sorted(wanted - set(found))]
        match.report.unexpected += [f"optimizer/{first}/{state}" for state in sorted(set(found) - wanted - {MASTER})]
        fitting = {}
        for state, entry in found.items():
            expected = owner.states.get(state)
            if expected is None:
                continue
            if entry.shape == expected or (state in owner.scalars and entry.numel == 1):
                fitting[state] = entry
            else:
                match.report.mismatched.append(
                    f"optimizer/{first}/{state}: expected shape {list(expected)}, got {list(entry.shape)}"
                )
        fresh = not found and not owner.has_states
        weight = match.model.get(first)
        if MASTER in owner.states and MASTER not in found and weight is not None and weight.dtype in _HIGH:
            fitting[MASTER] = weight
            match.instead["optimizer", first, MASTER] = ("model", first)
        if fresh or wanted <= set(fitting):  # all or none: moments beside fresh ones would be wrong without an error
            match.states[first] = fitting


def _kind(dtype: str) -> str:
    """Values can be converted within a kind of dtype."""
    return next((kind for kind in ("float", "complex", "bool") if kind in dtype), "int")

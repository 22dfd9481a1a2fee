"""Which entry of a whole optimizer state belongs to which parameter, and what is wrong with the rest.

Keys are ``<parameter name>[_fp32_master_0]_<state>_<number>``; the number tells how many optimizers the writing process
had made before and means nothing here.  Masters stand under ``master_weights``, by parameter name or by that name with
``_fp32_master_0``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Optional

import numpy as np
import paddle

from ..errors import CheckpointError, UsageError
from .state import StateSpec, whole_shape

__all__ = ["MASTER_SUFFIX", "Found", "Owner", "fingerprint", "is_array", "match_states", "split_key", "values_differ"]

MASTER_SUFFIX = "_fp32_master_0"


class Owner(NamedTuple):
    """A parameter that states may belong to."""

    label: str  # in messages
    shape: list[int]
    specs: Mapping[str, StateSpec]  # the states that it has or would get
    has_states: bool


class Found(NamedTuple):
    """What is there, by parameter name."""

    states: dict[str, dict[str, Any]]  # then by state name
    masters: dict[str, Any]
    scheduler: Optional[Mapping[str, Any]]
    fresh: list[str]  # labels of the parameters without any state
    more: dict[str, dict[str, Any]]  # then by key: states that a user's rule will make in its own time


def split_key(key: str, names: Iterable[str]) -> Optional[tuple[str, str]]:
    """The longest of ``names`` (a set or a mapping) that ``key`` begins with, up to an underscore, and the rest."""
    end = len(key)
    while end > 0:
        if key[:end] in names:
            return key[:end], key[end:]
        end = key.rfind("_", 0, end)
    return None


def is_array(value: Any) -> bool:
    """Whether ``value`` is a tensor or an array."""
    return isinstance(value, (paddle.Tensor, np.ndarray))


def fingerprint(state: Mapping[str, Any]) -> int:
    """A checksum of names and values: ranks that were given the same state have the same one."""
    checksum = 0
    for name, value in state.items():
        if isinstance(value, Mapping):
            content = str(fingerprint(value)).encode()
        elif is_array(value):
            content = np.ascontiguousarray(value.numpy() if isinstance(value, paddle.Tensor) else value).tobytes()
        else:
            content = repr(value).encode()
        checksum = zlib.crc32(content, zlib.crc32(name.encode(), checksum))
    return checksum


def values_differ(rank: int, checksum: int, other: int, other_checksum: int) -> UsageError:
    """The error where two ranks' fingerprints differ."""
    return UsageError(
        f"rank {rank} and rank {other} give different values (their checksums are {checksum:08x} and "
        f"{other_checksum:08x}); load the same state on every rank"
    )


def match_states(
    state_dict: Mapping[str, Any],
    owners: Mapping[str, Owner],
    has_scheduler: bool,
    source: str,
    partial: bool = False,
    may_have_more: bool = False,
) -> Found:
    """Sort ``state_dict`` by ``owners`` (by parameter name); :class:`CheckpointError` names each entry that is wrong.

    Entries of parameters that are not among the owners are left alone.  An owner may have no state in the file (it was
    never stepped) if it has none here either.  ``partial``: what is there is only a part, so nothing is missed.
    ``may_have_more``: the optimizer may make states of which it does not tell before its first step.
    """
    entries = {key: value for key, value in state_dict.items() if key != "LR_Scheduler" and key != "master_weights"}
    scheduler = state_dict.get("LR_Scheduler")
    states: dict[str, dict[str, Any]] = {}
    more: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for key, value in entries.items():
        parts = split_key(key, owners)
        if parts is None or key.endswith(".SCALE_VALUE"):  # what an XPU keeps beside a state
            continue
        name, state = parts[0], _state_name(parts[1], owners[parts[0]].specs)
        spec = owners[name].specs.get(state)
        if spec is None:
            if may_have_more and is_array(value) and not owners[name].has_states:
                more.setdefault(name, {})[key] = value
            else:
                problems.append(f"unexpected: {key}")
            continue
        states.setdefault(name, {})[state] = value
        problems += _shape_problem(key, value, whole_shape(spec, owners[name].shape), spec.scalar)
    masters = _match_masters(state_dict.get("master_weights") or {}, owners, problems)
    for name, owner in owners.items():
        here = states.get(name, {})
        if here or (owner.has_states and not partial):
            problems += [f"missing: {name}_{state}_0" for state in owner.specs if state not in here]
    if has_scheduler and scheduler is None and not partial:
        problems.append("missing: LR_Scheduler, the state of the learning rate's scheduler")
    if entries and not states and not partial and any(owner.specs for owner in owners.values()):
        problems.append(
            f"no entry belongs to a parameter of this optimizer; there is {next(iter(entries))!r}, "
            f"expected names such as {next(iter(owners))!r}"
        )
    if problems:
        raise CheckpointError(f"{source} does not fit the optimizer; " + "; ".join(problems))
    fresh = [owner.label for name, owner in owners.items() if owner.specs and name not in states]
    return Found(states, masters, scheduler, fresh if states else [], more)


def _state_name(rest: str, specs: Mapping[str, StateSpec]) -> str:
    if rest.startswith(MASTER_SUFFIX):
        rest = rest[len(MASTER_SUFFIX) :]
    state = rest[1:]
    stem, _, number = state.rpartition("_")
    return stem if number.isdigit() and state not in specs else state


def _match_masters(entries: Any, owners: Mapping[str, Owner], problems: list[str]) -> dict[str, Any]:
    if not isinstance(entries, Mapping):
        problems.append(f"master_weights: expected a dict, got {type(entries).__name__}")
        return {}
    masters = {}
    for key, value in entries.items():
        name = key[: -len(MASTER_SUFFIX)] if key.endswith(MASTER_SUFFIX) else key
        if name in owners:
            masters[name] = value
            problems += _shape_problem(f"master_weights {key}", value, owners[name].shape, scalar=False)
    return masters


def _shape_problem(key: str, value: Any, expected: list[int], scalar: bool) -> list[str]:
    if not is_array(value):
        return [f"{key}: expected a tensor of shape {expected}, got {type(value).__name__}"]
    shape = list(value.shape)
    if shape == expected or (scalar and int(np.prod(shape)) == 1):
        return []
    return [f"{key}: expected shape {expected}, got {shape}"]

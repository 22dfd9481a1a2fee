"""The words that a schedule is written in: :class:`Kind`, :class:`Action` and :class:`Plan`, each with a text form.

A plan is data.  Whoever makes it (a schedule function, a pass of :mod:`.lowering`, a file) and whoever reads it (the
simulator, the printer, the runner) share nothing but the types of this module.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, Optional, Union

from ..errors import UsageError

__all__ = ["Kind", "Action", "Plan", "round_robin"]


class Kind(Enum):
    """What an action does.

    ==========  ==================================================================================================
    ``F``       forward of one micro-batch
    ``B``       whole backward: gradients of the input and of the weights
    ``I``       the first half of a split backward: gradient of the input, all that the stage before waits for
    ``W``       the second half: gradients of the weights, at any time after ``I``
    ``SEND_F``  hand the output of ``F`` to the channel of the next stage's rank; does not wait
    ``RECV_F``  wait for that output: the input of this stage
    ``SEND_B``  hand the gradient of this stage's input to the channel of the previous stage's rank; does not wait
    ``RECV_B``  wait for that gradient: the gradient of this stage's output
    ``REDUCE``  sum the gradients of a stage's weights over the data-parallel replicas; has no micro-batch
    ==========  ==================================================================================================
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the letter that the zero-bubble paper and the text form of an action use
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"

    __hash__ = object.__hash__  # members are singletons; the hash of an Enum is slow, and plans are full of them

    def __init__(self, letters: str) -> None:
        self.is_compute = letters in ("F", "B", "I", "W")
        self.is_send = letters.startswith("SEND")  # puts a message into a channel
        self.is_recv = letters.startswith("RECV")  # waits for a message


_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE|F|B|I|W)(\d*)")


class Action(NamedTuple):
    """One step of one rank: ``str(Action(2, Kind.F, 0)) == "2F0"``, and :meth:`parse` inverts it."""

    stage: int  # virtual stage that the step belongs to
    kind: Kind
    micro_batch: Optional[int]  # None for REDUCE alone

    def __str__(self) -> str:
        """Such as ``2F0``."""
        return f"{self.stage}{self.kind.value}{'' if self.micro_batch is None else self.micro_batch}"

    def __repr__(self) -> str:
        """As :meth:`__str__`, so that lists of actions read well."""
        return str(self)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action such as ``2F0``, ``1RECV_B3`` or ``2REDUCE``; raises :class:`UsageError` for other text."""
        match = _ACTION.fullmatch(text.strip())
        if match is None or bool(match[3]) == (match[2] == "REDUCE"):
            raise UsageError(
                f"an action is written <stage><kind><micro-batch>, such as 2F0, with one of the kinds "
                f"{', '.join(kind.value for kind in Kind)} (REDUCE has no micro-batch); got {text.strip()!r}"
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]) if match[3] else None)

    @property
    def counterpart(self) -> Action:
        """What stands at the other end of a transfer: ``1SEND_F0`` and ``2RECV_F0``, ``2SEND_B0`` and ``1RECV_B0``."""
        if self.kind not in _COUNTERPART:
            raise UsageError(f"only transfers have a counterpart; {self} is none")
        kind, step = _COUNTERPART[self.kind]
        return Action(self.stage + step, kind, self.micro_batch)


_COUNTERPART = MappingProxyType(
    {
        Kind.SEND_F: (Kind.RECV_F, 1),
        Kind.RECV_F: (Kind.SEND_F, -1),
        Kind.SEND_B: (Kind.RECV_B, -1),
        Kind.RECV_B: (Kind.SEND_B, 1),
    }
)


def round_robin(num_ranks: int, num_chunks: int = 1) -> tuple[int, ...]:
    """Rank of each virtual stage when chunks are dealt in turns: 2 ranks with 2 chunks give ``(0, 1, 0, 1)``."""
    return tuple(range(num_ranks)) * num_chunks


@dataclass(frozen=True)
class Plan:
    """Every rank's actions, in the order in which the rank takes them.

    A plan is well formed by construction: every action stands on the rank that holds its stage, every rank has
    actions, every stage and micro-batch occurs.  Whether it can run is the question of :func:`.simulate.check`.
    """

    actions: tuple[tuple[Action, ...], ...]  # one row per rank
    stage_to_rank: tuple[int, ...]  # rank that holds each virtual stage
    num_micro_batches: int

    def __post_init__(self) -> None:
        """Prove that the plan is well formed."""
        for rank, row in enumerate(self.actions):
            if not row:
                raise UsageError(f"rank {rank} of the plan has no actions; leave it out or give it work")
            for action in row:
                self._check_place(action, rank)
        named = {action.stage for row in self.actions for action in row}
        seen = {action.micro_batch for row in self.actions for action in row} - {None}
        if len(named) != self.num_virtual_stages or len(seen) != self.num_micro_batches:
            raise UsageError(
                f"expected actions for {self.num_virtual_stages} stages and {self.num_micro_batches} micro-batches, "
                f"got actions for stages {sorted(named)} and micro-batches {sorted(m for m in seen if m is not None)}"
            )

    def _check_place(self, action: Action, rank: int) -> None:
        if not 0 <= action.stage < self.num_virtual_stages:
            raise UsageError(f"{action} on rank {rank}: stages go from 0 to {self.num_virtual_stages - 1}")
        if self.stage_to_rank[action.stage] != rank:
            raise UsageError(
                f"{action} stands on rank {rank}, but stage {action.stage} is held by rank "
                f"{self.stage_to_rank[action.stage]}; move it there"
            )
        if (action.micro_batch is None) != (action.kind is Kind.REDUCE):
            raise UsageError(f"{action} on rank {rank}: every kind but REDUCE has a micro-batch, and REDUCE has none")
        if action.micro_batch is not None and not 0 <= action.micro_batch < self.num_micro_batches:
            raise UsageError(f"{action} on rank {rank}: micro-batches go from 0 to {self.num_micro_batches - 1}")

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.actions)

    @property
    def num_virtual_stages(self) -> int:
        """Number of virtual stages over all ranks."""
        return len(self.stage_to_rank)

    @property
    def has_transfers(self) -> bool:
        """Whether the plan says what is sent and received; plans of schedules only say what is computed."""
        return any(action.kind.is_send or action.kind.is_recv for row in self.actions for action in row)

    @property
    def has_backward(self) -> bool:
        """False for a plan that only evaluates."""
        return any(action.kind in (Kind.B, Kind.I, Kind.W) for row in self.actions for action in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Virtual stages that ``rank`` holds, in model order."""
        return tuple(stage for stage, holder in enumerate(self.stage_to_rank) if holder == rank)

    def peer(self, action: Action) -> Optional[int]:
        """Rank at the other end of a transfer; None where there is nothing to transfer.

        There is nothing to transfer before the first stage, after the last one, and between two stages of one rank.
        """
        other = action.stage + _COUNTERPART[action.kind][1]
        if not 0 <= other < len(self.stage_to_rank):
            return None
        rank = self.stage_to_rank[other]
        return None if rank == self.stage_to_rank[action.stage] else rank

    def __str__(self) -> str:
        """One line per rank, ``rank 0: 0F0 0F1 0B0``, which :meth:`parse` reads back."""
        return "\n".join(f"rank {rank}: " + " ".join(map(str, row)) for rank, row in enumerate(self.actions))

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read the text form.  Empty lines and what follows a ``#`` are skipped; ranks may come in any order."""
        rows: dict[int, list[Action]] = {}
        for number, line in enumerate(text.splitlines(), 1):
            content = line.partition("#")[0].strip()
            if not content:
                continue
            head = re.match(r"rank\s+(\d+)\s*:", content)
            if head is None or int(head[1]) in rows:
                raise UsageError(f"line {number}: expected 'rank <n>: <actions>', once per rank, got {line!r}")
            rows[int(head[1])] = [Action.parse(word) for word in content[head.end() :].split()]
        return cls.from_rows(rows)

    def to_csv(self) -> str:
        """One row per rank, one action per cell, no header."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(self.actions)
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> Plan:
        """Read :meth:`to_csv`'s form; empty cells are skipped, so rows may be padded to a grid of time steps."""
        table = [row for row in csv.reader(io.StringIO(text)) if row]
        return cls.from_rows({rank: [Action.parse(c) for c in row if c.strip()] for rank, row in enumerate(table)})

    @classmethod
    def from_rows(cls, rows: Union[Mapping[int, Iterable[Action]], Sequence[Iterable[Action]]]) -> Plan:
        """Build a plan from each rank's actions; who holds a stage and how many micro-batches follow from them."""
        by_rank = dict(rows.items() if isinstance(rows, Mapping) else enumerate(rows))
        actions = {rank: tuple(row) for rank, row in by_rank.items()}
        holder = {action.stage: rank for rank in sorted(actions, reverse=True) for action in actions[rank]}
        batches = {a.micro_batch for row in actions.values() for a in row if a.micro_batch is not None}
        for what, found in (("ranks", set(actions)), ("stages", set(holder)), ("micro-batches", batches)):
            if found != set(range(len(found))) or not found:
                raise UsageError(f"the {what} of a plan are numbered from 0 without gaps; got {sorted(found)}")
        return cls(
            actions=tuple(actions[rank] for rank in range(len(actions))),
            stage_to_rank=tuple(holder[stage] for stage in range(len(holder))),
            num_micro_batches=len(batches),
        )

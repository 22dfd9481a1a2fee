"""What became of each rank in one case, and how a failure of them reads."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any, Union

__all__ = ["Ended", "Hung", "Outcome", "Raised", "RankFailure", "Returned", "exit_text", "failure_text"]

_MAX_OUTPUT_LINES = 80


class RankFailure(AssertionError):
    """A case did not end as expected on every rank; the message shows each rank."""


@dataclasses.dataclass(frozen=True)
class Returned:
    """The function returned."""

    value: Any

    def __str__(self) -> str:
        return "returned"


@dataclasses.dataclass(frozen=True)
class Raised:
    """The function raised; ``traceback`` is the text that Python prints."""

    traceback: str

    def __str__(self) -> str:
        return "raised\n" + self.traceback.rstrip()


@dataclasses.dataclass(frozen=True)
class Ended:
    """The process ended during the case; ``code`` is negative for a signal."""

    code: int

    def __str__(self) -> str:
        return exit_text(self.code)


@dataclasses.dataclass(frozen=True)
class Hung:
    """The process still ran when the wait was over; it has been killed since."""

    seconds: float
    stacks: str

    def __str__(self) -> str:
        return f"still running after {self.seconds:.1f} s, killed; its stacks were\n{self.stacks.rstrip()}"


Outcome = Union[Returned, Raised, Ended, Hung]


def exit_text(code: int) -> str:
    """An exit code as ``ended with exit code 3`` or ``ended by SIGKILL (exit code -9)``."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"ended by {name} (exit code {code})"


def failure_text(case: str, outcomes: dict[int, Outcome], expect_exit: dict[int, int], outputs: dict[int, str]) -> str:
    """The whole story of a failed case, one section per rank, then the end of each rank's output."""
    sections = [f"{case} failed on {len(outcomes)} rank(s)"]
    for rank, outcome in sorted(outcomes.items()):
        expected = f" (expected: {exit_text(expect_exit[rank])})" if rank in expect_exit else ""
        sections.append(f"--- rank {rank}{expected}: {outcome}")
    for rank, output in sorted(outputs.items()):
        lines = output.rstrip().splitlines()
        if not lines:
            continue
        skipped = len(lines) - _MAX_OUTPUT_LINES
        head = f"--- output of rank {rank}" + (
            f" (last {_MAX_OUTPUT_LINES} of {len(lines)} lines)" if skipped > 0 else ""
        )
        sections.append("\n".join([head, *lines[-_MAX_OUTPUT_LINES:]]))
    return "\n".join(sections)

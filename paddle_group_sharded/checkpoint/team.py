"""The ranks that save or load together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable, Optional

import paddle

from ..comm import Comm, create_comm
from ..comm.agreement import agree
from ..errors import CheckpointError, GroupShardedError

__all__ = ["Team", "world_team"]


class Team:
    """All ranks that call together, numbered from 0; ``comms`` are axes of a grid that connect them."""

    def __init__(self, comms: Sequence[Comm]) -> None:
        """The first axis is the one along which ranks are numbered first."""
        self._comms = tuple(comms)
        self.rank, self.world_size = 0, 1
        for comm in comms:
            self.rank += comm.rank * self.world_size
            self.world_size *= comm.world_size

    def exchange(self, value: Any, label: str) -> list[Any]:
        """Every rank's ``value`` (picklable), by rank.  Collective."""
        values = [value]
        for comm in self._comms:
            values = [item for part in comm.exchange(values, label) for item in part]
        return values

    def together(self, action: Callable[[], Any], label: str) -> Any:
        """What ``action`` returns on this rank, after all ranks have run it; or raise what one has raised.  Collective.

        Errors of the system, such as a full disk, become :class:`CheckpointError`.
        """
        problem: Optional[GroupShardedError] = None
        result = None
        try:
            result = action()
        except GroupShardedError as error:
            problem = error
        except OSError as error:
            name = error.filename or "the checkpoint"
            problem = CheckpointError(f"{label}: {name}: {error.strerror or error}")
        except Exception as error:
            problem = CheckpointError(f"{label}: {type(error).__name__}: {error}")
            problem.__cause__ = error
        agree(self._comms, label, problem)
        return result


def world_team() -> Team:
    """All ranks of the launch."""
    return Team((_world_comm(),))


@functools.lru_cache(maxsize=1)  # sockets of a group are never given back, so one group serves all saves of a process
def _open_world(initialized: bool) -> Comm:
    return create_comm(None)


def _world_comm() -> Comm:
    return _open_world(paddle.distributed.is_initialized())

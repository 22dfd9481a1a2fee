"""The command line: ``python -m paddle_group_sharded <command>``.

Each part of the package registers its own commands: a function that adds sub-parsers, each of which sets ``run`` to a
function from the parsed arguments to the text to print.  The exit status is 0, 1 where a comparison has found a
difference, 2 for an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, Optional

from . import estimate
from .checkpoint import cli as checkpoint
from .checkpoint.compare import Differs
from .errors import GroupShardedError
from .pipeline import cli as pipeline

__all__ = ["main"]

_REGISTER: tuple[Callable[[Any], None], ...] = (checkpoint.register, pipeline.register, estimate.register)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run one command; returns the exit status.  Errors of the package and the system come without a traceback."""
    parser = argparse.ArgumentParser(
        prog="python -m paddle_group_sharded",
        description="Memory, schedules and checkpoints, without launching processes.",
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    for register in _REGISTER:
        register(commands)
    args = parser.parse_args(arguments)
    try:
        text = args.run(args)
        print(text)
    except GroupShardedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'the file'}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 1 if isinstance(text, Differs) else 0


if __name__ == "__main__":
    sys.exit(main())

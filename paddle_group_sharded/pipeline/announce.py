"""Text that each rank shows once: on its standard output, and in log files if there are any."""

from __future__ import annotations

import logging
import sys
from typing import Optional

__all__ = ["announce"]

_LOGGER = logging.getLogger(__package__)


def announce(text: str) -> None:
    """Print ``text``, and give it to the handlers of the package's logger at level INFO.

    Handlers that write to the terminal are left out, as Paddle's are: the text would stand there twice, and the second
    time with a prefix.
    """
    sys.stdout.write(text + "\n")  # at once, so that ranks with one terminal do not mix their lines
    sys.stdout.flush()
    if not _LOGGER.isEnabledFor(logging.INFO):
        return
    record = _LOGGER.makeRecord(_LOGGER.name, logging.INFO, __file__, 0, text, (), None)
    logger: Optional[logging.Logger] = _LOGGER
    while logger is not None:
        for handler in logger.handlers:
            if handler.level <= logging.INFO and not _is_terminal(handler):
                handler.handle(record)
        logger = logger.parent if logger.propagate else None


def _is_terminal(handler: logging.Handler) -> bool:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in streams

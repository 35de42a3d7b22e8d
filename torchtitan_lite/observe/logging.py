"""One logger, and a policy that fits a screen full of ranks.

A thousand ranks saying the same thing is noise, one rank saying nothing about its crash is worse:

    what               who says it
    info, warning      rank 0
    error              every rank, with its number in the line

Lines go to standard error, so that what a script prints as its result can be piped on. Colours
are for terminals only: a file, a pipe or NO_COLOR (https://no-color.org) gets plain text.

Proven in tests/observe/test_logging.py.
"""

from __future__ import annotations

import functools
import logging
import os
import sys

logger = logging.getLogger("torchtitan_lite")

_COLORS = {logging.INFO: "32", logging.WARNING: "33"}  # the others are errors: red


def paint(text: str, code: str, *, color: bool) -> str:
    """`text` wrapped in the terminal colour `code` (an SGR number), or unchanged without either."""
    return f"\x1b[{code}m{text}\x1b[0m" if color and code else text


def use_color(wanted: bool = True) -> bool:
    """Whether log lines may be coloured: wanted, on a terminal, and NO_COLOR not set."""
    return wanted and not os.environ.get("NO_COLOR") and sys.stderr.isatty()


class _Format(logging.Formatter):
    """`12:03:11 INFO     message`; an error also names its rank."""

    def __init__(self, rank: int, *, color: bool) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self.rank = rank
        self.color = color

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname:<8}"
        level = paint(level, _COLORS.get(record.levelno, "31"), color=self.color)
        origin = f"[rank {self.rank}] " if record.levelno >= logging.ERROR else ""
        return f"{self.formatTime(record, self.datefmt)} {level} {origin}{record.message}"


class _Handler(logging.Handler):
    """Writes to whatever sys.stderr is at that moment: test runners put another one there."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")
        sys.stderr.flush()


def init_logging(rank: int, color: bool = True) -> None:
    """Set up `logger` for this rank; a second call replaces the first, and never doubles a line.

    `color` False switches colours off; True leaves them to `use_color`.
    """
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Handler)]:
        logger.removeHandler(handler)
    handler = _Handler()
    handler.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    handler.setFormatter(_Format(rank, color=use_color(color)))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning the first time this process says `message`, and never again."""
    logger.warning(message)

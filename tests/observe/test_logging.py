"""One voice for what all ranks say, every voice for what goes wrong."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from tests.world import run_ranks
from torchtitan_lite.observe.logging import init_logging, logger, use_color, warn_once


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored_logger() -> Iterator[None]:
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    warn_once.cache_clear()


def say_all() -> None:
    logger.debug("detail")
    logger.info("progress")
    logger.warning("beware")
    logger.error("broken")


def lines_of_rank(rank: int) -> list[str]:
    init_logging(rank)
    say_all()
    return sys.stderr.getvalue().splitlines()  # type: ignore[attr-defined]


def rank_main() -> list[str]:
    import os

    sys.stderr = io.StringIO()
    return lines_of_rank(int(os.environ["RANK"]))


def test_rank_0_says_everything_and_the_others_only_their_errors_by_number():
    first, second = run_ranks(rank_main, 2)
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in first] == [
        "INFO     progress",
        "WARNING  beware",
        "ERROR    [rank 0] broken",
    ]
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in second] == [
        "ERROR    [rank 1] broken"
    ]


def test_setting_up_twice_does_not_double_a_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    init_logging(0)
    assert len(lines_of_rank(0)) == 3


def test_lines_go_to_the_standard_error_of_the_moment(monkeypatch):
    init_logging(0)
    for _ in range(2):  # a test runner closes one stream and installs another
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        logger.info("hello")
        assert stream.getvalue().endswith("INFO     hello\n")
        stream.close()


def test_a_foreign_handler_such_as_a_test_runners_still_hears(caplog):
    init_logging(0)
    with caplog.at_level(logging.INFO):
        logger.info("hello")
    assert caplog.messages == ["hello"]


@pytest.mark.parametrize(
    ("stream", "no_color", "wanted", "colored"),
    [
        (Terminal, "", True, True),
        (Terminal, "", False, False),
        (Terminal, "1", True, False),
        (io.StringIO, "", True, False),
    ],
)
def test_colours_need_a_terminal_a_wish_and_no_veto(monkeypatch, stream, no_color, wanted, colored):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stderr", stream())
    assert use_color(wanted) == colored
    init_logging(0, wanted)
    logger.info("hello")
    assert ("\x1b[" in sys.stderr.getvalue()) == colored  # type: ignore[attr-defined]


def test_a_warning_said_once_is_not_said_again(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    init_logging(0)
    for message in ("a", "a", "b", "a"):
        warn_once(message)
    said = [line.split()[-1] for line in sys.stderr.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert said == ["a", "b"]

"""torch is imported once, here; every rank of every test is forked from this process."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.world  # noqa: F401

# Rows that take long beside others of their table that stay: slow proofs, like those marked so.
LONG = Path(__file__).with_name("long_rows.txt").read_text().splitlines()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.removeprefix("tests/") in LONG:
            item.add_marker(pytest.mark.slow)

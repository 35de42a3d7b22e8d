"""The page layout of the source goes, its words and documents stay."""

from __future__ import annotations

from scripts.make_text import FORM_FEED, clean
from tests.data.conftest import ROOT

PROSE = "This line of running prose was broken only because a page ends near here,"

PAGE = f"""
   Table of Contents

   1. A chapter

   Glossary

   :hack: n.

   {PROSE}
   and this is its end.

   +---+
   ┌───┐

   Short lines
   keep their ends.

   :hacker: n. One who hacks.
"""


def test_the_words_of_a_page_stay_and_its_layout_goes() -> None:
    assert clean(PAGE).split("\n\n") == [
        ":hack: n.",
        f"{PROSE} and this is its end.",
        "Short lines\nkeep their ends.",
        f"{FORM_FEED}\n:hacker: n. One who hacks.\n",
    ]


def test_the_shipped_text_is_made_of_documents_without_a_margin() -> None:
    text = (ROOT / "assets" / "text" / "train.txt").read_text(encoding="utf-8")
    assert text.count(FORM_FEED) + 1 == 2314
    assert not [line for line in text.split("\n") if line.startswith("   :")]

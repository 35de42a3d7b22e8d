"""Make assets/text/ from jargon.txt: how the shipped text came to be, as a program.

The source is a page layout. Left are the words: the margin of three spaces, tables drawn with box
characters and lists of contents go, paragraphs that were broken only to fit a page become one
line, verse, code and drawings keep their lines. A document is one lexicon entry or one chapter.
The last twentieth, cut at a paragraph border, is the validation text.

    python scripts/make_text.py jargon.txt assets/text
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

MARGIN = "   "
BOX_CHARACTERS = re.compile("[\u2500-\u257f]")
DOCUMENT_START = re.compile(r"   :\S.*:(?: |$)|(?:Chapter|Appendix) \w+\. |Bibliography$")
CONTENTS_LINE = re.compile(r" {3}[^ :]|Glossary$")
# A line of running prose is broken near column 75: any line but the last is at least this long.
FULL_LINE = 50
VALIDATION_SHARE = 0.05
FORM_FEED = "\f"


def main() -> None:
    parser = argparse.ArgumentParser(description="jargon.txt -> train.txt and validation.txt")
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    text = clean(arguments.source.read_text(encoding="utf-8").replace("\xa0", " "))
    cut = text.index("\n\n", int(len(text) * (1 - VALIDATION_SHARE)))
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, part in (
        ("train.txt", text[:cut] + "\n"),
        ("validation.txt", text[cut:].lstrip("\n" + FORM_FEED)),
    ):
        (arguments.output / name).write_text(part, encoding="utf-8", newline="\n")


def clean(text: str) -> str:
    """The words of the page layout, paragraphs and documents kept apart."""
    kept: list[str] = []
    in_contents = False
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        lines = [line.rstrip() for line in paragraph.split("\n")]
        is_title = lines == [MARGIN + "Table of Contents"]
        in_contents = is_title or (
            in_contents and len(lines) == 1 and CONTENTS_LINE.match(lines[0]) is not None
        )
        if not in_contents and not BOX_CHARACTERS.search(paragraph):
            border = FORM_FEED + "\n" if kept and DOCUMENT_START.match(lines[0]) else ""
            kept.append(border + _join([line.removeprefix(MARGIN) for line in lines]))
    return "\n\n".join(kept) + "\n"


def _join(lines: list[str]) -> str:
    """Running prose as one line; anything else as it is."""
    indents = [len(line) - len(line.lstrip()) for line in lines]
    hanging = indents[0] + 2 * lines[0].lstrip().startswith("•")
    is_prose = all(len(line) >= FULL_LINE for line in lines[:-1])
    if not is_prose or any(indent != hanging for indent in indents[1:]):
        return "\n".join(lines)
    return " " * indents[0] + " ".join(line.strip() for line in lines)


if __name__ == "__main__":
    main()

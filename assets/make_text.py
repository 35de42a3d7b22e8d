"""Makes assets/text/ from jargon.txt: how the shipped text came to be, as a program.

The source is a page layout: a left margin of three spaces, lines broken at 75 columns, tables
drawn with box characters, lists of contents. Left are the words: margins, drawn tables and lists
of contents go, paragraphs that were broken only to fit a page become one line, verse, code and
drawings keep their lines. Documents (one lexicon entry, or one chapter) are separated by a form
feed. The last twentieth, cut at a paragraph border, is the validation text.

    python assets/make_text.py jargon.txt assets/text
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

MARGIN = "   "
BOX_CHARACTERS = re.compile("[\u2500-\u257f═]")
DOCUMENT_START = re.compile(r"^(?:   :\S.*:(?: |$)|(?:Chapter|Appendix) \w+\. |Bibliography$)")
# A line of running prose is broken near column 75: any line but the last is at least this long.
FULL_LINE = 50
VALIDATION_SHARE = 0.05
FORM_FEED = "\f"


def main() -> None:
    parser = argparse.ArgumentParser(description="jargon.txt -> train.txt and validation.txt")
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    text = arguments.source.read_text(encoding="utf-8").replace("\xa0", " ")
    train, validation = split(clean(text))
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "train.txt").write_text(train, encoding="utf-8", newline="\n")
    (arguments.output / "validation.txt").write_text(validation, encoding="utf-8", newline="\n")


def clean(text: str) -> str:
    """The words of the page layout, paragraphs separated by one empty line."""
    kept: list[str] = []
    in_contents = False
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        lines = [line.rstrip() for line in paragraph.split("\n")]
        if lines == [MARGIN + "Table of Contents"]:
            in_contents = True
            continue
        in_contents = in_contents and _is_contents_line(lines)
        if in_contents or any(BOX_CHARACTERS.search(line) for line in lines):
            continue
        border = FORM_FEED + "\n" if kept and DOCUMENT_START.match(lines[0]) else ""
        kept.append(border + _join(lines))
    return "\n\n".join(kept) + "\n"


def split(text: str) -> tuple[str, str]:
    """(train, validation): nothing lost between them but the empty line at the cut."""
    cut = text.index("\n\n", int(len(text) * (1 - VALIDATION_SHARE)))
    return text[:cut] + "\n", text[cut:].lstrip("\n" + FORM_FEED)


def _is_contents_line(lines: list[str]) -> bool:
    one_title = len(lines) == 1 and re.match(r"^ {3}[^ :]", lines[0]) is not None
    return one_title or lines == ["Glossary"]


def _join(lines: list[str]) -> str:
    lines = [line.removeprefix(MARGIN) for line in lines]
    indents = {len(line) - len(line.lstrip()) for line in lines[1:]}
    first_indent = len(lines[0]) - len(lines[0].lstrip())
    hanging = {first_indent + 2} if lines[0].lstrip().startswith("•") else {first_indent}
    prose = all(len(line) >= FULL_LINE for line in lines[:-1]) and indents <= hanging
    if not prose:
        return "\n".join(lines)
    return " " * first_indent + " ".join(line.strip() for line in lines)


if __name__ == "__main__":
    main()

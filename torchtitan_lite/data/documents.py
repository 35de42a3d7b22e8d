"""Where text comes from: plain text files, jsonl files, a Hugging Face dataset on disk.

    .txt     documents separated by a form feed; without one, the file is one document
    .jsonl   one JSON object a line, the text under `text_column`
    hf       a folder written by `datasets.Dataset.save_to_disk`, the text under `text_column`

All become one stream of pieces. A piece is a document, or a part of one in a .txt file that is
longer than PIECE_SIZE, so that memory stays the same for a file of any size. A long document is cut
before a lone space or behind a lone line end: there byte-level tokenizers cut too, so the tokens
are those of the whole document. (A text without either over half a piece is cut anywhere, at the
cost of a token or two.)

Proven in tests/data/test_documents.py.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from torchtitan_lite.config import ConfigError

logger = logging.getLogger(__name__)

FORM_FEED = "\f"
PIECE_SIZE = 1 << 16  # characters
BORDER = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
SUFFIXES = {".txt": "text", ".jsonl": "jsonl"}
# What a folder of token shards has, and one of a Hugging Face dataset, of one split or of several.
MARKS = {
    "tokens": ("index.json", "tokens-*.bin"),
    "hf": ("state.json", "dataset_info.json", "dataset_dict.json"),
}
SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell it, UTF-8 cannot
SECONDS_BETWEEN_LINES = 10  # of progress, where no terminal shows a bar


class Piece(NamedTuple):
    """A document or a part of one."""

    text: str
    ends_document: bool


@dataclass(frozen=True)
class Source:
    """What to read."""

    kind: str  # text, jsonl, hf, tokens; or auto: each file as its name says
    path: Path
    files: tuple[Path, ...]  # those whose bytes are the source's content, in order
    text_column: str
    key: str  # the configuration key that named it, for messages

    def format_of(self, file: Path) -> str:
        """text, jsonl or hf."""
        return SUFFIXES[file.suffix] if self.kind == "auto" else self.kind


def find_source(kind: str, path: str | Path, *, text_column: str, key: str) -> Source:
    """The source of `kind` (auto, text, jsonl, hf or tokens) at `path`.

    ConfigError when there is nothing of the kind.
    """
    named = f"{key} = {str(path)!r}"
    if not str(path) or not Path(path).exists():
        raise ConfigError(f"{named}: there is no such file or folder")
    path = Path(path)
    if kind == "auto":
        kinds = (kind for kind, names in MARKS.items() if any(any(path.glob(n)) for n in names))
        kind = next(kinds, "auto")
    found = _files_below(path, named) if path.is_dir() else [path]
    if kind == "hf":
        # cache-*: results that the library keeps there, no part of the dataset.
        found = [file for file in found if not file.name.startswith("cache-")]
    elif kind != "tokens" and (kind == "auto" or path.is_dir()):
        wanted = sorted(suffix for suffix, form in SUFFIXES.items() if kind in ("auto", form))
        others = [file for file in found if file.suffix not in wanted]
        found = [file for file in found if file.suffix in wanted]
        if not found:
            raise ConfigError(
                f"{named}: there is no file whose name ends in {' or '.join(wanted)}; rename it, "
                "or say which kind of dataset it is"
            )
        if others:
            logger.warning("%s: reads %d files, and not %d others", named, len(found), len(others))
    return Source(kind, path, tuple(found), text_column, key)


def _files_below(folder: Path, named: str) -> list[Path]:
    """Every file below `folder`, links followed; a part that cannot be read is an error."""

    def refuse(error: OSError) -> None:
        raise ConfigError(f"{named}: {error.filename}: {error.strerror}") from error

    files = [
        Path(parent) / name
        for parent, _, names in os.walk(folder, onerror=refuse, followlinks=True)
        for name in names
    ]
    for file in files:
        if not file.exists():
            raise ConfigError(f"{named}: {file} is a link to nothing")
    return sorted(files)


def read_pieces(source: Source) -> Iterator[Piece]:
    """Every document of the source, in order, the empty ones too; shows how far it is."""
    if source.kind == "hf":
        yield from _hf_pieces(source)
        return
    done, size = 0, sum(file.stat().st_size for file in source.files)
    with _progress(total=size, unit="B") as bar:
        for file in source.files:
            read = _text_pieces if source.format_of(file) == "text" else _jsonl_pieces
            with open(file, "rb") as raw:
                stream = TextIOWrapper(raw, encoding="utf-8-sig", newline="\n")
                try:
                    for piece in read(stream, source):
                        yield piece
                        bar.update(done + raw.tell() - bar.n)
                except UnicodeDecodeError as error:
                    place = raw.tell() - len(error.object) + error.start
                    raise ConfigError(
                        f"{source.key}: {file} is not UTF-8 at byte {place} ({error.reason}); "
                        "convert or repair it"
                    ) from error
            done += file.stat().st_size


def _progress(*arguments: Any, **options: Any) -> Any:
    from tqdm import tqdm

    seconds = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
    return tqdm(*arguments, desc="tokenising", unit_scale=True, mininterval=seconds, **options)


def _text_pieces(stream: TextIO, source: Source) -> Iterator[Piece]:
    """Documents between form feeds, without the line ends around them."""
    rest, inside = "", False
    block = FORM_FEED
    while block:
        block = stream.read(PIECE_SIZE)
        *whole, rest = (rest + (block or FORM_FEED)).split(FORM_FEED)
        for document in whole:
            yield Piece(document.rstrip("\n") if inside else document.strip("\n"), True)
            inside = False
        while len(rest) > 2 * PIECE_SIZE:
            border = _border(rest)
            yield Piece(rest[:border] if inside else rest[:border].lstrip("\n"), False)
            rest, inside = rest[border:], True


def _border(text: str) -> int:
    """Where the first piece of `text` ends: at the last border in it, else at its full size."""
    borders = BORDER.finditer(text, PIECE_SIZE // 2, PIECE_SIZE)
    return max((border.start() for border in borders), default=PIECE_SIZE)


def _jsonl_pieces(stream: TextIO, source: Source) -> Iterator[Piece]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            place = f"{stream.name} line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{source.key}: {place} is not JSON ({error}); repair or remove the line"
                ) from error
            yield Piece(_text_of(row, source, place), True)


def _hf_pieces(source: Source) -> Iterator[Piece]:
    column = source.text_column
    try:
        import datasets

        rows = datasets.load_from_disk(str(source.path))
        if isinstance(rows, datasets.DatasetDict):
            raise ValueError(f"it has splits, name one of them: {', '.join(sorted(rows))}")
        rows = rows.select_columns([column])
    except Exception as error:  # damaged Arrow and JSON files raise errors of many libraries
        raise ConfigError(
            f"{source.key} = {str(source.path)!r}: `datasets` cannot load it with the column "
            f"training.dataset_text_column = {column!r}: {' '.join(str(error).split())}"
        ) from error
    for number, row in enumerate(_progress(rows, unit=" rows")):
        yield Piece(_text_of(row, source, f"{source.path} row {number}"), True)


def _text_of(row: Any, source: Source, place: str) -> str:
    fields = row if isinstance(row, dict) else {}
    text = fields.get(source.text_column)
    if isinstance(text, str) and not SURROGATE.search(text):
        return text
    kinds = [f"{name} ({type(value).__name__})" for name, value in sorted(fields.items())]
    raise ConfigError(
        f"{source.key}: {place} has no text that UTF-8 can hold in the field "
        f"{source.text_column!r}; it has {', '.join(kinds) or 'no fields'}: name the one with the "
        "text in training.dataset_text_column (prepare_data.py: --text_column)"
    )

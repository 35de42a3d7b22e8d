"""Where text comes from: plain text files, jsonl files, a Hugging Face dataset on disk.

    .txt     documents separated by a form feed; without one, the file is one document
    .jsonl   one JSON object a line, the text under `text_column`
    hf       a folder written by `datasets.Dataset.save_to_disk`, the text under `text_column`

All become one stream of pieces. A piece is a document, or a part of one longer than PIECE_SIZE,
so memory stays the same for a file of any size. A long document is cut before a lone space or
behind a lone line end: there byte-level tokenizers cut too, so the tokens are those of the whole
document. (A text without either for BORDER_WINDOW characters is cut anywhere, at the cost of a
token or two.)

Proven in tests/data/test_documents.py.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lite.config import ConfigError

logger = logging.getLogger(__name__)

FORM_FEED = "\f"
PIECE_SIZE = 1 << 17  # characters
BORDER_WINDOW = 1 << 12  # characters
BLOCK_SIZE = 1 << 20  # bytes read at once
BORDER = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
SUFFIXES = {".txt": "text", ".jsonl": "jsonl"}
HF_FILES = ("dataset_info.json", "state.json")
HF_SPLITS_FILE = "dataset_dict.json"
COLUMN_KEY = "training.dataset_text_column"


class Piece(NamedTuple):
    """A document or a part of one, and how much of the source was read up to its end."""

    text: str
    ends_document: bool
    position: int  # bytes of files, rows of a dataset


@dataclass(frozen=True)
class Source:
    """What to read: the files in order, or the folder of a Hugging Face dataset."""

    kind: str  # "files" or "hf"
    files: tuple[Path, ...]  # those whose bytes are the source's content
    formats: tuple[str, ...]  # of each file: "text", "jsonl" or "hf"
    folder: Path
    text_column: str
    key: str  # the configuration key that named it, for messages

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)


def detect_kind(kind: str, path: Path, *, key: str) -> str:
    """`kind`, or what `path` looks like if it is "auto": text, jsonl, hf, tokens or folder."""
    if not path.exists():
        raise ConfigError(f"{key} = {str(path)!r}: there is no such file or folder")
    if kind != "auto":
        return kind
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ConfigError(
                f"{key} = {str(path)!r}: its name ends neither in .txt nor in .jsonl; rename it, "
                "or say which kind of dataset it is"
            )
        return SUFFIXES[path.suffix]
    if (path / "index.json").is_file() or any(path.glob("tokens-*.bin")):
        return "tokens"
    if any((path / name).is_file() for name in (*HF_FILES, HF_SPLITS_FILE)):
        return "hf"
    return "folder"


def find_source(kind: str, path: Path, *, text_column: str, key: str) -> Source:
    """The source of `kind` (text, jsonl, hf or folder) at `path`."""
    if kind == "hf":
        splits = path / HF_SPLITS_FILE
        if splits.is_file():
            names = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
            raise ConfigError(f"{key} = {str(path)!r}: it has splits ({names}); name one of them")
        if not any((path / name).is_file() for name in HF_FILES):
            raise ConfigError(
                f"{key} = {str(path)!r}: it is no dataset on disk; write one with "
                "datasets' save_to_disk"
            )
        # cache-*: results that the library keeps there, no part of the dataset.
        own = (file for file in path.rglob("*") if not file.name.startswith("cache-"))
        files = tuple(sorted(file for file in own if file.is_file()))
        return Source("hf", files, ("hf",) * len(files), path, text_column, key)
    if path.is_file():
        formats: tuple[str, ...] = (SUFFIXES[path.suffix] if kind == "folder" else kind,)
        return Source("files", (path,), formats, path.parent, text_column, key)
    wanted = {suffix for suffix, form in SUFFIXES.items() if kind in ("folder", form)}
    entries = sorted(file for file in path.rglob("*") if file.is_file())
    files = tuple(file for file in entries if file.suffix in wanted)
    if not files:
        raise ConfigError(
            f"{key} = {str(path)!r}: the folder holds no {' or '.join(sorted(wanted))} file"
        )
    if len(files) < len(entries):
        logger.warning(
            "%s = %s: reads its %d files in %s, not the other %d",
            key,
            path,
            len(files),
            " and ".join(sorted(wanted)),
            len(entries) - len(files),
        )
    formats = tuple(SUFFIXES[file.suffix] for file in files)
    return Source("files", files, formats, path, text_column, key)


def read_pieces(source: Source) -> Iterator[Piece]:
    """Every document of the source, in order, the empty ones too."""
    if source.kind == "hf":
        yield from _hf_pieces(source)
        return
    done = 0
    for file, form in zip(source.files, source.formats, strict=True):
        read = _text_pieces if form == "text" else _jsonl_pieces
        for piece in read(file, source):
            yield piece._replace(position=done + piece.position)
        done += file.stat().st_size


def num_rows(source: Source) -> int:
    """Rows of a Hugging Face dataset, for progress."""
    return len(_load_hf(source))


def _text_pieces(file: Path, source: Source) -> Iterator[Piece]:
    """Documents between form feeds, without the line ends around them."""
    rest, at_start, position, num_whole = "", True, 0, 0
    for block, position in _decoded_blocks(file, source):
        *whole, rest = (rest + block).split(FORM_FEED)
        for document in whole:
            text = document.lstrip("\n") if at_start else document
            yield from _cut(text.rstrip("\n"), position)
            at_start = True
        num_whole += len(whole)
        if at_start:
            rest = rest.lstrip("\n")
        while len(rest) > 2 * PIECE_SIZE:  # twice: the line ends to take off come last
            border = _border(rest)
            yield Piece(rest[:border], False, position)
            rest, at_start = rest[border:], False
    # A form feed that ends the file starts no document.
    if rest.strip() or not at_start or num_whole == 0:
        yield from _cut(rest.rstrip("\n"), position)


def _decoded_blocks(file: Path, source: Source) -> Iterator[tuple[str, int]]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    with open(file, "rb") as stream:
        while True:
            block = stream.read(BLOCK_SIZE)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{source.key}: {file} is not UTF-8 at byte {position - pending + error.start} "
                    f"({error.reason}); convert or repair it"
                ) from error
            position += len(block)
            if not block:
                return
            yield text, position


def _jsonl_pieces(file: Path, source: Source) -> Iterator[Piece]:
    position = 0
    with open(file, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            position += len(line)
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"{source.key}: {file} line {number} is not JSON ({error}); repair or remove "
                    "the line"
                ) from error
            yield from _cut(_text_of(value, source, place=f"{file} line {number}"), position)


def _hf_pieces(source: Source) -> Iterator[Piece]:
    dataset = _load_hf(source)
    if source.text_column not in dataset.column_names:
        _text_of(dict.fromkeys(dataset.column_names), source, place=str(source.folder))
    for number, row in enumerate(dataset.select_columns([source.text_column])):
        yield from _cut(_text_of(row, source, place=f"{source.folder} row {number}"), number + 1)


def _load_hf(source: Source) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{source.key} = {str(source.folder)!r}: the package `datasets` reads it and is not "
            "installed; pip install datasets"
        ) from error
    try:
        return datasets.load_from_disk(str(source.folder))
    except Exception as error:  # damaged Arrow and JSON files raise errors of many libraries
        raise ConfigError(
            f"{source.key} = {str(source.folder)!r}: it does not load as a dataset: "
            f"{' '.join(str(error).split())}"
        ) from error


def _text_of(value: Any, source: Source, *, place: str) -> str:
    column = source.text_column
    if not isinstance(value, dict):
        raise ConfigError(f"{source.key}: {place} is {type(value).__name__}, not a JSON object")
    if column not in value:
        raise ConfigError(
            f"{COLUMN_KEY} = {column!r}: {place} has no such field; it has "
            f"{', '.join(sorted(value)) or 'none'}"
        )
    if not isinstance(value[column], str):
        raise ConfigError(
            f"{COLUMN_KEY} = {column!r}: {place} holds {type(value[column]).__name__} there, no "
            "text"
        )
    text: str = value[column]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{source.key}: {place} is no text that UTF-8 can hold ({error.reason}); repair it"
        ) from error
    return text


def _cut(document: str, position: int) -> Iterator[Piece]:
    """The rest of a document, in pieces of at most PIECE_SIZE."""
    start = 0
    while len(document) - start > PIECE_SIZE:
        border = _border(document, start)
        yield Piece(document[start:border], False, position)
        start = border
    yield Piece(document[start:], True, position)


def _border(text: str, start: int = 0) -> int:
    """Where a piece that begins at `start` ends: at its last border, else at its full size."""
    stop = start + PIECE_SIZE
    # The last border of all is not worth more than a short search, nor is an empty piece a piece.
    search_from = max(stop - BORDER_WINDOW, start + 1)
    borders = [match.start() for match in BORDER.finditer(text, search_from, stop)]
    return borders[-1] if borders else stop

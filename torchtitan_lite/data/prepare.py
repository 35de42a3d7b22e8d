"""Text becomes token shards once, whoever asks and however often.

The shards of a source lie in `<cache>/<hash>`, the hash being that of everything they follow
from: the source's bytes, the tokenizer, the text column, the format. The same data is therefore
found again under any name, and changed data is never mistaken for it.

All ranks of a node call `prepare` before there is a process group, so that no collective can
time out meanwhile. Local rank 0 tokenises into a folder of another name and renames it at the
end; the others wait for the name. A crash leaves only the other name, which counts for nothing
and is cleared by the next start.

    document:  bos, its tokens, eos      (each where the tokenizer has one)

Proven in tests/data/test_prepare.py: one of several processes tokenises, a second start reads the
cache, a killed process leaves nothing that counts.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan_lite.config import ConfigError
from torchtitan_lite.data.documents import (
    Piece,
    Source,
    detect_kind,
    find_source,
    num_rows,
    read_pieces,
)
from torchtitan_lite.data.shards import FORMAT_VERSION, INDEX_NAME, ShardWriter, read_index
from torchtitan_lite.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_POLLS = 0.2
SECONDS_BETWEEN_WAIT_MESSAGES = 30.0
SECONDS_BETWEEN_PROGRESS_LINES = 5.0
# Pieces that are tokenised at once: enough for every thread, little enough for any memory.
BATCH_CHARACTERS = 1 << 21
BATCH_PIECES = 4096
HASH_DIGITS = 24  # 96 bits: no two sources of one cache ever share them
READ_SIZE = 1 << 20


def prepare(
    dataset_kind: str,
    dataset_path: str | Path,
    tokenizer: Tokenizer,
    *,
    cache: str | Path,
    text_column: str,
    key: str = "training.dataset_path",
) -> Path:
    """The folder of token shards of a dataset, tokenised first if it is not yet in `cache`.

    `dataset_kind` is auto, text, jsonl, hf or tokens. `key` is the configuration key that holds
    `dataset_path`; it leads the messages. Raises ConfigError for data that is missing or bad.
    """
    source = open_source(dataset_kind, dataset_path, text_column=text_column, key=key)
    if isinstance(source, Path):
        _check_tokenizer(source, tokenizer, key=key)
        return source
    folder = Path(cache) / content_hash(source, tokenizer)
    if (folder / INDEX_NAME).is_file():
        return folder
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        _make_cache(folder.parent)
        _clear_leftovers(folder)
        tokenise(source, tokenizer, folder)
    else:
        _wait_for(folder)
    return folder


def open_source(
    dataset_kind: str, dataset_path: str | Path, *, text_column: str, key: str
) -> Source | Path:
    """What `dataset_path` is: text to tokenise, or the path of a folder of token shards."""
    if not str(dataset_path):
        raise ConfigError(f"{key} is empty: name a .txt or .jsonl file, or a folder")
    path = Path(dataset_path)
    assert dataset_kind != "synthetic", "synthetic rows come from no file"
    kind = detect_kind(dataset_kind, path, key=key)
    if kind == "tokens":
        return path
    return find_source(kind, path, text_column=text_column, key=key)


def content_hash(source: Source, tokenizer: Tokenizer) -> str:
    """Name of the shards of `source`: equal for equal content, wherever the files lie."""
    uses_column = any(form != "text" for form in source.formats)
    digest = hashlib.sha256()
    parts = (
        FORMAT_VERSION,
        tokenizer.sha256,
        tokenizer.bos_id,
        tokenizer.eos_id,
        source.text_column if uses_column else "",
    )
    digest.update(repr(parts).encode())
    for file, form in zip(source.files, source.formats, strict=True):
        digest.update(f"{form}:{file.stat().st_size}:".encode())
        with open(file, "rb") as stream:
            while block := stream.read(READ_SIZE):
                digest.update(block)
    return digest.hexdigest()[:HASH_DIGITS]


def tokenise(source: Source, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Write the shards of `source` as `folder`; return their index. Memory is constant."""
    logger.info("tokenising %s (%s bytes)", _place(source), f"{source.size:,}")
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    if not bos and not eos:
        logger.warning("the tokenizer has no begin and no end token: documents run together")
    total = num_rows(source) if source.kind == "hf" else source.size
    progress = _Progress(total, unit="rows" if source.kind == "hf" else "B")
    in_document = False
    with (
        progress,
        ShardWriter(
            folder, vocab_size=tokenizer.vocab_size, tokenizer_sha256=tokenizer.sha256
        ) as writer,
    ):
        index = writer.index
        for pieces in _batches(read_pieces(source)):
            batch_ids = tokenizer.encode_batch([piece.text for piece in pieces])
            for piece, ids in zip(pieces, batch_ids, strict=True):
                if not in_document and piece.ends_document and not piece.text.strip():
                    index["num_empty_documents"] += 1
                    continue
                end = eos if piece.ends_document else []
                writer.add([*([] if in_document else bos), *ids, *end])
                in_document = not piece.ends_document
                index["num_documents"] += piece.ends_document
                index["text_bytes"] += len(piece.text.encode())
            progress.reach(pieces[-1].position)
        if index["num_tokens"] == 0:
            raise ConfigError(f"{source.key}: {_place(source)} holds no text; name another")
    logger.info(
        "%s tokens of %s documents (%s more were empty) in %s",
        f"{index['num_tokens']:,}",
        f"{index['num_documents']:,}",
        f"{index['num_empty_documents']:,}",
        folder,
    )
    return index


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS or len(batch) == BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _wait_for(folder: Path) -> None:
    """Return once `folder` is whole. No time limit: the launcher ends us if local rank 0 fails."""
    started = last_message = time.monotonic()
    while not (folder / INDEX_NAME).is_file():
        time.sleep(SECONDS_BETWEEN_POLLS)
        elapsed = time.monotonic() - started
        if time.monotonic() - last_message >= SECONDS_BETWEEN_WAIT_MESSAGES:
            last_message = time.monotonic()
            logger.info("waiting for local rank 0 to tokenise into %s: %.0f s", folder, elapsed)


def _make_cache(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"training.token_cache = {str(cache)!r}: it cannot be made ({error.strerror}); name a "
            "folder that can be written"
        ) from error


def _clear_leftovers(folder: Path) -> None:
    """Remove what processes of this host left of `folder` when they died."""
    prefix = f"{folder.name}.tmp-{socket.gethostname()}-"
    for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
        process = leftover.name.removeprefix(prefix)
        if process.isdigit() and not _is_alive(int(process)):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # alive, and another user's
        return True
    return True


def _check_tokenizer(folder: Path, tokenizer: Tokenizer, *, key: str) -> None:
    made_with = read_index(folder, key=key).get("tokenizer_sha256")
    if made_with and made_with != tokenizer.sha256:
        raise ConfigError(
            f"{key} = {str(folder)!r}: its tokens were made with another tokenizer.json (sha256 "
            f"{made_with[:12]}) than model.hf_assets_path holds ({tokenizer.sha256[:12]}); use "
            "that one, or prepare the text again with scripts/prepare_data.py"
        )


def _place(source: Source) -> Path:
    return source.files[0] if len(source.files) == 1 else source.folder


class _Progress:
    """A bar on a terminal, else a line every few seconds."""

    def __init__(self, total: int, *, unit: str) -> None:
        self._total = total
        self._unit = unit
        self._reached = 0
        self._bar: Any = None
        self._last_line = time.monotonic()

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit=self._unit, unit_scale=True, desc="tokenising")
        return self

    def reach(self, position: int) -> None:
        """Show that `position` of the total is done."""
        if self._bar is not None:
            self._bar.update(position - self._reached)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_PROGRESS_LINES:
            self._last_line = time.monotonic()
            share = 100 * position / max(self._total, 1)
            logger.info("tokenising: %.0f %% (%s %s)", share, f"{position:,}", self._unit)
        self._reached = position

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

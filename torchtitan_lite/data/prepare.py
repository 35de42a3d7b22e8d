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
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from torchtitan_lite.config import ConfigError
from torchtitan_lite.data.documents import Source, find_source, read_pieces
from torchtitan_lite.data.shards import FORMAT_VERSION, INDEX_NAME, read_index, write_shards
from torchtitan_lite.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_POLLS = 0.2
# Tokenised at once: enough for every thread, little enough for any memory.
BATCH_PIECES = 64
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
    source = find_source(dataset_kind, dataset_path, text_column=text_column, key=key)
    if source.kind == "tokens":
        made_with = read_index(source.path, key=key).get("tokenizer_sha256")
        if made_with and made_with != tokenizer.sha256:
            raise ConfigError(
                f"{key} = {str(source.path)!r}: its tokens were made with another tokenizer.json "
                f"(sha256 {made_with[:12]}) than model.hf_assets_path holds "
                f"({tokenizer.sha256[:12]}); use that one, or prepare the text again with "
                "scripts/prepare_data.py"
            )
        return source.path
    try:
        folder = Path(cache) / content_hash(source, tokenizer)
        index = folder / INDEX_NAME
        if os.environ.get("LOCAL_RANK", "0") == "0" and not index.is_file():
            _clear_leftovers(folder)
            tokenise(source, tokenizer, folder)
        while not index.is_file():  # no time limit: the launcher ends us if local rank 0 fails
            time.sleep(SECONDS_BETWEEN_POLLS)
    except OSError as error:  # no access to the data or to the cache, or a full disk
        raise ConfigError(
            f"{key} = {str(dataset_path)!r} cannot be tokenised into training.token_cache = "
            f"{str(cache)!r}: {error}; name another path or make room"
        ) from error
    return folder


def content_hash(source: Source, tokenizer: Tokenizer) -> str:
    """Name of the shards of `source`: equal for equal content, wherever the files lie."""
    formats = [(source.format_of(file), file.stat().st_size) for file in source.files]
    tokens = (tokenizer.sha256, tokenizer.bos_id, tokenizer.eos_id)
    column = source.text_column if any(form != "text" for form, _ in formats) else ""
    digest = hashlib.sha256(repr((FORMAT_VERSION, tokens, column, formats)).encode())
    for file in source.files:
        with open(file, "rb") as stream:
            while block := stream.read(READ_SIZE):
                digest.update(block)
    return digest.hexdigest()[:HASH_DIGITS]


def tokenise(source: Source, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the shards of `source` as `folder`. Memory is constant."""
    logger.info("tokenising %s", source.path)
    if tokenizer.bos_id is None and tokenizer.eos_id is None:
        logger.warning("the tokenizer has no begin and no end token: documents run together")
    notes = {"tokenizer_sha256": tokenizer.sha256, "num_empty_documents": 0}
    index = write_shards(
        folder, _tokens(source, tokenizer, notes), vocab_size=tokenizer.vocab_size, notes=notes
    )
    logger.info(
        f"{index['num_tokens']:,} tokens of {index['num_documents']:,} documents "
        f"({index['num_empty_documents']:,} more were empty) in {folder}"
    )


def _tokens(
    source: Source, tokenizer: Tokenizer, notes: dict[str, Any]
) -> Iterator[tuple[list[int], list[int]]]:
    """Batches of token ids, each with the ends of documents in it; counts empty ones in `notes`."""
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    stream, in_document, found = read_pieces(source), False, False
    while pieces := list(islice(stream, BATCH_PIECES)):
        tokens: list[int] = []
        ends: list[int] = []
        encoded = tokenizer.encode_batch([piece.text for piece in pieces])
        for (text, ends_document), ids in zip(pieces, encoded, strict=True):
            if ends_document and not in_document and not text.strip():
                notes["num_empty_documents"] += 1
                continue
            tokens += [*([] if in_document else bos), *ids, *(eos if ends_document else [])]
            if ends_document:
                ends.append(len(tokens))
            in_document, found = not ends_document, True
        yield tokens, ends
    if not found:
        raise ConfigError(
            f"{source.key} = {str(source.path)!r}: it holds no text; name a source that does"
        )


def _clear_leftovers(folder: Path) -> None:
    """Remove what processes of this host left of `folder` when they died."""
    for leftover in folder.parent.glob(f"{folder.name}.tmp-{socket.gethostname()}-*"):
        try:
            os.kill(int(leftover.name.rpartition("-")[2]), 0)
        except ProcessLookupError:
            shutil.rmtree(leftover, ignore_errors=True)
        except PermissionError:
            continue  # alive, and another user's

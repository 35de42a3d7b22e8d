"""Token shards: a folder of flat files of token ids, and an index that says what they hold.

    tokens-00000.bin   uint16 or uint32, little endian, one id after the other
    tokens-00001.bin   the stream goes on where the file before ended
    documents.bin      int64, little endian: the tokens of the stream up to each document's end
    index.json         written last: dtype, vocabulary, counts, and the largest id of each file

    stream   a0 a1 a2 | b0 | c0 c1 c2 c3 |        documents.bin   3 4 8

Documents may lie across files. A folder of format 1 has no documents.bin: it is one stream.

The writer takes the stream batch by batch, works in a folder of another name and renames it at
the end, so a folder of the right name is always whole. The reader maps the files into memory and
reads any slice of the one long stream, also over a border between files.

Proven in tests/data/test_shards.py.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.config import ConfigError

INDEX_NAME = "index.json"
DOCUMENTS_NAME = "documents.bin"
FORMAT_VERSION = 2
FORMATS = (1, FORMAT_VERSION)  # those that can be read
TOKENS_A_SHARD = 1 << 27  # 256 MiB of uint16: few files, and each is quick to copy
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
END_DTYPE = np.dtype("<i8")


def write_shards(
    folder: Path,
    batches: Iterable[tuple[Sequence[int], Sequence[int]]],
    *,
    vocab_size: int,
    notes: Mapping[str, Any],
    tokens_a_shard: int = TOKENS_A_SHARD,
) -> dict[str, Any]:
    """Write `batches`, one stream, as `folder`; return its index.

    A batch is its token ids, and how many of them lie before each end of a document in it; the
    last token of all ends one. A document without tokens leaves no trace. `notes` go into the index
    as they are once the last batch has come. After an error nothing is left.
    """
    dtype = "uint16" if vocab_size < 1 << 16 else "uint32"
    shards: list[dict[str, Any]] = []
    num_tokens, last_end, num_documents = 0, 0, 0
    # Beside the folder, and no other process's.
    temporary = folder.with_name(f"{folder.name}.tmp-{socket.gethostname()}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that died and had our process id
    temporary.mkdir(parents=True)
    try:
        for batch, batch_ends in batches:
            ends = num_tokens + np.asarray(batch_ends, dtype=END_DTYPE)
            ends = ends[np.diff(ends, prepend=last_end) > 0]
            with open(temporary / DOCUMENTS_NAME, "ab") as file:
                file.write(ends.tobytes())
            num_documents += ends.size
            last_end = int(ends[-1]) if ends.size else last_end
            tokens = np.asarray(batch, dtype=np.int64)
            num_tokens += tokens.size
            while tokens.size:
                if not shards or shards[-1]["num_tokens"] == tokens_a_shard:
                    name = f"tokens-{len(shards):05d}.bin"
                    shards.append({"file": name, "num_tokens": 0, "max_token_id": 0})
                shard = shards[-1]
                part, tokens = np.split(tokens, [tokens_a_shard - shard["num_tokens"]])
                assert part.min() >= 0 and part.max() < vocab_size, "id outside the vocabulary"
                with open(temporary / shard["file"], "ab") as file:
                    file.write(part.astype(DTYPES[dtype]).tobytes())
                shard["num_tokens"] += part.size
                shard["max_token_id"] = max(shard["max_token_id"], int(part.max()))
        assert last_end == num_tokens, f"a document goes on behind {num_tokens} tokens"
        index: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "dtype": dtype,
            "vocab_size": vocab_size,
            "num_tokens": num_tokens,
            "num_documents": num_documents,
            **notes,
            "shards": shards,
        }
        (temporary / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        try:
            os.rename(temporary, folder)
        except OSError:
            # A folder with the same content, made by another process meanwhile, is as good.
            if not (folder / INDEX_NAME).is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return index


class TokenShards:
    """A folder of token shards as one stream of token ids.

    Raises ConfigError, led by the configuration key `key`, when something is missing or damaged.
    """

    def __init__(self, folder: str | Path, *, key: str = "training.dataset_path") -> None:
        self.folder = Path(folder)
        self._key = key
        self.index = read_index(self.folder, key=key)
        self.vocab_size: int = self.index["vocab_size"]
        self._shards: list[dict[str, Any]] = self.index["shards"]
        dtype = DTYPES[self.index["dtype"]]
        self._maps = [
            self._map(shard["file"], shard["num_tokens"], dtype) for shard in self._shards
        ]
        self._ends = np.cumsum([tokens.size for tokens in self._maps])
        self.num_tokens = int(self._ends[-1])
        self.check_vocabulary(self.vocab_size)
        self._document_ends: NDArray[np.int64] | None = None  # of format 1
        if self.index["format"] > 1:
            self._document_ends = self._map(DOCUMENTS_NAME, self.index["num_documents"], END_DTYPE)
            if self._document_ends[-1] != self.num_tokens:
                raise self.damaged(DOCUMENTS_NAME, "does not end where the tokens do")

    def document_ends(self, *, key: str) -> NDArray[np.int64]:  # (num_documents,), ascending
        """Tokens of the stream up to the end of each document, mapped and not read.

        ConfigError, led by the `key` that asks for them, if the folder does not say.
        """
        if self._document_ends is None:
            raise ConfigError(
                f"{key}: {self.folder} does not say where documents end (format 1); make it again "
                "from its text with scripts/prepare_data.py, or leave the key out"
            )
        return self._document_ends

    def check_vocabulary(self, vocab_size: int) -> None:
        """ConfigError if a shard holds an id that a model of `vocab_size` entries lacks."""
        for shard in self._shards:
            if shard["max_token_id"] >= vocab_size:
                raise ConfigError(
                    f"{self._key}: {self.folder / shard['file']} holds token id "
                    f"{shard['max_token_id']}, outside a vocabulary of {vocab_size}; set "
                    "model.overrides.vocab_size, or take the tokenizer of the model"
                )

    def read(self, start: int, stop: int) -> NDArray[np.int64]:  # (stop - start,)
        """Tokens [start, stop) of the stream, as a copy."""
        assert 0 <= start < stop <= self.num_tokens, f"no slice [{start}, {stop})"
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right")
        parts = []
        for number in range(first, last + 1):
            begin = int(self._ends[number]) - self._maps[number].size
            parts.append(self._maps[number][max(start - begin, 0) : stop - begin])
            # The index is a promise; an id that breaks it would be an error deep in the model.
            if parts[-1].max() >= self.vocab_size:
                problem = f"holds token id {parts[-1].max()}, outside a vocabulary of "
                raise self.damaged(self._shards[number]["file"], f"{problem}{self.vocab_size}")
        return np.concatenate(parts, dtype=np.int64)

    def damaged(self, name: str, problem: str) -> ConfigError:
        """What to raise for a file of the folder that is not as it was written."""
        return _damaged(self._key, self.folder / name, problem)

    def _map(self, name: str, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        file = self.folder / name
        expected = f"has {count * dtype.itemsize} bytes"
        found = f"has {file.stat().st_size} bytes" if file.is_file() else "is missing"
        if found != expected:
            raise self.damaged(name, f"{found}; its index says that it {expected}")
        return np.memmap(file, dtype=dtype, mode="r")


def read_index(folder: Path, *, key: str) -> dict[str, Any]:
    """The checked content of index.json."""
    path = folder / INDEX_NAME
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if index["format"] not in FORMATS or index["dtype"] not in DTYPES:
            raise ValueError(f"format {index['format']} of {index['dtype']}")
        sound = [
            shard["num_tokens"] > 0 <= shard["max_token_id"] and folder / shard["file"]
            for shard in index["shards"]
        ]
        if not (sound and all(sound) and index["vocab_size"] > 0):
            raise ValueError("it counts no tokens")
        if index["format"] > 1 and not index["num_documents"] > 0:
            raise ValueError("it counts no documents")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else repr(error)
        raise _damaged(key, path, f"is no index of token shards ({reason})") from error
    return index


def _damaged(key: str, path: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{key}: {path} {problem}; make the folder again: delete it if it is a token cache, else "
        "use scripts/prepare_data.py"
    )

"""Token shards: a folder of flat files of token ids, and an index that says what they hold.

    tokens-00000.bin   uint16 or uint32, little endian, one id after the other
    tokens-00001.bin   the stream goes on where the file before ended
    index.json         written last: dtype, vocabulary, and per file its count and largest id

The writer holds one buffer whatever the amount of text, works in a folder of another name and
renames it at the end, so a folder of the right name is always whole. The reader maps the files
into memory and reads any slice of the one long stream, also over a border between files.

Proven in tests/data/test_shards.py.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.config import ConfigError

INDEX_NAME = "index.json"
FORMAT_VERSION = 1
TOKENS_A_SHARD = 1 << 27  # 256 MiB of uint16: few files, and each is quick to copy
UINT16_VOCABULARY = 1 << 16
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def temporary_folder(folder: Path) -> Path:
    """Where this process builds `folder`: beside it, and no other process's."""
    return folder.with_name(f"{folder.name}.tmp-{socket.gethostname()}-{os.getpid()}")


class ShardWriter:
    """Writes token shards: `with ShardWriter(...) as writer: writer.add(ids)`.

    Leaving the block without an error makes the folder appear; with an error nothing is left.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        tokenizer_sha256: str,
        tokens_a_shard: int = TOKENS_A_SHARD,
    ) -> None:
        self._folder = folder
        self._temporary = temporary_folder(folder)
        self._tokens_a_shard = tokens_a_shard
        self._dtype_name = "uint16" if vocab_size < UINT16_VOCABULARY else "uint32"
        self._file: BinaryIO | None = None
        self._shards: list[dict[str, Any]] = []
        self.index: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "dtype": self._dtype_name,
            "vocab_size": vocab_size,
            "tokenizer_sha256": tokenizer_sha256,
            "num_tokens": 0,
            "num_documents": 0,
            "num_empty_documents": 0,
            "text_bytes": 0,
            "shards": self._shards,
        }

    def __enter__(self) -> ShardWriter:
        if self._temporary.exists():  # of a process that died and had our process id
            shutil.rmtree(self._temporary)
        self._temporary.mkdir(parents=True)
        return self

    def add(self, ids: Sequence[int]) -> None:
        """Append token ids to the stream."""
        tokens = np.asarray(ids, dtype=np.int64)
        while tokens.size:
            if self._file is None:
                self._start_shard()
            assert self._file is not None
            shard = self._shards[-1]
            part = tokens[: self._tokens_a_shard - shard["num_tokens"]]
            assert part.min() >= 0 and part.max() < self.index["vocab_size"], "id not in vocabulary"
            self._file.write(part.astype(DTYPES[self._dtype_name]).tobytes())
            shard["num_tokens"] += int(part.size)
            shard["max_token_id"] = max(shard["max_token_id"], int(part.max()))
            self.index["num_tokens"] += int(part.size)
            if shard["num_tokens"] == self._tokens_a_shard:
                self._end_shard()
            tokens = tokens[part.size :]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_shard()
        if error is not None:
            shutil.rmtree(self._temporary)
            return
        with open(self._temporary / INDEX_NAME, "w", encoding="utf-8") as file:
            file.write(json.dumps(self.index, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.rename(self._temporary, self._folder)
        except OSError:
            # A folder with the same content, made by another process meanwhile, is as good.
            if not (self._folder / INDEX_NAME).is_file():
                raise
            shutil.rmtree(self._temporary)

    def _start_shard(self) -> None:
        name = f"tokens-{len(self._shards):05d}.bin"
        self._shards.append({"file": name, "num_tokens": 0, "max_token_id": 0})
        self._file = open(self._temporary / name, "wb")  # noqa: SIM115 (open over many calls)

    def _end_shard(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


class TokenShards:
    """One long stream of token ids over the files of a folder, mapped into memory.

    Raises ConfigError, led by `key` and naming the file, if anything is missing or damaged.
    """

    def __init__(self, folder: str | Path, *, key: str = "training.dataset_path") -> None:
        self.folder = Path(folder)
        self._key = key
        self.index = read_index(self.folder, key=key)
        self.vocab_size: int = self.index["vocab_size"]
        self._dtype = DTYPES[self.index["dtype"]]
        self._shards: list[dict[str, Any]] = self.index["shards"]
        self._maps = [self._map(shard) for shard in self._shards]
        counts = [shard["num_tokens"] for shard in self._shards]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.num_tokens = int(self._starts[-1])
        if self.num_tokens == 0:
            raise self._error(self.folder, "holds no tokens")
        self.check_vocabulary(self.vocab_size)

    def __reduce__(self) -> tuple[type[TokenShards], tuple[str]]:
        # Pickled as a path: the maps would be pickled as all their tokens.
        return TokenShards, (str(self.folder),)

    def check_vocabulary(self, vocab_size: int) -> None:
        """ConfigError if a shard holds an id that a model of `vocab_size` entries lacks."""
        for shard in self._shards:
            if shard["num_tokens"] and shard["max_token_id"] >= vocab_size:
                raise self._error(
                    self.folder / shard["file"],
                    f"holds token id {shard['max_token_id']}, outside a vocabulary of "
                    f"{vocab_size}; was it made with another tokenizer?",
                )

    def read(self, start: int, stop: int) -> NDArray[np.int64]:  # (stop - start,)
        """Tokens [start, stop) of the stream, as a copy."""
        assert 0 <= start <= stop <= self.num_tokens, f"no slice [{start}, {stop})"
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        for number in range(first, len(self._maps)):
            begin = int(self._starts[number])
            if begin >= stop:
                break
            part = self._maps[number][max(start - begin, 0) : stop - begin]
            self._check_range(part, number, offset=max(start - begin, 0))
            parts.append(part)
        return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, dtype=np.int64)

    def _check_range(self, part: NDArray[Any], number: int, *, offset: int) -> None:
        """The index is a promise; an id that breaks it would be an error deep in the model."""
        if part.size and int(part.max()) >= self.vocab_size:
            place = (offset + int(part.argmax())) * self._dtype.itemsize
            raise self._error(
                self.folder / self._shards[number]["file"],
                f"holds token id {int(part.max())} at byte {place}, outside its vocabulary of "
                f"{self.vocab_size}",
            )

    def _map(self, shard: dict[str, Any]) -> NDArray[Any]:
        file = self.folder / shard["file"]
        if not file.is_file():
            raise self._error(file, "is missing")
        size, width = file.stat().st_size, self._dtype.itemsize
        if size % width:
            raise self._error(
                file,
                f"is {size} bytes long, no multiple of {width}: the token at byte "
                f"{size - size % width} is cut off",
            )
        if size != shard["num_tokens"] * width:
            raise self._error(
                file, f"holds {size // width} tokens, its index says {shard['num_tokens']}"
            )
        # A file of no bytes cannot be mapped.
        return np.memmap(file, dtype=self._dtype, mode="r") if size else np.empty(0, self._dtype)

    def _error(self, path: Path, problem: str) -> ConfigError:
        return _damaged(self._key, path, problem)


def read_index(folder: Path, *, key: str) -> dict[str, Any]:
    """The checked content of index.json."""
    path = folder / INDEX_NAME
    if not path.is_file():
        raise _damaged(key, path, "is missing")
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if index["format"] != FORMAT_VERSION:
            raise _damaged(key, path, f"has format {index['format']}, not {FORMAT_VERSION}")
        if index["dtype"] not in DTYPES:
            raise _damaged(key, path, f"has dtype {index['dtype']!r}, none of {sorted(DTYPES)}")
        numbers = [index["vocab_size"]]
        for shard in index["shards"]:
            numbers += [shard["num_tokens"], shard["max_token_id"]]
            numbers += [] if isinstance(shard["file"], str) else [None]
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(key, path, f"is no index of token shards ({error!r})") from error
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise _damaged(key, path, "is no index of token shards (a count is no number)")
    return index


def _damaged(key: str, path: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{key}: {path} {problem}; make the folder again: delete it if it is a token cache, else "
        "use scripts/prepare_data.py"
    )

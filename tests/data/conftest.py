"""The shipped tokenizer, and folders of token shards to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from torchtitan_lite.data.shards import write_shards as write_token_shards
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ROOT / "assets" / "tokenizer")


@pytest.fixture
def write_shards(tmp_path: Path) -> Callable[..., Path]:
    """write_shards(tokens, ends=..., vocab_size=..., tokens_a_shard=...) -> folder.

    Without `ends`, of documents, all is one.
    """

    def write(
        tokens: object,
        *,
        ends: Sequence[int] | None = None,
        vocab_size: int = 5000,
        tokens_a_shard: int = 100,
        name: str = "shards",
    ) -> Path:
        folder, batches, begin = tmp_path / name, [], 0
        for part in np.array_split(np.asarray(tokens), 3):
            stop = begin + len(part)
            inside = [end - begin for end in ends or [] if begin < end <= stop]
            batches.append((part.tolist(), inside))
            begin = stop
        if ends is None:
            batches[-1][1].append(len(batches[-1][0]))
        write_token_shards(
            folder,
            batches,
            vocab_size=vocab_size,
            notes={},
            tokens_a_shard=tokens_a_shard,
        )
        return folder

    return write

"""The shipped tokenizer, and folders of token shards to read."""

from __future__ import annotations

from collections.abc import Callable
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
    """write_shards(tokens, vocab_size=..., tokens_a_shard=...) -> folder."""

    def write(
        tokens: object, *, vocab_size: int = 5000, tokens_a_shard: int = 100, name: str = "shards"
    ) -> Path:
        folder = tmp_path / name
        write_token_shards(
            folder,
            np.array_split(np.asarray(tokens), 3),
            vocab_size=vocab_size,
            notes={},
            tokens_a_shard=tokens_a_shard,
        )
        return folder

    return write

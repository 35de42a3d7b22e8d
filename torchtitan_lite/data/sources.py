"""Rows: what the loader draws from.

A source is any object with `len()` and `source[row] -> (tokens, labels)`, both int64 of shape
(seq_len,), labels[t] being the token that follows tokens[t], or IGNORE_LABEL. Row contents
depend on nothing but the row number; order is the loader's affair.

    stream   t0 t1 t2 t3 t4 t5 t6 t7 t8 ...         seq_len = 4
    row 0    tokens t0 t1 t2 t3   labels t1 t2 t3 t4
    row 1    tokens t4 t5 t6 t7   labels t5 t6 t7 t8

Each token of the stream is input once and label once. What is left at the end is less than a row:
training leaves it out, an evaluation takes it as a row whose other labels are IGNORE_LABEL.

Proven in tests/data/test_sources.py.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite.config import ConfigError
from torchtitan_lite.data.shards import TokenShards

IGNORE_LABEL = -100  # cross_entropy's ignore_index
NOISE = 0.1


class Source(Protocol):
    """Rows that can be read in any order, as often as wanted."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:  # each (seq_len,) int64
        ...


class TokenRows:
    """The stream of token shards cut in rows of `seq_len`; `to_the_end`: an incomplete one too."""

    def __init__(
        self,
        shards: TokenShards,
        seq_len: int,
        *,
        to_the_end: bool = False,
        key: str = "training.dataset_path",
    ) -> None:
        assert seq_len >= 1, f"seq_len = {seq_len}"
        self._shards = shards
        self._seq_len = seq_len
        self._num_missing = -(shards.num_tokens - 1) % seq_len if to_the_end else 0
        self._num_rows = (shards.num_tokens - 1 + self._num_missing) // seq_len
        if self._num_rows < 1:
            raise ConfigError(
                f"{key}: {shards.num_tokens} tokens, fewer than the {seq_len + 1} of one row with "
                f"seq_len = {seq_len}; use more text or shorter rows"
            )

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:  # each (seq_len,) int64
        start = row * self._seq_len
        missing = self._num_missing if row == self._num_rows - 1 else 0
        stream = torch.from_numpy(self._shards.read(start, start + self._seq_len + 1 - missing))
        tokens, labels = stream[:-1], stream[1:]
        return F.pad(tokens, (0, missing)), F.pad(labels, (0, missing), value=IGNORE_LABEL)


@dataclass(frozen=True)
class SyntheticRows:
    """Rows that a model can learn, made from (seed, row) without any file.

    The next token is (token + 1) mod vocab_size, except where, with probability NOISE, it is drawn
    anew. `ignore_fraction` is the mean share of labels at the end of a row that are IGNORE_LABEL;
    how many varies from row to row.
    """

    vocab_size: int
    seq_len: int
    _: KW_ONLY
    num_rows: int
    seed: int
    ignore_fraction: float = 0.0

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:  # each (seq_len,) int64
        # As a list the two would become floats where the seed is large, and rows would be equal.
        key = np.array([self.seed % 2**64, row], dtype=np.uint64)
        random = np.random.Generator(np.random.Philox(key=key))
        places = np.arange(self.seq_len + 1)
        drawn = random.integers(0, self.vocab_size, size=places.size)
        is_drawn = random.random(places.size) < NOISE
        last_drawn = np.maximum.accumulate(np.where(is_drawn, places, 0))
        tokens = torch.from_numpy((drawn[last_drawn] + places - last_drawn) % self.vocab_size)
        labels = tokens[1:].clone()
        mean = self.ignore_fraction * self.seq_len
        spread = min(mean, self.seq_len - mean)
        labels[self.seq_len - round(random.uniform(mean - spread, mean + spread)) :] = IGNORE_LABEL
        return tokens[:-1], labels

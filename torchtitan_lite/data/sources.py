"""Rows: what the loader draws from.

A source is any object with `len()` and `source[row] -> (tokens, labels)`, both int64 of shape
(seq_len,), labels[t] being the token that follows tokens[t], or IGNORE_LABEL. Row contents
depend on nothing but the row number; order is the loader's affair.

    stream   t0 t1 t2 t3 t4 t5 t6 t7 t8 ...         seq_len = 4
    row 0    tokens t0 t1 t2 t3   labels t1 t2 t3 t4
    row 1    tokens t4 t5 t6 t7   labels t5 t6 t7 t8

Each token of the stream is input once and label once; what is left at the end is less than a row.

Proven in tests/data/test_sources.py.
"""

from __future__ import annotations

from math import gcd
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torchtitan_lite.config import ConfigError
from torchtitan_lite.data.shards import TokenShards

IGNORE_LABEL = -100  # cross_entropy's ignore_index


class Source(Protocol):
    """Rows that can be read in any order, as often as wanted."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:  # each (seq_len,) int64
        ...


class TokenRows:
    """The stream of token shards cut in rows of `seq_len`."""

    def __init__(
        self, shards: TokenShards, seq_len: int, *, key: str = "training.dataset_path"
    ) -> None:
        assert seq_len >= 1, f"seq_len = {seq_len}"
        self._shards = shards
        self._seq_len = seq_len
        self._num_rows = (shards.num_tokens - 1) // seq_len
        if self._num_rows < 1:
            raise ConfigError(
                f"{key}: {shards.folder} holds {shards.num_tokens} tokens, fewer than the "
                f"{seq_len + 1} of one row with seq_len = {seq_len}; use more text or shorter rows"
            )

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:  # each (seq_len,) int64
        if not 0 <= row < self._num_rows:
            raise IndexError(f"row {row} of {self._num_rows}")
        start = row * self._seq_len
        tokens = torch.from_numpy(self._shards.read(start, start + self._seq_len + 1))
        return tokens[:-1], tokens[1:]


class SyntheticRows:
    """Rows that a model can learn, made from (seed, row) without any file.

    The next token is (a * token + c) mod vocab_size, except where, with probability NOISE, it is
    drawn anew. `ignore_fraction` is the mean share of labels at the end of a row that are
    IGNORE_LABEL; how many varies from row to row.
    """

    NOISE = 0.1

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        *,
        num_rows: int,
        seed: int,
        ignore_fraction: float = 0.0,
    ) -> None:
        assert vocab_size >= 1 and seq_len >= 1 and num_rows >= 1
        assert 0.0 <= ignore_fraction <= 1.0, f"ignore_fraction = {ignore_fraction}"
        self._vocab_size = vocab_size
        self._seq_len = seq_len
        self._num_rows = num_rows
        self._seed = seed
        self._ignore_fraction = ignore_fraction
        # a coprime to the vocabulary: every token has one predecessor, so none is favoured.
        multiplier = next(a for a in range(5, 6 + vocab_size) if gcd(a, vocab_size) == 1)
        # After k steps token x has become scale[k] * x + shift[k].
        scale, shift = [1], [0]
        for _ in range(seq_len):
            scale.append(scale[-1] * multiplier % vocab_size)
            shift.append((shift[-1] * multiplier + 1) % vocab_size)
        self._scale, self._shift = np.array(scale), np.array(shift)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:  # each (seq_len,) int64
        if not 0 <= row < self._num_rows:
            raise IndexError(f"row {row} of {self._num_rows}")
        length = self._seq_len + 1
        random = np.random.Generator(np.random.Philox(key=[self._seed & (2**64 - 1), row]))
        drawn = random.integers(0, self._vocab_size, size=length)
        is_drawn = random.random(length) < self.NOISE
        is_drawn[0] = True
        places = np.arange(length)
        last_drawn = np.maximum.accumulate(np.where(is_drawn, places, 0))
        steps = places - last_drawn
        tokens = (self._scale[steps] * drawn[last_drawn] + self._shift[steps]) % self._vocab_size
        row_tokens = torch.from_numpy(tokens)
        labels = row_tokens[1:].clone()
        num_ignored = self._num_ignored(random)
        labels[self._seq_len - num_ignored :] = IGNORE_LABEL
        return row_tokens[:-1], labels

    def _num_ignored(self, random: np.random.Generator) -> int:
        mean = self._ignore_fraction * self._seq_len
        spread = min(mean, self._seq_len - mean)
        return round(random.uniform(mean - spread, mean + spread))

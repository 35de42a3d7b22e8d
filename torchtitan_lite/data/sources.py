"""Rows: what the loader draws from.

A source is any object with `len()` and `source[row] -> Row`, or a plain tuple of its fields, each
int64 of shape (seq_len,): labels[t] is the token that follows tokens[t], or IGNORE_LABEL. Row
contents depend on nothing but the row number; order is the loader's affair.

    stream   t0 t1 t2 t3 t4 t5 t6 t7 t8 ...         seq_len = 4
    row 0    tokens t0 t1 t2 t3   labels t1 t2 t3 t4
    row 1    tokens t4 t5 t6 t7   labels t5 t6 t7 t8

Each token of the stream is input once and label once. What is left at the end is less than a row:
training leaves it out, an evaluation takes it as a row whose other labels are IGNORE_LABEL.

With `document_mask` a row has positions too. They restart where a document begins, and attention
goes no further back than to the last 0. Nothing of a document follows its last token, so that one
has no label. Let t0 t1 be one document, t2 ... t8 the next:

    row 0    positions 0 1 0 1    labels t1 -- t3 t4        (-- is IGNORE_LABEL)
    row 1    positions 0 1 2 3    labels t5 t6 t7 t8

Proven in tests/data/test_sources.py. Rows that cut no document are in packing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from torchtitan_lite.config import ConfigError
from torchtitan_lite.data.shards import TokenShards

IGNORE_LABEL = -100  # cross_entropy's ignore_index
NOISE = 0.1
DOCUMENT_MASK = "training.document_mask = true"


class Row(NamedTuple):
    """What one row gives the model; without positions it is one document."""

    tokens: Tensor  # (seq_len,) int64, as are the others
    labels: Tensor
    positions: Tensor | None = None


class Source(Protocol):
    """Rows that can be read in any order, as often as wanted."""

    def __len__(self) -> int: ...

    def __getitem__(
        self, row: int
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]: ...


class TokenRows:
    """The stream of token shards cut in rows of `seq_len`; `to_the_end`: an incomplete one too."""

    def __init__(
        self,
        shards: TokenShards,
        seq_len: int,
        *,
        to_the_end: bool = False,
        document_mask: bool = False,
        key: str = "training.dataset_path",
    ) -> None:
        assert seq_len >= 1, f"seq_len = {seq_len}"
        self._shards = shards
        self._seq_len = seq_len
        self._ends = shards.document_ends(key=DOCUMENT_MASK) if document_mask else None
        self._num_missing = -(shards.num_tokens - 1) % seq_len if to_the_end else 0
        self._num_rows = (shards.num_tokens - 1 + self._num_missing) // seq_len
        if self._num_rows < 1:
            raise ConfigError(
                f"{key}: {shards.num_tokens} tokens, fewer than the {seq_len + 1} of one row with "
                f"seq_len = {seq_len}; use more text or shorter rows"
            )

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> Row:
        start = row * self._seq_len
        missing = self._num_missing if row == self._num_rows - 1 else 0
        stop = start + self._seq_len - missing
        stream = torch.from_numpy(self._shards.read(start, stop + 1))
        tokens = F.pad(stream[:-1], (0, missing))
        labels = F.pad(stream[1:], (0, missing), value=IGNORE_LABEL)
        if self._ends is None:
            return Row(tokens, labels)
        first, last = np.searchsorted(self._ends, [start, stop], side="right")
        ends = self._ends[first:last] - start  # within (0, seq_len]
        labels[ends - 1] = IGNORE_LABEL
        return Row(tokens, labels, positions_from([*ends, stop - start], self._seq_len))


def positions_from(
    begins: Sequence[int] | NDArray[Any], seq_len: int
) -> Tensor:  # (seq_len,) int64
    """Positions that restart at each of `begins`, and at 0; a begin at seq_len starts nothing."""
    begin_of = np.zeros(seq_len + 1, dtype=np.int64)
    begin_of[begins] = begins
    return torch.from_numpy(np.arange(seq_len) - np.maximum.accumulate(begin_of)[:-1])


@dataclass(frozen=True)
class SyntheticRows:
    """Rows that a model can learn, made from (seed, row) without any file.

    The next token is (token + 1) mod vocab_size, except where, with probability NOISE, it is drawn
    anew. `ignore_fraction` is the mean share of labels at the end of a row that are IGNORE_LABEL;
    how many varies from row to row. With `document_mask` a row is documents of 1 to seq_len tokens,
    their lengths even on a logarithmic scale, the last one cut.
    """

    vocab_size: int
    seq_len: int
    _: KW_ONLY
    num_rows: int
    seed: int
    ignore_fraction: float = 0.0
    document_mask: bool = False

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Row:
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
        if not self.document_mask:
            return Row(tokens[:-1], labels)
        lengths = np.exp(random.uniform(0, np.log(self.seq_len + 1), self.seq_len)).astype(int)
        ends = np.cumsum(lengths)
        ends = ends[ends <= self.seq_len]
        labels[ends - 1] = IGNORE_LABEL
        return Row(tokens[:-1], labels, positions_from(ends, self.seq_len))

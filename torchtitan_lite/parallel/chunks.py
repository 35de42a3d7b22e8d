"""Which rank holds which tokens of a row, and which of them see which.

A row is cut in 2 x cp chunks, and a rank takes two of them. A token sees what stands before it, so
late chunks cost more than early ones; a rank that takes one from either end has as much to do as
any other (`balanced`). In the plain order it takes two neighbours.

    chunk              0  1  2  3  4  5  6  7     cp = 4
    rank, balanced     0  1  2  3  3  2  1  0     2 x cp + 1 = 9 pairs of chunks each
    rank, plain        0  0  1  1  2  2  3  3     3, 7, 11, 15 pairs

Most pairs of chunks need no mask: all tokens of one see all of the other, or none. Only where a
document ends or a window closes inside a pair is one made, as large as the pair.
Proven in tests/parallel/test_chunks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_lite.config import Config
from torchtitan_lite.models.attention import RowMask


@dataclass(frozen=True)
class Order:
    """Which of the 2 x size chunks of a row each of `size` ranks takes."""

    size: int
    balanced: bool = True

    @property
    def num_chunks(self) -> int:
        return 2 * self.size

    def chunks(self, rank: int) -> tuple[int, int]:
        """The two chunks of `rank`, the earlier first."""
        if self.balanced:
            return rank, self.num_chunks - 1 - rank
        return 2 * rank, 2 * rank + 1

    def take(self, row: Tensor, rank: int, dim: int = 1) -> Tensor:
        """(batch, seq, ...) -> (batch, seq / size, ...): the part of `rank`."""
        assert row.shape[dim] % self.num_chunks == 0, "the configuration is checked"
        pieces = row.chunk(self.num_chunks, dim=dim)
        return torch.cat([pieces[chunk] for chunk in self.chunks(rank)], dim=dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The row whose `parts` the ranks hold, in rank order."""
        pieces = {
            chunk: piece
            for rank, part in enumerate(parts)
            for chunk, piece in zip(self.chunks(rank), part.chunk(2, dim=dim), strict=True)
        }
        return torch.cat([pieces[chunk] for chunk in range(self.num_chunks)], dim=dim)


def order_of_rows(config: Config) -> Order:
    """The order that a configuration asks for."""
    parallelism = config.parallelism
    balanced = parallelism.context_parallel_load_balancer == "headtail"
    return Order(parallelism.context_parallel_degree, balanced)


@dataclass
class Stretch:
    """Chunks that a chunk of queries attends to at once.

    They lie at places [first, stop) among the chunks held. `causal`: it is the queries' own.
    """

    first: int
    stop: int
    causal: bool
    mask: Tensor | None  # (batch or 1, 1, length, length) bool

    @property
    def is_whole(self) -> bool:
        """Whether all queries see all of it."""
        return not self.causal and self.mask is None


class Sight:
    """Which keys the queries of a chunk see, in rows of `num_chunks`.

    Where documents are kept apart the host must know the first and the last of each chunk, to
    leave out pairs that share none: its one wait for the device in a forward, for all layers.
    """

    def __init__(self, row_mask: RowMask, window: int | None, num_chunks: int) -> None:
        self.row_mask, self.window = row_mask, window
        self.length = row_mask.num_keys // num_chunks
        self.edges: list[list[list[int]]] = []  # (batch or 1, chunk, 2)
        if row_mask.documents is not None:
            chunks = row_mask.documents.unflatten(1, (num_chunks, self.length))
            self.edges = row_mask.form("edges", lambda: chunks[..., [0, -1]].tolist())

    def stretches(self, query: int, held: Sequence[int]) -> list[Stretch]:
        """What chunk `query` sees of the chunks `held`, in as few stretches as it takes."""
        found: list[Stretch] = []
        for place, key in enumerate(held):
            if not self._sees_any(query, key):
                continue
            mask = None if self._sees_all(query, key) else self._mask(query, key)
            new = Stretch(place, place + 1, causal=mask is None and query == key, mask=mask)
            if found and found[-1].stop == place and found[-1].is_whole and new.is_whole:
                found[-1].stop += 1
            else:
                found.append(new)
        return found

    def _sees_any(self, query: int, key: int) -> bool:
        nearest = (query - key - 1) * self.length + 1  # between a query and a key
        near = self.window is None or nearest < self.window
        shares = not self.edges or any(row[key][1] >= row[query][0] for row in self.edges)
        return key <= query and near and shares

    def _sees_all(self, query: int, key: int) -> bool:
        """All of `key` that does not lie behind the query itself."""
        farthest = (query - key + 1) * self.length - 1
        near = self.window is None or farthest < self.window
        return near and all(row[key][0] == row[query][1] for row in self.edges)

    def _mask(self, query: int, key: int) -> Tensor:
        queries, keys = (slice(c * self.length, (c + 1) * self.length) for c in (query, key))
        return self.row_mask.between(queries, keys, self.window)

"""Which rows a step reads: arithmetic on one integer.

Samples are numbered without end, and a global batch is the next G of them. Sample g is row
`permutation_of_epoch(i)` of the source, where epoch, i = divmod(g, number of rows):

    sample   0 1 2 3 4 5 6 | 7 8 9 ...        7 rows: epoch 0, then epoch 1 in another order
    batch    [0 1 2 3][4 5 6   7][8 9 ...     G = 4; a batch may lie across two epochs
    rank       0   1    0   1                 2 batch ranks: each a block of G / 2

The mesh decides who reads a sample and never which samples a step has. So the whole state is
`consumed_samples`, the samples of the batches handed out; it means the same for any number of
ranks, workers and rows in a batch, and all of these may differ after a resume.

Worker processes read ahead. What they have read and nobody asked for is no part of the state.

Proven in tests/data/test_loader.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from torchtitan_lite.config import ConfigError
from torchtitan_lite.data.order import permute
from torchtitan_lite.data.sources import IGNORE_LABEL, Row, Source


class Batch(NamedTuple):
    """Rows of one rank."""

    tokens: Tensor  # (rows, seq_len) int64
    labels: Tensor  # (rows, seq_len) int64, IGNORE_LABEL where there is none
    positions: Tensor | None = None  # (rows, seq_len) int64; None: each row is one document
    first_sample: int = 0  # number in the run of the first of these consecutive samples

    def to(self, device: torch.device) -> Batch:
        """The same on `device`."""
        return Batch._make(
            x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for x in self
        )


@dataclass(eq=False)
class Loader:
    """An endless iterator over this rank's share of each global batch.

    `global_batch_size` counts rows over all ranks and is a multiple of `batch_degree`. With
    `num_workers` > 0 that many processes keep `prefetch_factor` batches each ready.
    `consumed_samples` are those of the global batches handed out so far.
    """

    source: Source
    _: KW_ONLY
    global_batch_size: int
    batch_rank: int
    batch_degree: int
    seed: int
    num_workers: int = 0
    prefetch_factor: int = 2
    consumed_samples: int = field(default=0, init=False)
    _batches: Iterator[Batch] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        assert self.global_batch_size % self.batch_degree == 0, self
        assert 0 <= self.batch_rank < self.batch_degree, self

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._read(self._rows_from(self.consumed_samples))
        rows_a_rank = self.global_batch_size // self.batch_degree
        first_sample = self.consumed_samples + self.batch_rank * rows_a_rank
        try:
            batch = next(self._batches)._replace(first_sample=first_sample)
        except ConfigError as error:  # a worker's has its traceback before the line
            raise ConfigError(str(error).rpartition("ConfigError: ")[2].strip()) from None
        self.consumed_samples += self.global_batch_size
        return batch

    def state_dict(self) -> dict[str, int]:
        """All there is to know: samples of the global batches handed out so far."""
        return {"consumed_samples": self.consumed_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind the batches that `state` counts; this loader's batch size may differ."""
        self.close()
        self.consumed_samples = int(state["consumed_samples"])

    def close(self) -> None:
        """End the workers. The next batch, if one is asked for, starts them again."""
        # Explicitly: after an error the iterator is part of a reference cycle, and torch's own
        # ending of the workers, when the garbage collector comes, waits five seconds for each.
        end_workers = getattr(self._batches, "_shutdown_workers", None)
        if end_workers is not None:
            end_workers()
        self._batches = None

    def _rows_from(self, consumed_samples: int) -> Iterator[list[int]]:
        """Row numbers of this rank's share of one global batch after the other."""
        rows_a_rank = self.global_batch_size // self.batch_degree
        while True:
            first = consumed_samples + self.batch_rank * rows_a_rank
            samples = np.arange(first, first + rows_a_rank)
            yield sample_rows(samples, num_rows=len(self.source), seed=self.seed).tolist()
            consumed_samples += self.global_batch_size

    def _read(self, rows: Iterator[list[int]]) -> Iterator[Batch]:
        has_workers = self.num_workers > 0
        loader: Any = DataLoader(
            _CheckedRows(self.source),  # type: ignore[arg-type]
            batch_sampler=rows,
            collate_fn=_collate,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor if has_workers else None,
            # Workers read files and do arithmetic: fork starts them without importing again.
            multiprocessing_context="fork" if has_workers else None,
            # Its own generator: reading ahead must not move the random numbers of training.
            generator=torch.Generator(),
        )
        return iter(loader)


def sample_rows(
    samples: NDArray[np.int64], *, num_rows: int, seed: int
) -> NDArray[np.int64]:  # same shape
    """The row of each sample; over an epoch, every row once."""
    epochs, indices = np.divmod(samples, num_rows)
    rows = np.empty_like(indices)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        rows[chosen] = permute(indices[chosen], num_rows, seed=seed, epoch=int(epoch))
    return rows


def held_out_batches(
    source: Source,
    *,
    batch_rank: int,
    batch_degree: int,
    local_batch_size: int,
) -> Iterator[Batch]:
    """This rank's batches of a validation: rows in their own order, every row once.

    All ranks get the same number of batches, so that none waits for another in a collective;
    rows that fill up the last ones have no label and so no weight.
    """
    rows_of = _CheckedRows(source)
    tokens, labels, positions = rows_of[0]
    filler = Row(torch.zeros_like(tokens), torch.full_like(labels, IGNORE_LABEL), positions)
    for start in range(0, len(source), local_batch_size * batch_degree):
        first = start + batch_rank * local_batch_size
        rows = range(first, first + local_batch_size)
        yield _collate([rows_of[row] if row < len(source) else filler for row in rows])


@dataclass(frozen=True)
class _CheckedRows:
    """The rows of a source, each as a `Row`; ConfigError where positions are no documents."""

    source: Source

    def __getitem__(self, number: int) -> Row:
        row = Row(*self.source[number])
        if row.positions is not None:
            restarts = row.positions == 0
            sound = row.positions.shape == row.tokens.shape and bool(restarts[0])
            if not (sound and bool((restarts[1:] | (row.positions.diff() == 1)).all())):
                raise ConfigError(
                    f"row {number} of {type(self.source).__name__}: its positions are not 0, 1, 2 "
                    "... from the beginning of each document; correct that source, which must "
                    "start the row at 0 and each document in it at 0 again"
                )
        return row


def _collate(rows: list[Row]) -> Batch:
    tokens, labels, positions = zip(*rows, strict=True)
    batch = Batch(torch.stack(tokens), torch.stack(labels))
    if all(of_row is None for of_row in positions):
        return batch
    whole = torch.arange(len(tokens[0]))  # a row without positions is one document
    stacked = torch.stack([whole if of_row is None else of_row for of_row in positions])
    return batch._replace(positions=stacked)

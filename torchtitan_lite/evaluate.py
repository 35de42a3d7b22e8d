"""The loss of rows that are not trained on, the same number on every mesh.

    loss           = nats of all labels / number of labels     perplexity = e^loss
    bits per byte  = nats of all labels / ln 2 / bytes of text that the labels stand for

Sums are added over batches and ranks and divided once, so a short batch or row weighs what it
holds. A loss per token depends on how the tokenizer cuts; bits per byte compare models of any
vocabulary. Special tokens, such as the end of a document, have to be predicted and are no text:
they add nats and no byte.

Proven in tests/test_evaluate.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.data import Subset

from torchtitan_lite.build import ParallelModel
from torchtitan_lite.data.loader import held_out_batches
from torchtitan_lite.data.sources import IGNORE_LABEL, Source
from torchtitan_lite.loss import GlobalBatchLoss
from torchtitan_lite.mesh import ParallelMesh


@dataclass(frozen=True)
class Totals:
    """Sums over all labels; what is divided by nothing is NaN."""

    nats: float  # cross-entropy
    num_tokens: int  # labels
    num_bytes: int = 0  # of text that they stand for, where that was counted

    @property
    def loss(self) -> float:
        """Mean cross-entropy of a label, in nats."""
        return self.nats / self.num_tokens if self.num_tokens else math.nan

    @property
    def perplexity(self) -> float:
        """e^loss."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits to say a byte of the text."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else math.nan


def evaluate(
    model: ParallelModel,
    rows: Source,
    *,
    mesh: ParallelMesh,
    device: torch.device,
    local_batch_size: int,
    num_rows: int | None = None,
    byte_lengths: Sequence[int] | None = None,
) -> Totals:
    """The sums over the first `num_rows` of `rows`, or over all; a collective of the world.

    A rank forwards `local_batch_size` rows at a time. `byte_lengths` are those of each token id
    (Tokenizer.byte_lengths); without them no bytes are counted. Moves no state of a training.
    """
    if num_rows is not None and num_rows < len(rows):
        rows = Subset(rows, range(num_rows))  # type: ignore[arg-type]
    loss = GlobalBatchLoss(device)
    bytes_of = None if byte_lengths is None else torch.tensor(byte_lengths)
    num_tokens, num_bytes = 0, 0
    for batch in held_out_batches(
        rows,
        batch_rank=mesh.batch_rank,
        batch_degree=mesh.degrees.batch,
        local_batch_size=local_batch_size,
    ):
        labels = model.own_tokens(batch.labels)
        labels = labels[labels != IGNORE_LABEL]
        num_tokens += len(labels)
        if bytes_of is not None:
            num_bytes += int(bytes_of[labels].sum())
        batch = batch.to(device)
        model.evaluate(batch.tokens, batch.labels, batch.positions, loss=loss)
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # exact for counts up to 2**53
    if mesh.owns_data and model.has_loss:
        totals[0], totals[1], totals[2] = loss.totals[1], num_tokens, num_bytes
    dist.all_reduce(totals)
    nats, *counts = totals.tolist()
    return Totals(nats, *map(int, counts))

"""The loss of rows that are not trained on, the same number on every mesh."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import Subset

from torchtitan_lite.build import ParallelModel
from torchtitan_lite.data.loader import held_out_batches
from torchtitan_lite.data.sources import IGNORE_LABEL, Source
from torchtitan_lite.loss import GlobalBatchLoss
from torchtitan_lite.mesh import ParallelMesh


def evaluate(
    model: ParallelModel,
    rows: Source,
    *,
    mesh: ParallelMesh,
    device: torch.device,
    local_batch_size: int,
    num_rows: int | None = None,
) -> float:
    """Mean cross-entropy per valid token of the first `num_rows` of `rows`, or of all.

    A rank forwards `local_batch_size` rows at a time. Moves no state of a training.
    """
    if num_rows is not None and num_rows < len(rows):
        rows = Subset(rows, range(num_rows))  # type: ignore[arg-type]
    loss = GlobalBatchLoss(device)
    num_tokens = 0
    for batch in held_out_batches(
        rows,
        batch_rank=mesh.batch_rank,
        batch_degree=mesh.degrees.batch,
        local_batch_size=local_batch_size,
    ):
        num_tokens += int((batch.labels != IGNORE_LABEL).sum())
        model.evaluate(batch.tokens.to(device), batch.labels.to(device), loss=loss)
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    if mesh.owns_data and model.has_loss:
        totals[0], totals[1] = loss.totals[1], num_tokens
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()

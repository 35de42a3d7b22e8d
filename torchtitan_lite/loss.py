"""The loss of a micro-batch as its share of the global batch.

    loss = sum over the micro-batch's valid labels / number of valid labels in the global batch

The global batch is all accumulation steps on all ranks. Nothing else divides: FSDP sums, the
pipeline scales nothing. So neither accumulation, nor padding, nor any mesh can change the gradient.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


class GlobalBatchLoss:
    """Divides each micro-batch's sum, and adds up what the log shows.

    `totals` holds, in fp64, the sums over this rank's micro-batches of [loss, cross-entropy, z].
    """

    def __init__(self, device: torch.device) -> None:
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)
        self.num_tokens = 1
        self.num_local_tokens = 0

    def begin(self, num_tokens: int, num_local_tokens: int = 0) -> None:
        """Start a global batch of `num_tokens` valid labels, so many of them on this rank."""
        self.totals = torch.zeros_like(self.totals)
        self.num_local_tokens = num_local_tokens
        # A batch without a single label has loss 0 and gradient 0, not 0/0.
        self.num_tokens = max(num_tokens, 1)

    def __call__(self, sums: Tensor, labels: Tensor | None = None) -> Tensor:
        """The micro-batch's share of the global loss; `sums` are those of TokenLoss, (3,)."""
        self.totals += sums.detach()
        return sums[0] / self.num_tokens

    def over_ranks(self, *, mine: bool) -> tuple[list[float], float]:
        """([loss, cross-entropy, z] per token of the global batch, the largest mean of a rank).

        A collective of the world. `mine` on exactly one of the ranks that have the same share.
        """
        sums = self.totals.clone() if mine else torch.zeros_like(self.totals)
        dist.all_reduce(sums)
        local_mean = -math.inf
        if mine and self.num_local_tokens:
            local_mean = self.totals[1].item() / self.num_local_tokens
        largest = torch.tensor(local_mean, dtype=torch.float64, device=self.totals.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        # A batch without a single label has no mean; its loss is 0.
        return (sums / self.num_tokens).tolist(), max(largest.item(), 0.0)

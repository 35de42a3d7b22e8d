"""The loss of a micro-batch as its share of the global batch.

    loss = sum over the micro-batch's valid labels / number of valid labels in the global batch

The global batch is all accumulation steps on all ranks. Nothing else divides: FSDP sums, the
pipeline scales nothing. So neither accumulation, nor padding, nor any mesh can change the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


class GlobalBatchLoss:
    """Divides each micro-batch's sum, and adds up what the log shows.

    `totals` holds, in fp64, the sums over this rank's micro-batches of [loss, cross-entropy, z].
    """

    def __init__(self, device: torch.device) -> None:
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)
        self.num_tokens = 1

    def begin(self, num_tokens: int) -> None:
        """Start a global batch of `num_tokens` valid labels over all ranks."""
        self.totals = torch.zeros_like(self.totals)
        # A batch without a single label has loss 0 and gradient 0, not 0/0.
        self.num_tokens = max(num_tokens, 1)

    def __call__(self, sums: Tensor, labels: Tensor | None = None) -> Tensor:
        """The micro-batch's share of the global loss; `sums` are those of TokenLoss, (3,)."""
        self.totals += sums.detach()
        return sums[0] / self.num_tokens

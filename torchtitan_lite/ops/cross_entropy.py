"""Cross-entropy straight from hidden states, in chunks, over vocabulary shards.

The logits of a micro-batch are its largest tensor: 8 x 8192 tokens times 128K words are 32 GiB
in fp32. Here they exist only a chunk of tokens at a time:

    for each chunk:   logits = x W^T   ->   lse, target logit   ->   loss, dlogits
                      dx = dlogits W,  dW += dlogits^T x

The gradient is formed in the forward pass, while the chunk's logits are at hand, so nothing is
computed twice; backward only scales it. That works because a micro-batch's loss is one sum, whose
outer derivative is one number. Under vocabulary parallelism each rank holds the rows
[first_row, first_row + rows) of W. Ranks exchange two numbers a token, their own logsumexp and
the target's logit (or nothing, where another rank holds it), in one all-gather a chunk; dx is
then the rank's partial sum, which the plan's boundary adds up.

The three products may be of another precision: `products` makes them from W.

z-loss: weight * logsumexp^2 (arXiv:2204.02311, section 5), added per token.

Proven in tests/ops/test_cross_entropy.py against F.cross_entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan_lite.ops.collectives import gather

IGNORE_INDEX = -100


class Products(NamedTuple):
    """Those of a linear with W (rows, hidden)."""

    out: Callable[[Tensor], Tensor]  # x -> x W^T
    dx: Callable[[Tensor], Tensor]  # gradient -> gradient W
    dw: Callable[[Tensor, Tensor], Tensor]  # gradient, x -> gradient^T x

    @classmethod
    def of(cls, weight: Tensor) -> Products:
        return cls(lambda x: x @ weight.t(), lambda g: g @ weight, lambda g, x: g.t() @ x)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    num_chunks: int = 1,
    z_loss_weight: float = 0.0,
    first_row: int = 0,
    group: ProcessGroup | None = None,
    products: Callable[[Tensor], Products] = Products.of,
) -> Tensor:
    """Sums over the tokens whose label is not -100: [loss, cross-entropy, z], shape (3,), fp32.

    x: (tokens, hidden), weight: (rows, hidden), labels: (tokens,) with ids of the whole vocabulary.
    Rows at or past `vocab_size` are padding and take no part. Only the first entry is
    differentiable: loss = cross-entropy + z_loss_weight * z.
    """
    options = (vocab_size, num_chunks, z_loss_weight, first_row, group, products)
    return _LinearCrossEntropy.apply(x, weight, labels, *options)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_chunks: int,
        z_loss_weight: float,
        first_row: int,
        group: ProcessGroup | None,
        products: Callable[[Tensor], Products],
    ) -> Tensor:
        wants_gradient = any(ctx.needs_input_grad[:2])
        num_words = min(max(vocab_size - first_row, 0), weight.shape[0])  # the rest is padding
        multiply = products(weight)
        chunk_size = -(-x.shape[0] // num_chunks)
        sums = torch.zeros(3, dtype=torch.float32, device=x.device)
        if wants_gradient:
            grad_x = torch.empty_like(x)
            # fp32: the chunks' contributions are added, and bf16 would round each addition.
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, x.shape[0], chunk_size):
            chunk = slice(start, start + chunk_size)
            logits = multiply.out(x[chunk]).float()  # (chunk, rows)
            logits[:, num_words:] = -torch.inf
            valid = labels[chunk] != IGNORE_INDEX
            lse, target_logit, target_row, held = _combine(logits, labels[chunk], first_row, group)
            cross_entropy = torch.where(valid, lse - target_logit, 0.0).sum()
            z = torch.where(valid, lse.square(), 0.0).sum()
            sums += torch.stack((cross_entropy + z_loss_weight * z, cross_entropy, z))
            if wants_gradient:
                # d/dlogits of (lse - target + w lse^2) is p (1 + 2 w lse) - onehot(target)
                dlogits = logits.sub_(lse[:, None]).exp_()
                if z_loss_weight:
                    dlogits *= 1 + 2 * z_loss_weight * lse[:, None]
                dlogits.scatter_add_(1, target_row[:, None], -held.float()[:, None])
                dlogits = dlogits.mul_(valid[:, None]).to(weight.dtype)
                grad_x[chunk] = multiply.dx(dlogits)
                grad_weight += multiply.dw(dlogits, x[chunk])
        if wants_gradient:
            ctx.save_for_backward(grad_x, grad_weight)
            ctx.weight_dtype = weight.dtype
        return sums

    @staticmethod
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        # A vector of one, not a scalar: a bf16 tensor times a 0-dim fp32 tensor would round the
        # scale (1 / number of tokens) to bf16, a constant error in every gradient below.
        scale = grad_sums[:1]
        # Not in place: zero-bubble schedules run this node twice.
        scaled_x = torch.empty_like(grad_x)
        scaled_weight = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
        torch.mul(grad_x, scale, out=scaled_x)
        torch.mul(grad_weight, scale, out=scaled_weight)
        return scaled_x, scaled_weight, *[None] * 7


def _combine(
    logits: Tensor, labels: Tensor, first_row: int, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logsumexp over the whole vocabulary, the target's logit, its local row, whether it is here).

    Each is (chunk,). With a group, `logits` hold this rank's columns only.
    """
    target_row = labels - first_row
    held = (target_row >= 0) & (target_row < logits.shape[1])
    target_row = target_row.masked_fill(~held, 0)
    target_logit = logits.gather(1, target_row[:, None]).squeeze(1).masked_fill(~held, 0.0)
    lse = torch.logsumexp(logits, dim=1)
    if group is not None:
        mine = torch.stack((lse, target_logit))[None]  # (1, 2, chunk)
        parts = gather(mine, 0, group)
        lse = torch.logsumexp(parts[:, 0], dim=0)
        target_logit = parts[:, 1].sum(dim=0)
    return lse, target_logit, target_row, held

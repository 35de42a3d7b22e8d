"""Mixture of experts: a router sends each token to a few MLPs of many, and adds up what they say.

    x (tokens, hidden)
      -> gate       scores of all experts in fp32; the top k of each token, and their weights
      -> sort       rows by expert: (tokens * k, hidden), and how many rows each expert gets
      -> experts    expert e multiplies its block of rows; the one thing that a plan replaces
      -> combine    row * weight, added to its token; beside it the shared expert sees all tokens

No expert has a capacity, so nothing is ever dropped: blocks are as long as they come, or empty.

What keeps the load even, each with the field of ModelConfig or the key that turns it on:

    bias            added to the scores when experts are chosen, never to the weights; after each
                    step it rises where the load was below the mean (arXiv:2408.15664)
    auxiliary loss  sum over experts of load share x mean score, by sequence (DeepSeek-V3, equations
                    17 to 20) or with the shares of the last global batch
    z-loss          mean of logsumexp(logits)^2 (arXiv:2202.08906, equation 5)

The losses enter backward at the router, divided once like the token loss (`Balance`); they travel
to no other stage and no other rank.
Proven in tests/models/test_moe.py against a loop over experts and transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.layers import ACTIVATIONS, MLP
from torchtitan_lite.ops.grouped import ALIGNMENT, align_blocks, best_kernel, grouped_linear
from torchtitan_lite.ops.permute import combine_rows, gather_rows, take_rows


@dataclass
class Balance:
    """How the losses of all routers are weighed; one object for all layers, set before a step.

    All sums over the global batch are divided by its size, so that micro-batches and ranks add up
    to the mean, as in GlobalBatchLoss.
    """

    auxiliary_weight: float = 0.0
    per_sequence: bool = True
    z_weight: float = 0.0
    num_sequences: int = 1  # in the global batch
    seq_len: int = 1  # of a whole sequence, also where a rank sees a part of it


class Router(nn.Module):
    """Scores of all experts for each token, and the choice of the best."""

    e_score_correction_bias: Tensor | None
    load: Tensor
    counts: Tensor
    losses: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.balance = Balance()
        self.is_counting = False  # while training, but not where a forward is computed again
        self.linear = F.linear  # or one of other precision
        self.extra: dict[str, Any] = {}  # what a plan adds: the sum over ranks of one sequence
        num_experts = config.num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size))
        bias = torch.zeros(num_experts, dtype=torch.float32) if config.router_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        # Shares of the last global batch, from outside; what this rank has counted since.
        self.register_buffer("load", torch.zeros(num_experts), False)
        self.register_buffer("counts", torch.zeros(num_experts, dtype=torch.int64), False)
        self.register_buffer("losses", torch.zeros(2), False)  # auxiliary, z

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, seq, hidden) -> weights fp32 and experts int64, each (batch, seq, top k)."""
        config = self.config
        exact = torch.promote_types(x.dtype, torch.float32)
        logits = self.linear(x.to(exact), self.weight.to(exact))  # (batch, seq, experts)
        scores = logits.sigmoid() if config.router_scores == "sigmoid" else logits.softmax(-1)
        with torch.no_grad():
            chosen = self._choose(scores)
            if self.is_counting:
                self.counts += _count(chosen.flatten(), config.num_experts)
        weights = scores.gather(-1, chosen)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * config.routed_scaling_factor
        if torch.is_grad_enabled():
            weights = _WithLosses.apply(weights, *self._losses(logits, scores, chosen))
        return weights, chosen

    def _choose(self, scores: Tensor) -> Tensor:
        """The top k experts; of the best `topk_group` of `n_group` groups, if there are groups.

        A group is as good as its best two experts together (DeepSeek-V3, section 2.1.2).
        """
        config = self.config
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if config.n_group > 1:
            groups = scores.unflatten(-1, (config.n_group, -1))
            best = groups.topk(2, dim=-1)[0].sum(-1).topk(config.topk_group, dim=-1)[1]
            allowed = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
            scores = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
        return scores.topk(config.num_experts_per_tok, dim=-1)[1]

    def _losses(self, logits: Tensor, scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """This call's share of the auxiliary and of the z-loss of the global batch."""
        balance, num_experts = self.balance, self.config.num_experts
        num_tokens = balance.num_sequences * balance.seq_len
        auxiliary = z = logits.new_zeros(())
        if balance.auxiliary_weight:
            shares = scores / scores.sum(-1, keepdim=True)
            load = self.load  # (experts,)
            if balance.per_sequence:
                rows = torch.arange(chosen.shape[0], device=chosen.device)[:, None, None]
                load = _count((chosen + rows * num_experts).flatten(), rows.numel() * num_experts)
                load = load.view(-1, num_experts).to(scores.dtype)  # (batch, experts)
                if "sum_over_sequence" in self.extra:
                    load = self.extra["sum_over_sequence"](load)
                load = load / (balance.seq_len * chosen.shape[-1])
            auxiliary = (shares.sum(1) * load).sum() * num_experts / num_tokens
            auxiliary = auxiliary * balance.auxiliary_weight
        if balance.z_weight:
            z = logits.logsumexp(-1).square().sum() * balance.z_weight / num_tokens
        if self.is_counting:
            self.losses += torch.stack((auxiliary, z)).detach()
        return auxiliary, z


class _WithLosses(torch.autograd.Function):
    """x itself; in backward each loss gets the gradient 1, as if it were added to the total."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *losses: Tensor) -> Tensor:
        ctx.like = losses[0]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        one = torch.ones_like(ctx.like)
        return grad, one, one


def _count(indices: Tensor, size: int) -> Tensor:
    """How often each number below `size` occurs in `indices`; unlike bincount it never waits."""
    return torch.zeros(size, dtype=torch.int64, device=indices.device).scatter_add_(
        0, indices, torch.ones_like(indices)
    )


class Experts(nn.Module):
    """The MLPs of all experts as three 3-D weights, over rows that are sorted by expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        num_experts, width = config.num_experts, config.moe_intermediate_size
        self.activation = ACTIVATIONS[config.hidden_act]
        self.kernel = "auto"
        self.product = grouped_linear  # or one of other precision
        self.gate_proj = nn.Parameter(torch.empty(num_experts, width, config.hidden_size))
        self.up_proj = nn.Parameter(torch.empty(num_experts, width, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, config.hidden_size, width))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: (rows, hidden), counts: (experts,) rows of each expert -> (rows, hidden)."""
        kernel = self.kernel
        if kernel == "auto":
            kernel = best_kernel(rows.device, rows.dtype, self.down_proj.shape[1:])
        if kernel == "grouped" and rows.device.type != "cpu":
            multiple = ALIGNMENT // rows.dtype.itemsize
            lengths, places, size = align_blocks(counts, rows.shape[0], multiple)
            padded = rows.new_zeros(size, rows.shape[1]).index_copy_(0, places, rows)
            return take_rows(self._multiply(padded, lengths, kernel), places)
        return self._multiply(rows, counts, kernel)

    def _multiply(self, rows: Tensor, counts: Tensor, kernel: str) -> Tensor:
        gate, up = (
            self.product(rows, weight, counts, kernel=kernel)
            for weight in (self.gate_proj, self.up_proj)
        )
        return self.product(self.activation(gate) * up, self.down_proj, counts, kernel=kernel)


class MoE(nn.Module):
    """Routed experts, and a shared one beside them; in the place of an MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        shared = config.shared_expert_intermediate_size
        self.shared_expert = MLP(config, shared) if shared else None
        self.shared_expert_gate = (
            nn.Linear(config.hidden_size, 1, bias=False) if config.shared_expert_gate else None
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x)
        top_k = chosen.shape[-1]
        tokens = x.flatten(0, -2)  # (tokens, hidden)
        order = chosen.flatten().argsort(stable=True)  # of the pairs (token, choice), by expert
        counts = _count(chosen.flatten(), self.gate.config.num_experts)
        rows = self.experts(gather_rows(tokens, order, top_k), counts)
        out = combine_rows(rows, order, weights.flatten(0, -2)).view_as(x)
        if self.shared_expert is None:
            return out
        shared = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = shared * self.shared_expert_gate(x).sigmoid()
        return out + shared

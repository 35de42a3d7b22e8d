"""The layers of a decoder beside attention: norm, MLP, head.

Shapes are those of one device: (batch, seq, hidden). Two things make every parallel plan fit
from outside. Sizes are inferred where a tensor is viewed, so a projection that holds only some of
the heads needs no edit. And the two steps that are more than a matmul are submodules without
parameters, `core_attention` and `token_loss`, to which a plan can attach.

Proven in tests/models/: logits equal transformers' to 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.ops.cross_entropy import linear_cross_entropy

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the precision of its weight, which a residual stream in fp32 exceeds."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def build_norm(config: ModelConfig) -> nn.Module:
    """The norm of the residual stream."""
    if config.norm_type == "layer":
        return nn.LayerNorm(config.hidden_size, eps=config.rms_norm_eps)
    return RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) (arXiv:2002.05202); without a gate down(act(up(x)))."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.mlp_bias
        width = width or config.intermediate_size
        self.activation = ACTIVATIONS[config.hidden_act]
        self.gate_proj = nn.Linear(hidden, width, bias=bias) if config.gated_mlp else None
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class TokenLoss(nn.Module):
    """Hidden states, head and labels -> sums of the token losses; the logits never exist whole.

    Returned is a vector of three sums over the labels that are not -100, in fp32:
    [cross-entropy + z_loss_weight * z, cross-entropy, z], z = logsumexp(logits)^2. Only the first
    carries a gradient; the others are for the report.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.num_chunks = 1
        self.z_loss_weight = 0.0
        # What a plan adds: its group and its first row; products of other precision.
        self.extra: dict[str, Any] = {}

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(
            x.flatten(0, -2),  # (batch * seq, hidden)
            weight,
            labels.flatten(),
            vocab_size=self.vocab_size,
            num_chunks=self.num_chunks,
            z_loss_weight=self.z_loss_weight,
            **self.extra,
        )


class LMHead(nn.Linear):
    """Hidden states -> logits, or straight to the loss when labels are given."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.padded_vocab_size, bias=False)
        self.token_loss = TokenLoss(config)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return super().forward(x)
        return self.token_loss(x, self.weight, labels)

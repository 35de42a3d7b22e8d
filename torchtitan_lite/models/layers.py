"""The layers of a decoder: rotary embedding, attention, MLP, head.

Shapes are those of one device: (batch, seq, hidden). Two things make every parallel plan fit
from outside. Heads are inferred with `view(..., -1, head_dim)`, so a projection that holds only
some of the heads needs no edit. And the two steps that are more than a matmul are submodules
without parameters, `core_attention` and `token_loss`, to which a plan can attach.

Proven in tests/models/: logits equal transformers' to 1e-5.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.ops.cross_entropy import linear_cross_entropy


def rotary_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Angle per position of each pair of channels, shape (head_dim / 2,), fp32.

    theta^(-2i/d) (RoFormer, arXiv:2104.09864, section 3.2.2). With rope_type "llama3" the slow
    frequencies, which never completed a turn within the original context, are divided by
    `factor`, the fast ones are left alone, and those between are interpolated in the number of
    turns (Llama 3.1 model card).
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=device).float()
    frequencies = 1.0 / (config.rope_theta ** (exponents / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: slow, 1: fast
    return (1 - keep) * frequencies / scaling["factor"] + keep * frequencies


class RotaryEmbedding(nn.Module):
    """Cosine and sine of each position's angles; holds no state, so nothing to initialise."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, seq) positions -> cos and sin, each (batch, seq, 1, head_dim), fp32."""
        frequencies = rotary_frequencies(self.config, positions.device)
        angles = positions[..., None].float() * frequencies  # (batch, seq, head_dim / 2)
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each channel pair (i, i + head_dim / 2) of x: (batch, seq, heads, head_dim).

    The half-split layout of Hugging Face, so their weights need no permutation. Computed in
    fp32 whatever the dtype of x: the angles of far positions do not survive bf16.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).type_as(x)


class CoreAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v under a causal mask; query heads share KV heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: (batch, heads, seq, head_dim), k and v: (batch, kv_heads, seq, head_dim)."""
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped KV heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden = config.hidden_size
        q_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, q_width, bias=False)
        self.k_proj = nn.Linear(hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, hidden, bias=False)
        self.core_attention = CoreAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))  # (batch, seq, heads, head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, seq, head_dim)
        out = self.core_attention(q, k, v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


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
        self.extra: dict[str, Any] = {}  # what a plan adds: its group and its first row

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

"""The layers of a decoder: norm, rotary embedding, attention, MLP, head.

Shapes are those of one device: (batch, seq, hidden). Two things make every parallel plan fit
from outside. Heads are inferred with `view(..., -1, head_dim)`, so a projection that holds only
some of the heads needs no edit. And the two steps that are more than a matmul are submodules
without parameters, `core_attention` and `token_loss`, to which a plan can attach.

Proven in tests/models/: logits equal transformers' to 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.ops.cross_entropy import linear_cross_entropy
from torchtitan_lite.ops.dropout import Dropout

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class Context(NamedTuple):
    """What every layer is told of the tokens, beside their hidden states."""

    cos: Tensor | None  # (batch, seq, 1, head_dim) fp32; None: nothing is rotated
    sin: Tensor | None
    positions: Tensor | None  # (batch, seq), restarting where documents are kept apart; else None
    masks: dict[int | None, Tensor | None]  # by sliding window, as of attention_mask
    keys: Tensor | None  # (batch,) int64, the randomness of each row; None: nothing is dropped


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the precision of its weight, which a residual stream in fp32 exceeds."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def build_norm(config: ModelConfig) -> nn.Module:
    """The norm of the residual stream."""
    if config.norm_type == "layer":
        return nn.LayerNorm(config.hidden_size, eps=config.rms_norm_eps)
    return RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


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


def attention_mask(
    positions: Tensor, *, window: int | None, documents: bool, num_queries: int | None = None
) -> Tensor | None:
    """Which keys each query may see: (batch, 1, queries, keys), or None for all up to itself.

    positions: (batch, keys), all keys there are. The last `num_queries` of them (None: all) are
    the queries. A query sees itself and what is before it, at most `window` keys in all; with
    `documents`, none before the last position 0.
    """
    num_keys = positions.shape[1]
    if not documents and (window is None or num_keys <= window):
        return None
    places = torch.arange(num_keys, device=positions.device)
    queries = places[num_keys - (num_queries or num_keys) :, None]
    mask = (places <= queries)[None]  # (1, queries, keys)
    if window is not None:
        mask = mask & (queries - places < window)
    if documents:
        document = (positions == 0).cumsum(1)  # (batch, keys)
        mask = mask & (document[:, queries[:, 0], None] == document[:, None])
    return mask[:, None]


class CoreAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v; query heads share KV heads."""

    def __init__(self, dropout: float = 0.0, site: str = "") -> None:
        super().__init__()
        self.dropout = Dropout(dropout, site)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """q: (batch, heads, queries, head_dim), k and v: (batch, kv_heads, keys, head_dim).

        Without a mask it is causal; a single query then sees all keys. `keys` as in Context.
        """
        grouped = q.shape[1] != k.shape[1]
        causal = mask is None and q.shape[2] > 1
        if keys is None or self.dropout.p == 0.0:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
            )
        # No fused kernel takes a mask that we draw.
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scores = (q @ k.transpose(2, 3)).float() / math.sqrt(q.shape[3])
        if causal:
            mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return self.dropout(scores.softmax(-1).type_as(v), keys) @ v


class Attention(nn.Module):
    """Causal self-attention with grouped KV heads."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.window = window_of_layer(config, index)
        interval = config.no_rope_layer_interval
        self.rotates = not (interval and (index + 1) % interval == 0)
        hidden = config.hidden_size
        q_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, q_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_width, hidden, bias=config.attention_out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.core_attention = CoreAttention(config.attention_dropout, f"layers.{index}.attention")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))  # (batch, seq, heads, head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates and context.cos is not None and context.sin is not None:
            q, k = (rotate(t, context.cos, context.sin) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, seq, head_dim)
        out = self.core_attention(q, k, v, context.masks[self.window], context.keys)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def window_of_layer(config: ModelConfig, index: int) -> int | None:
    """Keys that a query of layer `index` sees, itself included; None: all before it."""
    return config.sliding_window if index >= config.max_window_layers else None


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

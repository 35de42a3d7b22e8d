"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Keys and values of all heads are made from one narrow latent a token, queries from another. The
position cannot pass through the latent, so it has channels of its own, and those of the key are
one head that all share:

    x -> q_a -> norm -> q_b                 heads x [ nope | rope ]
    x -> kv_a -+-> norm -> kv_b             heads x [ nope |        value ]
               +-> rope, for all heads              [      | rope ]

The softmax sees ordinary heads of nope + rope channels; only o_proj knows that values are narrower.
The mscale_all_dim of yarn scales q and k alike, position or not: the softmax has its square.
Proven in tests/models/test_moe_families.py against transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchtitan_lite.models.attention import Context, CoreAttention
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.layers import RMSNorm
from torchtitan_lite.models.rope import mscale, rotate

# Of the norms of both latents: transformers has no key for it.
LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values come from a latent."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        assert config.kv_lora_rank is not None
        self.interleave = config.rope_interleave
        hidden, heads = config.hidden_size, config.num_attention_heads
        bias = config.attention_bias
        self.nope, self.rope = config.qk_nope_head_dim, config.head_dim
        self.value = config.v_head_dim
        q_width = heads * (self.nope + self.rope)
        self.has_q_latent = config.q_lora_rank is not None
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, q_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, q_width, bias=False)
        self.kv_lora_rank = config.kv_lora_rank
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.kv_lora_rank + self.rope, bias=bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (self.nope + self.value), bias=False
        )
        self.o_proj = nn.Linear(heads * self.value, hidden, bias=config.attention_out_bias)
        self.core_attention = CoreAttention(config, index)
        scaling = config.rope_scaling or {}
        growth = mscale(scaling.get("factor", 1), scaling.get("mscale_all_dim", 0))
        self.core_attention.scale = growth**2 * (self.nope + self.rope) ** -0.5

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.has_q_latent:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        else:
            q = self.q_proj(x)
        q = q.unflatten(-1, (-1, self.nope + self.rope))  # (batch, seq, heads, nope + rope)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, self.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, self.nope + self.value))
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        k_nope, v = kv.split([self.nope, self.value], dim=-1)
        q_rope, k_rope = (self._rotate(t, context) for t in (q_rope, k_rope[:, :, None]))
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, seq, width)
        out = self.core_attention(q, k, v, context.mask, context.keys)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _rotate(self, x: Tensor, context: Context) -> Tensor:
        """Pairs of neighbours are brought apart first: x0, x1, x2, ... -> x0, x2, .. x1, x3, .."""
        assert context.cos is not None and context.sin is not None
        if self.interleave:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x, context.cos, context.sin)

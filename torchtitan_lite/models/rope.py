"""Rotary position embedding: each pair of channels turns by an angle that grows with the position.

RoFormer, arXiv:2104.09864, section 3.2.2. Real arithmetic in the half-split layout of Hugging
Face, so their weights need no permutation.
Proven in tests/models/: frequencies and logits equal transformers'.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from torchtitan_lite.models.config import ModelConfig


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

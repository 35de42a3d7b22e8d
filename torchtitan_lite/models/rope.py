"""Rotary position embedding: each pair of channels turns by an angle that grows with the position.

RoFormer, arXiv:2104.09864, section 3.2.2: pair i of d / 2 turns by theta^(-2i/d) a token, the first
pairs fast, the last so slowly that a context sees a part of one turn. Beyond the context that a
model was trained on, slow pairs reach angles it never saw; rope_scaling turns them more slowly.

    rope_type    fast pairs    slow pairs    those between
    linear       / factor      / factor      / factor          position interpolation
    dynamic      as they are   / stretch     a larger theta    stretch follows the row's length
    llama3       as they are   / factor      interpolated in the turns within the old context
    yarn         as they are   / factor      interpolated in i, and attention is sharper

With "dynamic" a row has frequencies of its own: its longest position tells them, whatever stands
beside it in a batch. transformers takes the longest of the batch, and keeps it for later batches
until one is within the old context; the two agree where all rows have one length.

Real arithmetic in the half-split layout of Hugging Face, so their weights need no permutation.
Proven in tests/models/test_rope.py: frequencies and logits equal transformers'.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lite.models.config import YARN_DEFAULTS, ModelConfig


def rotary_frequencies(config: ModelConfig, positions: Tensor) -> Tensor:
    """Angle a token of each pair of channels for (batch, seq) positions, fp32.

    Shape (head_dim / 2,), or (batch, 1, head_dim / 2) where the frequencies follow the length.
    "linear": arXiv:2306.15595, section 2.3; "llama3": the Llama 3.1 model card; for the others see
    the functions below.
    """
    pairs = torch.arange(config.head_dim // 2, device=positions.device).float()
    theta: float | Tensor = config.rope_theta
    if config.rope_follows_length:
        theta = _theta_of_length(config, positions.amax(-1)[:, None, None] + 1)
    frequencies = 1.0 / theta ** (2 * pairs / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None or config.rope_follows_length:
        return frequencies
    keep: float | Tensor = 0.0  # 1: as it is, 0: divided by factor
    if scaling["rope_type"] == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    elif scaling["rope_type"] == "yarn":
        keep = _kept_by_yarn(config, pairs)
    return (1 - keep) * frequencies / scaling["factor"] + keep * frequencies


def _theta_of_length(config: ModelConfig, length: Tensor) -> Tensor:
    """The base for rows of `length` tokens, by which the last pair is divided by the stretch.

    Dynamic NTK (YaRN, arXiv:2309.00071, sections 3.1 and 3.3): theta * stretch^(d / (d-2)). There
    the stretch is length / context; here, as in transformers, it grows `factor` times as fast.
    """
    assert config.rope_scaling is not None
    excess = (length / config.max_position_embeddings - 1).clamp(min=0)
    stretch = 1 + config.rope_scaling["factor"] * excess
    return config.rope_theta * stretch ** (config.head_dim / (config.head_dim - 2))


def _kept_by_yarn(config: ModelConfig, pairs: Tensor) -> Tensor:
    """1 for pairs that turn beta_fast times in the original context, 0 for beta_slow times.

    NTK-by-parts (YaRN, arXiv:2309.00071, section 3.2). Between them linear in the number of the
    pair, as in the code that trained its models; the paper's text has it linear in the turns.
    """
    scaling = YARN_DEFAULTS | (config.rope_scaling or {})

    def pair_with(turns: float) -> float:  # original * theta^(-2i/d) = 2 pi turns, solved for i
        ratio = scaling["original_max_position_embeddings"] / (2 * math.pi * turns)
        return config.head_dim / 2 * math.log(ratio) / math.log(config.rope_theta)

    first, last = pair_with(scaling["beta_fast"]), pair_with(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    width = last - first or 1  # no pair between: a step
    return 1 - ((pairs - first) / width).clamp(0.0, 1.0)


def mscale(factor: float, weight: float = 1.0) -> float:
    """What q and k grow by each when a context is stretched: YaRN's sqrt(1/t), section 3.4."""
    return 1 + 0.1 * weight * math.log(factor)


def attention_factor(scaling: dict[str, Any] | None) -> float:
    """On cos and sin, and so on what is rotated of q and of k.

    `mscale_all_dim` is for q and k as a whole; latent attention has it in the softmax, so it is
    taken out here.
    """
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    rotated, whole = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if rotated and whole:
        return mscale(scaling["factor"], rotated) / mscale(scaling["factor"], whole)
    return mscale(scaling["factor"])


class RotaryEmbedding(nn.Module):
    """Cosine and sine of each position's angles; holds no state, so nothing to initialise."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.factor = attention_factor(config.rope_scaling)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, seq) positions -> cos and sin, each (batch, seq, 1, head_dim), fp32."""
        frequencies = rotary_frequencies(self.config, positions)
        angles = positions[..., None].float() * frequencies  # (batch, seq, head_dim / 2)
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]
        return self.factor * angles.cos(), self.factor * angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each channel pair (i, i + head_dim / 2) of x: (batch, seq, heads, head_dim).

    The half-split layout of Hugging Face, so their weights need no permutation. Computed in
    fp32 whatever the dtype of x: the angles of far positions do not survive bf16.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).type_as(x)

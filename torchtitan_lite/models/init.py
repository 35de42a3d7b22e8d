"""Fresh weights from (seed, parameter name), the same on every mesh.

Each parameter is drawn whole by a generator of its own, seeded by a hash of the seed and the
parameter's name, and only then cut. So neither the number of ranks, nor the stage that holds a
layer, nor the order in which parameters are visited can change a weight, and no seed checkpoint is
needed. Drawing into a shard instead would give every rank the same numbers.

Weights are N(0, initializer_range); those that write into the residual stream are scaled by
1 / sqrt(2 * layers), as each layer adds two of them (GPT-2, section 2.3). Norms are one.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from torchtitan_lite.models.config import ModelConfig

_RESIDUAL_WRITERS = ("o_proj.weight", "down_proj.weight")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


def canonical_name(name: str, config: ModelConfig) -> str:
    """The one name of a parameter: a tied head is the embedding, on whichever stage it is."""
    if config.tie_word_embeddings and name == "lm_head.weight":
        return "embed_tokens.weight"
    return name


def draw_parameter(
    name: str, shape: torch.Size, config: ModelConfig, *, seed: int, device: torch.device
) -> Tensor:
    """The whole parameter `name`, fp32, on `device`; a pure function of its arguments."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    std = config.initializer_range
    if name.endswith(_RESIDUAL_WRITERS):
        std /= math.sqrt(2 * config.num_hidden_layers)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    weight = torch.empty(shape, device=device).normal_(0.0, std, generator=generator)
    if name in _VOCABULARY:
        weight[config.vocab_size :] = 0.0
    return weight

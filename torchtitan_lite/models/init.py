"""Fresh weights from (seed, parameter name), the same on every mesh.

Each parameter is drawn whole by a generator of its own, seeded by a hash of the seed and the
parameter's name, and only then cut. So neither the number of ranks, nor the stage that holds a
layer, nor the order in which parameters are visited can change a weight, and no seed checkpoint is
needed. Drawing into a shard instead would give every rank the same numbers.

Weights are N(0, initializer_range); those that write into the residual stream are scaled by
1 / sqrt(writes), the number of times the layers add to it (GPT-2, section 2.3): two a layer, one
where the layer is a state-space mixer. What all experts of a layer write counts once. Norms are
one, biases zero.

A state-space mixer starts so that the slowest state of a channel remembers 10 to 1,000 tokens:
state n decays with A = -n (S4D-Real), and time steps are log-uniform in [0.001, 0.1], written as
the bias that softplus turns into them (Mamba, arXiv:2312.00752, section 3.6, and its code).
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from torchtitan_lite.models.config import ModelConfig

_RESIDUAL_WRITERS = {  # how many there are in a layer
    "o_proj.weight": 2,
    "down_proj.weight": 2,
    "experts.down_proj": 2,
    "out_proj.weight": 1,
}
_TIME_STEPS = (0.001, 0.1)
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


def canonical_name(name: str, config: ModelConfig) -> str:
    """The one name of a parameter: a tied head is the embedding, on whichever stage it is."""
    if config.tie_word_embeddings and name == "lm_head.weight":
        return "embed_tokens.weight"
    return name


def generator_of(name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own for each name, seeded by the name's hash."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def draw_parameter(
    name: str, shape: torch.Size, config: ModelConfig, *, seed: int, device: torch.device
) -> Tensor:
    """The whole parameter `name`, fp32, on `device`; a pure function of its arguments."""
    if name.endswith(("norm.weight", "mixer.D")):
        return torch.ones(shape, device=device)
    if name.endswith("mixer.A_log"):
        return torch.arange(1.0, shape[1] + 1, device=device).log().repeat(shape[0], 1)
    if name.endswith(".bias") and not name.endswith("dt_proj.bias"):
        return torch.zeros(shape, device=device)
    generator = generator_of(f"{seed}:{name}", device)
    weight = torch.empty(shape, device=device)
    if name.endswith("dt_proj.bias"):
        low, high = map(math.log, _TIME_STEPS)
        step = weight.uniform_(low, high, generator=generator).exp()
        return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
    if name.endswith(("dt_proj.weight", "conv1d.weight")):
        bound = shape[-1] ** -0.5  # of so many inputs each output is a sum
        return weight.uniform_(-bound, bound, generator=generator)
    std = config.initializer_range
    for writer, writes in _RESIDUAL_WRITERS.items():
        if name.endswith(writer):
            std /= math.sqrt(writes * config.num_hidden_layers)
    weight.normal_(0.0, std, generator=generator)
    if name in _VOCABULARY:
        weight[config.vocab_size :] = 0.0
    return weight

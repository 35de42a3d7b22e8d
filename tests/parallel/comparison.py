"""A parallel module beside its plain twin: the same weights, and by how much they differ.

All in fp64, where only a wrong formula is off by more than 1e-12.
"""

from __future__ import annotations

import copy
import math
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.ops.collectives import gather
from torchtitan_lite.ops.dropout import sample_keys

CONFIG = ModelConfig(
    vocab_size=61,  # padded to 128: of four shards two are padding
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=6,
    max_position_embeddings=24,
)
BATCH, SEQ = 4, 8
WORLDS = (2, 4)
SEQUENCE = 1  # the dim of hidden states that sequence parallelism cuts
TOLERANCE = 1e-12

Errors = dict[str, float]  # relative, by quantity
Module = TypeVar("Module", bound=nn.Module)


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def make_tokens() -> Tensor:
    return torch.randint(
        CONFIG.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(3)
    )


def make_labels() -> Tensor:
    labels = make_tokens().roll(-1, 1)
    labels[0, 2:] = -100
    return labels


def make_keys() -> Tensor:
    """The randomness of each row."""
    return sample_keys(11, 5, BATCH, torch.device("cpu"))


def make_positions() -> Tensor:
    """(BATCH, SEQ), another document boundary in each row."""
    return torch.stack([(torch.arange(SEQ) - row) % (SEQ - 1) for row in range(BATCH)])


def make_twins(module: Module) -> tuple[Module, Module]:
    """Two equal modules in fp64, their weights and biases drawn by name."""
    module = module.to(torch.float64)
    with torch.no_grad():
        for seed, (_, parameter) in enumerate(sorted(module.named_parameters())):
            # Small enough that no softmax saturates.
            parameter.copy_(0.2 * random(*parameter.shape, seed=seed))
    return module, copy.deepcopy(module)


def local_slice(x: Tensor, dim: int | None) -> Tensor:
    """This rank's slice of `dim`; all of x for None."""
    if dim is None:
        return x.detach().clone()
    return x.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def joined(x: Tensor, dim: int | None) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    return x.detach() if dim is None else gather(x.detach(), dim, group)


def relative_error(ours: Tensor, expected: Tensor) -> float:
    assert ours.shape == expected.shape, (ours.shape, expected.shape)
    return float((ours - expected).norm() / expected.norm())


def gradient_errors(ours: nn.Module, plain: nn.Module) -> Errors:
    """Of each weight; every weight of `ours` must be a DTensor with a gradient.

    A gradient that is zero but for rounding (that of k_proj.bias, where nothing is rotated:
    softmax sees no shift of all keys) is compared with the size of all of them.
    """
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    whole = math.hypot(*(float(grad.norm()) for grad in expected.values()))
    found = {}
    for name, parameter in ours.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert isinstance(parameter.grad, DTensor), name
        found[name] = relative_error(parameter.grad.full_tensor(), expected[name])
        if expected[name].norm() < 1e-7 * whole:
            found[name] *= float(expected[name].norm() / whole)
    assert found.keys() == expected.keys()
    return found

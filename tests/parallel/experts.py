"""A small mixture of experts on any mesh beside its plain twin, whose experts are a loop.

All in fp64, but for the routers, whose scores are fp32 whatever the model is: their rounding is
what the tolerance is for.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parallel.comparison import Errors, gradient_errors, make_twins, relative_error
from torchtitan_lite.config import Config
from torchtitan_lite.mesh import Degrees, ParallelMesh, build_mesh
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.moe import Balance, Experts, Router
from torchtitan_lite.optim.clip import gradient_norm
from torchtitan_lite.parallel.apply import parallelize
from torchtitan_lite.parallel.data import set_last_micro_batch
from torchtitan_lite.parallel.tensor import reduce_partial_gradients

MIXTURE = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=6,
    max_position_embeddings=24,
    first_k_dense_replace=1,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=20,
    shared_expert_gate=True,
    router_scores="sigmoid",
    router_bias=True,
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
)
ROWS, SEQ = 8, 8
TOLERANCE = 1e-6


def make_tokens(seq: int = SEQ) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(MIXTURE.vocab_size, (ROWS, seq), generator=generator)


def routers(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def make_mixtures(model: ModelConfig, seq: int, num_chosen: int) -> tuple[Decoder, Decoder]:
    """Two equal decoders in fp64, with every way of balancing on.

    No token goes to experts behind the first `num_chosen`; it takes a bias to forbid it.
    """
    twins = make_twins(Decoder(model))
    for twin in twins:
        for index, router in enumerate(routers(twin)):
            router.balance = Balance(0.3, True, 0.1, num_sequences=ROWS, seq_len=seq)
            router.is_counting = True
            if router.e_score_correction_bias is not None:
                generator = torch.Generator().manual_seed(index)
                noise = torch.randn(model.num_experts, generator=generator, dtype=torch.float64)
                router.e_score_correction_bias.copy_(0.1 * noise)
                router.e_score_correction_bias[num_chosen:] = -100
        for module in twin.modules():
            if isinstance(module, Experts):
                module.kernel = "loop"
    return twins


def plan(model: Decoder, degrees: Degrees, options: dict[str, Any]) -> ParallelMesh:
    """Every plan of the configuration that `degrees` and `options` (keys) make, in fp64."""
    config = Config()
    settings = {
        "training.mixed_precision_param": "float64",
        "training.mixed_precision_reduce": "float64",
        "activation_checkpoint.mode": "none",
        "parallelism.zero_stage": 3 if degrees.sharded else 0,
        **options,
    }
    for name, value in settings.items():
        section, key = name.split(".")
        assert hasattr(getattr(config, section), key), name
        setattr(getattr(config, section), key, value)
    mesh = build_mesh(degrees, "cpu", dist.get_rank())
    parallelize(model, mesh, config)
    return mesh


def compare(
    degrees: Degrees,
    *,
    seq: int = SEQ,
    num_micro_batches: int = 1,
    options: dict[str, Any] | None = None,
    model: ModelConfig = MIXTURE,
    num_chosen: int = MIXTURE.num_experts,
) -> Errors:
    """Forward and backward of all rows, and what differs from one process by how much."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    plain, ours = make_mixtures(model, seq, num_chosen)
    mesh = plan(ours, degrees, options or {})
    tokens = make_tokens(seq)
    expected = plain(tokens, labels=tokens)[0] / tokens.numel()
    expected.backward()
    own = tokens.chunk(degrees.batch)[mesh.batch_rank]
    loss = torch.zeros((), dtype=torch.float64)
    zero_stage = (options or {}).get("parallelism.zero_stage", 3 if degrees.sharded else 0)
    for index, rows in enumerate(own.chunk(num_micro_batches)):
        last = index == num_micro_batches - 1
        set_last_micro_batch(ours, zero_stage=zero_stage, last=last)
        share = ours(rows, labels=rows)[0] / tokens.numel()
        share.backward()
        loss += share.detach() * mesh.owns_data
    reduce_partial_gradients(ours.parameters())
    dist.all_reduce(loss)
    norm = gradient_norm(ours.parameters(), ranks_per_stage=mesh.ranks_per_stage)
    whole = gradient_norm_of(plain)
    found = {
        "output": relative_error(loss, expected.detach().double()),
        "norm": abs(norm / whole - 1),
        **gradient_errors(ours, plain),
    }
    for index, (router, theirs) in enumerate(zip(routers(ours), routers(plain), strict=True)):
        for name in ("counts", "losses"):
            total = getattr(router, name).double()
            dist.all_reduce(total)
            found[f"{name} {index}"] = relative_error(total, getattr(theirs, name).double())
    return found


def gradient_norm_of(model: nn.Module) -> float:
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return float(torch.cat(gradients).norm())


def with_experts(**changes: Any) -> ModelConfig:
    return dataclasses.replace(MIXTURE, **changes)

"""The same seed gives the same weights on any mesh, bit by bit, with no seed checkpoint.

The hash of each full parameter is compared with one process, on nine meshes and with host
offload; what the weights are (their spread, the padded rows, the norms) is checked on the draws.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.parallel.builder import build, configure
from tests.parity.harness import TINY, Mesh, whole
from tests.world import run_ranks
from torchtitan_lite import build as build_module
from torchtitan_lite.config import Config
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.init import canonical_name, draw_parameter

CPU = torch.device("cpu")
SEED = "debug.seed"


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _hashes_on_rank(config: Config, model: ModelConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Of each whole parameter, and of this rank's shard of it."""
    _, built = build(config, model)
    named = built.named_parameters
    shards = {
        name: _digest((p.to_local() if isinstance(p, DTensor) else p).detach())
        for name, p in named.items()
    }
    return {name: _digest(whole(p)) for name, p in named.items()}, shards


def hashes(
    mesh: Mesh, options: dict[str, Any] | None = None, model: ModelConfig = TINY
) -> dict[str, str]:
    """Of each whole parameter of the model; ranks that hold the same one agree."""
    config = configure(mesh, options or {}, model)
    found: dict[str, str] = {}
    for whole_hashes, _ in run_ranks(_hashes_on_rank, mesh.world, config, model):
        for name, digest in whole_hashes.items():
            assert found.setdefault(name, digest) == digest, name
    return found


@cache
def _one_process(tied: bool = False) -> dict[str, str]:
    return hashes(Mesh(), model=dataclasses.replace(TINY, tie_word_embeddings=tied))


ZBV = {"parallelism.pipeline_parallel_schedule": "ZBVZeroBubble"}


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (Mesh(dp_shard=2), {}),
        (Mesh(dp_shard=2), {"parallelism.zero_stage": 0}),
        (Mesh(dp_shard=2), {"training.enable_cpu_offload": True}),
        (Mesh(dp_shard=8), {}),  # some shards of the narrow tensors are empty
        (Mesh(tp=4), {}),
        (Mesh(dp_shard=2, tp=2), {}),
        (Mesh(dp_replicate=2, dp_shard=2), {}),
        (Mesh(pp=4), {}),
        (Mesh(pp=2), ZBV),
        (Mesh(pp=2, dp_shard=2, tp=2), {}),
    ],
    ids=lambda value: str(value) if isinstance(value, Mesh) else "+".join(map(str, value.values())),
)
def test_every_mesh_starts_from_the_same_weights(mesh: Mesh, options: dict[str, Any]) -> None:
    assert hashes(mesh, options) == _one_process()


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=2, tp=2), Mesh(pp=2)], ids=str)
def test_tied_weights_start_the_same_on_every_mesh(mesh: Mesh) -> None:
    model = dataclasses.replace(TINY, tie_word_embeddings=True)
    assert hashes(mesh, model=model) == _one_process(tied=True)
    assert "lm_head.weight" not in _one_process(tied=True)


def test_another_seed_changes_every_weight_but_the_norms() -> None:
    other = hashes(Mesh(), {SEED: 43})
    same = {name for name, digest in _one_process().items() if other[name] == digest}
    assert same == {name for name in other if name.endswith("norm.weight")}


def test_no_two_matrices_are_equal() -> None:
    """Not of one layer, not of two: a seed shared by the stages would repeat layers."""
    digests = [d for name, d in _one_process().items() if not name.endswith("norm.weight")]
    assert len(set(digests)) == len(digests) == 4 * 7 + 2


def test_shards_of_one_parameter_differ_between_ranks() -> None:
    config = configure(Mesh(dp_shard=2), {}, TINY)
    (_, first), (_, second) = run_ranks(_hashes_on_rank, 2, config, TINY)
    equal = {name for name in first if first[name] == second[name]}
    assert equal == {name for name in first if name.endswith("norm.weight")}


def _draw_into_shards(part: Decoder, *, seed: int, device: torch.device) -> None:
    """Twin: seed the process, then fill each shard: every rank draws the same numbers."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in part.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.normal_(0.0, 0.02)


def test_drawing_into_shards_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "initialise", _draw_into_shards)
    assert hashes(Mesh(dp_shard=2)) != hashes(Mesh())


def test_stored_in_bf16_the_weights_are_the_same_draws_rounded() -> None:
    name = "layers.0.mlp.up_proj.weight"
    shape = torch.Size((TINY.intermediate_size, TINY.hidden_size))
    drawn = draw_parameter(name, shape, TINY, seed=42, device=CPU)
    assert _one_process()[name] == _digest(drawn)
    rounded = hashes(Mesh(dp_shard=2), {"training.dtype": "bfloat16"})
    assert rounded[name] == _digest(drawn.bfloat16())


# --- what is drawn ----------------------------------------------------------------------------

WIDE = dataclasses.replace(TINY, hidden_size=512, intermediate_size=640, vocab_size=1000)


def _draws() -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Decoder(WIDE)
    return {
        name: draw_parameter(name, parameter.shape, WIDE, seed=0, device=CPU)
        for name, parameter in model.named_parameters()
    }


def test_the_spread_is_initializer_range_and_less_where_the_residual_stream_is_written() -> None:
    for name, weight in _draws().items():
        if name.endswith("norm.weight"):
            assert torch.equal(weight, torch.ones_like(weight)), name
            continue
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.02 / math.sqrt(2 * WIDE.num_hidden_layers) if writes else 0.02
        rows = weight[: WIDE.vocab_size] if weight.shape[0] == WIDE.padded_vocab_size else weight
        # 16,384 numbers at the least: their spread is known to 0.6 %, five times that is allowed.
        assert abs(rows.std().item() / std - 1) < 0.03, name
        assert abs(rows.mean().item()) < 0.05 * std, name


def test_padded_rows_are_zero_and_no_others() -> None:
    for name in ("embed_tokens.weight", "lm_head.weight"):
        zero = (_draws()[name] == 0).all(dim=1)
        assert zero[WIDE.vocab_size :].all() and not zero[: WIDE.vocab_size].any()


def test_a_draw_depends_on_nothing_drawn_before() -> None:
    shape = torch.Size((8, 8))
    first = draw_parameter("layers.0.mlp.up_proj.weight", shape, TINY, seed=1, device=CPU)
    torch.manual_seed(999)
    torch.randn(100)
    state = torch.get_rng_state()
    again = draw_parameter("layers.0.mlp.up_proj.weight", shape, TINY, seed=1, device=CPU)
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), state), "and moves no other generator"


def test_a_tied_head_is_drawn_as_the_embedding() -> None:
    tied = dataclasses.replace(TINY, tie_word_embeddings=True)
    assert canonical_name("lm_head.weight", tied) == "embed_tokens.weight"
    assert canonical_name("lm_head.weight", TINY) == "lm_head.weight"
    assert canonical_name("norm.weight", tied) == "norm.weight"

"""One seed names one set of weights, on every mesh and without a seed checkpoint.

A Trainer that has not trained yet hands its full parameters over; they are compared as hashes,
so bit by bit. The twin draws straight into the shards and shows why the weights are drawn whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.parity.harness import TINY, Mesh, RecordingTrainer, run, whole
from tests.world import run_ranks
from torchtitan_lite.build import initialise
from torchtitan_lite.models.config import ModelConfig

V_SCHEDULE = {"parallelism.pipeline_parallel_schedule": "DualPipeV"}
MESHES: list[tuple[Mesh, dict[str, Any]]] = [
    (Mesh(dp_shard=2), {}),
    (Mesh(tp=2), {}),
    (Mesh(pp=2), {}),
    (Mesh(dp_replicate=2, tp=2), {}),
    (Mesh(pp=2, tp=2), {}),
    (Mesh(pp=2), V_SCHEDULE),
]


def leave(trainer: RecordingTrainer) -> None:
    """Train nothing: the parameters are the fresh ones."""


def fresh(
    mesh: Mesh, options: dict[str, Any] | None = None, model: ModelConfig = TINY
) -> dict[str, Tensor]:
    """The full fresh parameters by name."""
    return run(mesh, options, model, act=leave).parameters


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def digests(parameters: dict[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in parameters.items()}


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """Those of one process."""
    return fresh(Mesh())


@pytest.mark.parametrize(("mesh", "options"), MESHES, ids=lambda value: str(value or ""))
def test_every_mesh_starts_from_the_same_bits(
    mesh: Mesh, options: dict[str, Any], weights: dict[str, Tensor]
) -> None:
    assert digests(fresh(mesh, options)) == digests(weights)


def test_another_seed_gives_other_weights(weights: dict[str, Tensor]) -> None:
    other = fresh(Mesh(), {"debug.seed": 43})
    assert other.keys() == weights.keys()
    alike = {name for name in weights if torch.equal(other[name], weights[name])}
    assert alike == {name for name in weights if name.endswith("norm.weight")}


def test_no_two_matrices_share_their_numbers(weights: dict[str, Tensor]) -> None:
    matrices = {name: tensor for name, tensor in weights.items() if tensor.ndim == 2}
    assert len(matrices) == 2 + 7 * TINY.num_hidden_layers
    assert len({digest(tensor) for tensor in matrices.values()}) == len(matrices)
    # Matrices of different shapes must not begin with the same stream either.
    assert len({digest(tensor[0][:8]) for tensor in matrices.values()}) == len(matrices)


def test_rows_beyond_the_vocabulary_are_zero_and_no_other(weights: dict[str, Tensor]) -> None:
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert weights[name].shape == (128, TINY.hidden_size)
        assert weights[name][TINY.vocab_size :].eq(0).all()
        assert weights[name][: TINY.vocab_size].ne(0).any(dim=1).all()


def test_what_writes_into_the_residual_stream_starts_smaller(weights: dict[str, Tensor]) -> None:
    """By 1 / sqrt(2 x layers); norms are one."""
    scaled = TINY.initializer_range / (2 * TINY.num_hidden_layers) ** 0.5
    for name, tensor in weights.items():
        if tensor.ndim == 1:
            assert tensor.eq(1).all(), name
            continue
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        drawn = tensor[: TINY.vocab_size] if tensor.shape[0] == 128 else tensor
        std = scaled if writes else TINY.initializer_range
        assert drawn.std().item() == pytest.approx(std, rel=0.1), name
        assert abs(drawn.mean().item()) < 0.1 * std, name


def local_shards(trainer: RecordingTrainer) -> dict[str, Tensor]:
    """This rank's own part of each parameter that is cut."""
    named = trainer.model.named_parameters.items()
    return {
        name: p.to_local().clone() for name, p in named if isinstance(p, DTensor) and p.ndim == 2
    }


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=2), Mesh(tp=2)], ids=str)
def test_the_shards_of_a_parameter_differ_over_the_ranks(mesh: Mesh) -> None:
    first, second = run(mesh, act=local_shards).returned
    assert len(first) == 2 + 7 * TINY.num_hidden_layers
    for name in first:
        assert first[name].shape == second[name].shape
        assert not torch.equal(first[name], second[name]), name


def drawn_into_shards() -> tuple[Tensor, Tensor]:
    """A sharded weight filled by nn.init, and one that is drawn whole and then cut."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    straight = distribute_tensor(torch.empty(8, 4), mesh, [Shard(0)])
    torch.manual_seed(1)
    nn.init.normal_(straight)
    torch.manual_seed(1)
    cut = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)], src_data_rank=None)
    return straight.to_local(), cut.to_local()


def test_drawing_into_a_shard_would_give_every_rank_the_same_numbers() -> None:
    (straight, cut), (other_straight, other_cut) = run_ranks(drawn_into_shards, 2)
    assert torch.equal(straight, other_straight)
    assert not torch.equal(cut, other_cut)


def embedding_and_head(trainer: RecordingTrainer) -> dict[str, Tensor]:
    """Those that this rank holds, also the copy that is no parameter of the optimizer."""
    parts = trainer.model.parts
    modules: dict[str, list[Any]] = {
        "embedding": [part.embed_tokens for part in parts],
        "head": [part.lm_head for part in parts],
    }
    return {
        name: whole(module.weight)
        for name, candidates in modules.items()
        for module in candidates
        if module is not None
    }


@pytest.mark.parametrize(
    ("mesh", "options"),
    [(Mesh(), {}), (Mesh(pp=2), {}), (Mesh(pp=2), V_SCHEDULE)],
    ids=lambda value: str(value or ""),
)
def test_a_tied_head_starts_as_the_embedding_on_whichever_stage(
    mesh: Mesh, options: dict[str, Any], weights: dict[str, Tensor]
) -> None:
    tied = dataclasses.replace(TINY, tie_word_embeddings=True)
    result = run(mesh, options, tied, act=embedding_and_head)
    held = {name: tensor for rank in result.returned for name, tensor in rank.items()}
    assert torch.equal(held["embedding"], weights["embed_tokens.weight"])
    assert torch.equal(held["head"], held["embedding"])
    assert "lm_head.weight" not in result.parameters


def initialise_by_rank(trainer: RecordingTrainer) -> None:
    """What a seed that a rank or a stage enters would do."""
    for part in trainer.model.parts:
        initialise(part, seed=trainer.config.debug.seed + dist.get_rank())


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=2), Mesh(pp=2)], ids=str)
def test_a_seed_that_depends_on_the_rank_is_noticed(mesh: Mesh, weights: dict[str, Tensor]) -> None:
    broken = digests(run(mesh, act=initialise_by_rank).parameters)
    assert broken.keys() == weights.keys()
    assert broken != digests(weights)

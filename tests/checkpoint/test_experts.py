"""Experts that one mesh shared out and saved are those that any other loads, moments included.

With four experts, eight ranks cut within them and four between them: neither the mesh nor the
dimension of a cut is in a checkpoint.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.checkpoint.worlds import draw, full, make_optimizer, same
from tests.parallel.experts import plan, with_experts
from tests.world import run_ranks
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state import (
    State,
    materialise_state,
    model_state,
    optimizer_state,
)
from torchtitan_lite.mesh import Degrees
from torchtitan_lite.models.decoder import Decoder

MODEL = with_experts(num_experts=4)
EP4 = Degrees(dp_shard=4, ep=4)
HYBRID = Degrees(dp_replicate=2, dp_shard=2, tp=2, ep=2)
# The last two dimensions of a mesh cut experts: FSDP's, and ep.
CUTS = {
    EP4: (Shard(0),),
    Degrees(): None,
    Degrees(dp_shard=2, ep=2): (Shard(0),),
    Degrees(dp_shard=2, tp=2, ep=2): (_StridedShard(0, split_factor=2), Shard(0)),
    Degrees(dp_shard=8, ep=2): (Shard(1), Shard(0)),
    HYBRID: (
        Replicate(),
        _StridedShard(0, split_factor=2),
        Shard(0),
    ),
}
GATE = "layers.1.mlp.experts.gate_proj"


def _place(whole: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _state(degrees: Degrees, *, trained: bool) -> State:
    """Experts and router on this rank, with their moments: after two steps, or of step 0."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    model = Decoder(MODEL)
    plan(model, degrees, {f"training.mixed_precision_{p}": "float32" for p in ("param", "reduce")})
    kept = (".experts.", ".gate.")
    named = {n: p for n, p in model.named_parameters() if any(part in n for part in kept)}
    weight = named[GATE]
    placements = weight.placements if isinstance(weight, DTensor) else None
    assert placements == CUTS[degrees]
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(_place(draw(name, parameter.shape) * trained, parameter))
    optimizer = make_optimizer(list(named.values()), "foreach")
    for step in range(2 * trained):
        for name, parameter in named.items():
            parameter.grad = _place(draw(f"{name} {step}", parameter.shape), parameter)
        optimizer.step()
    optimizer.zero_grad()
    materialise_state(optimizer)
    return {**model_state(named), **optimizer_state(optimizer, named)}


def _save(folder: Path, degrees: Degrees) -> State:
    state = _state(degrees, trained=True)
    CheckpointManager(folder).save(2, state)
    return {name: full(tensor).clone() for name, tensor in state.items()}


def _load(folder: Path, degrees: Degrees) -> State:
    state = _state(degrees, trained=False)
    assert CheckpointManager(folder).load(state) == 2
    return {name: full(tensor).clone() for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [
        (EP4, [Degrees(), Degrees(dp_shard=2, ep=2), HYBRID]),
        (Degrees(dp_shard=8, ep=2), [Degrees(dp_shard=2, tp=2, ep=2), EP4]),
    ],
    ids=["ep4", "dp8 ep2"],
)
def test_experts_of_one_mesh_load_on_any_other_with_their_moments(
    saved_on: Degrees, loaded_on: list[Degrees], tmp_path: Path
) -> None:
    (saved, *_) = run_ranks(_save, saved_on.world, tmp_path, saved_on)
    assert f"optimizer.state.{GATE}.exp_avg_sq" in saved
    assert saved[GATE].shape == (4, 16, 24) and all(tensor.any() for tensor in saved.values())
    for degrees in loaded_on:
        for loaded in run_ranks(_load, degrees.world, tmp_path, degrees):
            assert same(loaded, saved), degrees

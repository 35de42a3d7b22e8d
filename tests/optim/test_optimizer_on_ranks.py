"""Updates of sharded parameters equal those of plain ones; a skipped step changes no bit."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from tests.optim.test_optimizer import build
from tests.world import run_ranks
from torchtitan_lite.optim.clip import gradient_norm, scale_gradients
from torchtitan_lite.optim.optimizer import group_table

SHAPES = {"embed_tokens.weight": (10, 8), "up_proj.weight": (16, 8), "norm.weight": (6,)}
NUM_STEPS = 3

Kernel = tuple[str, str]
KERNELS: list[Kernel] = [*itertools.product(("AdamW", "SGD"), ("fused", "foreach", "for-loop"))]


def random_tensor(name: str, step: int) -> Tensor:
    """The value of a parameter (step 0) or of its gradient at a step, the same on every rank."""
    seed = step * 100 + [*SHAPES].index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def train(parameters: dict[str, nn.Parameter], kernel: Kernel, shard: Any) -> Any:
    """NUM_STEPS updates by random gradients that `shard` lays out like their parameters."""
    optimizer = build(
        parameters,
        name=kernel[0],
        implementation=kernel[1],
        momentum=0.9,
        no_decay=["norm.weight", "embed_tokens.weight"],
        lr_multipliers={"embed_tokens.weight": 3.0},
    )
    for step in range(1, NUM_STEPS + 1):
        for name, parameter in parameters.items():
            parameter.grad = shard(name, random_tensor(name, step))
        optimizer.step()
    return optimizer


def train_plain(kernel: Kernel) -> tuple[dict[str, Tensor], Any]:
    parameters = {name: nn.Parameter(random_tensor(name, 0)) for name in SHAPES}
    optimizer = train(parameters, kernel, lambda name, gradient: gradient)
    states = [optimizer.state[parameter] for parameter in parameters.values()]
    return {name: parameter.data for name, parameter in parameters.items()}, states


def full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _train_sharded() -> dict[Kernel, tuple[dict[str, Tensor], Any, str]]:
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("efsdp",))
    layouts: dict[str, Any] = {
        "embed_tokens.weight": (other, [Shard(0)]),  # 10 rows on 4 ranks
        "up_proj.weight": (dense, [Shard(0), Shard(1)]),
        "norm.weight": (dense, [Shard(0), Replicate()]),
    }

    def shard(name: str, tensor: Tensor) -> DTensor:
        return distribute_tensor(tensor, *layouts[name], src_data_rank=None)

    results = {}
    for kernel in KERNELS:
        parameters = {name: nn.Parameter(shard(name, random_tensor(name, 0))) for name in SHAPES}
        optimizer = train(parameters, kernel, shard)
        full = {name: full_tensor(parameter.data) for name, parameter in parameters.items()}
        states = [
            {key: full_tensor(value) for key, value in optimizer.state[parameter].items()}
            for parameter in parameters.values()
        ]
        results[kernel] = (full, states, group_table(optimizer))
    return results


def test_every_kernel_updates_shards_of_two_meshes_like_plain_tensors() -> None:
    for results in run_ranks(_train_sharded, 4):
        for kernel in KERNELS:
            full, states, table = results[kernel]
            plain, plain_states = train_plain(kernel)
            for name in SHAPES:
                torch.testing.assert_close(full[name], plain[name], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(states, plain_states, rtol=1e-6, atol=1e-7)
            assert states[0], "no optimizer state was compared"
            # Sizes are of whole parameters: 6, 80 and 128.
            assert [line.split()[3] for line in table.splitlines()[1:]] == ["6", "80", "128"]


def test_the_kernels_agree_with_each_other() -> None:
    for name in ("AdamW", "SGD"):
        updates = [train_plain((name, implementation))[0] for _, implementation in KERNELS[:3]]
        for update in updates[1:]:
            torch.testing.assert_close(update, updates[0], rtol=1e-6, atol=1e-7)


def _bits(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of this rank's parameters and of every tensor of the optimizer's state."""
    tensors = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for value in (parameter.detach(), *optimizer.state[parameter].values()):
                local = value.to_local() if isinstance(value, DTensor) else value
                tensors.append(local.clone())
    return tensors


def _unchanged_by_a_poisoned_step(checks_norm: bool) -> tuple[bool, int]:
    """Rank 1 meets a NaN; say whether all bits are as before and how many tensors there are."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    parameters = {
        name: nn.Parameter(distribute_tensor(random_tensor(name, 0), mesh, [Shard(0)]))
        for name in SHAPES
    }

    def shard(name: str, tensor: Tensor) -> DTensor:
        return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)

    optimizer = train(parameters, ("AdamW", "fused"), shard)
    before = _bits(optimizer)
    if dist.get_rank() == 1:
        gradient = parameters["norm.weight"].grad
        assert isinstance(gradient, DTensor)
        gradient.to_local()[0] = math.nan
    norm = gradient_norm(parameters.values(), ranks_per_stage=2)
    if not checks_norm or math.isfinite(norm):
        if checks_norm:
            scale_gradients(parameters.values(), norm=norm, max_norm=1.0)
        optimizer.step()
    after = _bits(optimizer)
    return all(map(torch.equal, before, after)), len(after)


@pytest.mark.parametrize("checks_norm", [True, False])
def test_a_step_skipped_for_its_norm_keeps_every_bit_of_weights_and_states(
    checks_norm: bool,
) -> None:
    # Twin: without the look at the norm the same step changes them on both ranks.
    num_tensors = len(SHAPES) * 4  # parameter, step, two moments
    expected = (checks_norm, num_tensors)
    assert run_ranks(_unchanged_by_a_poisoned_step, 2, checks_norm) == [expected] * 2

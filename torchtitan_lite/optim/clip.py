"""The norm of all gradients of the model, the same number on any mesh, and the clip by it.

Parameters of one model live on different meshes (dense ones, experts) and on different pipeline
stages, so no tensor library sees all of them. But the p-norm is only a sum over elements,

    norm = (sum of |g|^p) ^ (1/p)

so every rank sums over the shards it holds, and one all-reduce over the whole world adds the
ranks up. What is left to know is how often an element is counted. A stage has `ranks_per_stage`
ranks, all of which hold the parameter; the mesh axes that shard it cut it into

    shards = product of the sizes of those axes

so each element lies on copies = ranks_per_stage / shards ranks, and each of them counts it
1/copies times. Example, a stage of 8 ranks:

    mesh                            placements                     shards  copies
    (dp_replicate 2, fsdp 2, tp 2)  (Replicate, Shard, Shard)      4       2
    (dp_replicate 2, fsdp 2, tp 2)  (Replicate, Shard, Replicate)  2       4
    (efsdp 2, ep 4)                 (Shard, Shard)                 8       1
    none: a plain tensor                                           1       8

Nothing else about the mesh enters, and uneven shards need no care. For p = inf the sum is a
maximum and copies do no harm.

The sums are accumulated in float64. In float32 the CPU's norm is low by up to 1e-4, more for a
whole tensor than for its halves: the norm would depend on the mesh, and through an active clip so
would the training. Gradients are widened piece by piece, never all at once.

Proven in tests/optim/test_clip.py: equal to one process to 1e-12 on each kind of mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# What torch's own clip adds to the norm, so that a norm of zero divides nothing by zero.
CLIP_EPSILON = 1e-6

# Elements that the CPU widens at once: 2 MiB in float64.
BLOCK_SIZE = 1 << 18


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[Tensor],
    *,
    norm_type: float = 2.0,
    ranks_per_stage: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> float:
    """The `norm_type`-norm (1, 2, inf, ...) of the gradients of the whole model, in float64.

    `parameters` are this rank's, over all its model parts; leave out those whose gradient another
    stage counts (the copy of a tied embedding). A rank without gradients must call too. `group`
    holds every rank of the run; None is the default group, or this process alone where there is
    none. `ranks_per_stage` is its size divided by the pipeline degree. `device` is where the sum
    is reduced; None is the device of the parameters, so a rank that may have none must pass it.

    If any gradient of any rank is not finite, the result is not finite on all ranks. Costs one
    all-reduce and one wait of the host for the device.
    """
    assert norm_type > 0, norm_type
    is_maximum = math.isinf(norm_type)
    parameters = list(parameters)
    if device is None:
        device = parameters[0].device if parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for shards, gradients in _by_shards(parameters).items():
        assert ranks_per_stage % shards == 0, f"{shards} shards on {ranks_per_stage} ranks a stage"
        norms = _norms(gradients, norm_type).to(device)
        if is_maximum:
            total = torch.maximum(total, norms.max())
        else:
            copies = ranks_per_stage // shards
            total = total + norms.pow(norm_type).sum() / copies
    if is_maximum:
        # A backend's MAX may lose a NaN among numbers, but no number is above infinity.
        total = total.nan_to_num(nan=math.inf, posinf=math.inf)
    if dist.is_initialized():
        dist.all_reduce(total, dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM, group)
    return (total if is_maximum else total.pow(1.0 / norm_type)).item()


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], *, norm: float, max_norm: float) -> float:
    """Scale gradients in place so that their norm is at most `max_norm`; return the factor used.

    `norm` is what `gradient_norm` returned, finite: a step whose norm is not is to be skipped.
    `parameters` are all that this rank updates. Gradients below `max_norm` stay bitwise as they
    are; `max_norm` 0 clips nothing.
    """
    assert math.isfinite(norm), f"gradient norm {norm}: skip the step instead of clipping"
    factor = max_norm / (norm + CLIP_EPSILON)
    if max_norm == 0 or factor >= 1:
        return 1.0
    for gradients in _by_shards(parameters).values():
        torch._foreach_mul_(gradients, factor)
    return factor


def _norms(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Norms, (any number of them,) float64, of parts that make up the local `gradients`."""
    if gradients[0].device.type != "cpu":
        # One kernel for many tensors, which widens while it reads.
        return torch.stack(torch._foreach_norm(gradients, norm_type, dtype=torch.float64))
    # The CPU has no such kernel: it would widen whole tensors, and the freed copies, cut up by
    # small results, could grow the heap by all of them. Blocks in one place stay in the cache too.
    scratch = torch.empty(BLOCK_SIZE, dtype=torch.float64)
    blocks = [block for gradient in gradients for block in gradient.reshape(-1).split(BLOCK_SIZE)]
    return torch.stack(
        [
            torch.linalg.vector_norm(scratch[: block.numel()].copy_(block), norm_type)
            for block in blocks
        ]
    )


def _by_shards(parameters: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """Number of shards -> this rank's non-empty parts of the gradients that are cut into so many.

    A parameter that is listed twice (tied weights) is taken once.
    """
    gradients: dict[int, list[Tensor]] = {}
    for parameter in {id(parameter): parameter for parameter in parameters}.values():
        gradient = parameter.grad
        if gradient is None:
            continue
        shards = 1
        if isinstance(gradient, DTensor):
            placed = gradient.placements
            assert not any(p.is_partial() for p in placed), f"gradient {placed} is not reduced yet"
            for axis, placement in enumerate(placed):
                if not placement.is_replicate():
                    shards *= gradient.device_mesh.size(axis)
            gradient = gradient.to_local()
        if gradient.numel() > 0:
            gradients.setdefault(shards, []).append(gradient)
    return gradients

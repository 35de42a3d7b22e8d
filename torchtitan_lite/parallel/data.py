"""Data parallelism: FSDP2 in four strengths, through `zero_stage`.

    stage  gradients,  parameters between         a step communicates, for each group of parameters
           moments     forward and backward
    3      sharded     resharded layer by layer   2 gathers + 1 scatter a micro-batch
    2      sharded     kept                       1 gather  + 1 scatter a micro-batch
    1      sharded     kept for all micro-        1 gather  + 1 scatter; gradients accumulate whole
                       batches of the step
    0      whole       whole                      1 all-reduce

Under a pipeline torch's schedules reduce once a step in every stage: gradients stay whole until
then, and stage 2 costs what stage 1 does.

A group is the embedding, a layer, or norm and head together; the last is needed at once in
backward and never resharded between. In stage 0 the mesh has all its data ranks on `dp_replicate`
and a shard size of 1. On a mesh of one there is nothing to shard, and FSDP would copy every
parameter and gradient for it (8 % of a step, docs/performance.md): there, mixed precision is a cast
of each parameter where it is used.

The routed experts of a layer are a group of their own over a mesh of their own (mesh.py): what is
left of the ranks when each holds its share of the experts. Either mesh may be of one: that of the
experts where ep takes all ranks, the other where tp does.

Gradients are summed, never averaged: the loss is already divided by the global token count, and
nothing else divides. Proven in tests/parity/ and tests/parallel/test_collective_counts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.moe import Experts
from torchtitan_lite.parallel.parameters import read_parameters_as


def apply_data_parallel(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    expert_mesh: DeviceMesh,
    zero_stage: int,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool = False,
) -> None:
    """Shard `model` over `mesh`: 1-D (fsdp), or 2-D (dp_replicate, fsdp).

    Its routed experts, if it has any, over `expert_mesh`, in the same way. Computes in
    `param_dtype` and reduces gradients in `reduce_dtype`.
    """
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    cuts_dense = mesh.size() > 1 or cpu_offload
    cuts_experts = bool(experts) and (expert_mesh.size() > 1 or cpu_offload)
    whole: set[nn.Parameter] = set()  # what FSDP leaves alone
    for module in model.modules():
        if not (cuts_experts if isinstance(module, Experts) else cuts_dense):
            compute_in(module, param_dtype)
            whole.update(module.parameters(recurse=False))
    if not cuts_dense and not cuts_experts:
        return
    options: dict[str, Any] = {
        # Inputs are not cast: the embedding's output has the right dtype already, and the rotary
        # angles of far positions need fp32.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        ),
        "ignored_params": whole,
    }
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    shard, reshard = partial(fully_shard, **options), zero_stage == 3
    if cuts_experts:
        for module in experts:
            shard(
                module,
                mesh=expert_mesh,
                reshard_after_forward=reshard,
                shard_placement_fn=partial(_cut_of_experts, mesh=expert_mesh),
            )
    if cuts_dense:
        _shard_dense(model, partial(shard, mesh=mesh), reshard=reshard)
    shard(model, mesh=mesh if cuts_dense else expert_mesh, reshard_after_forward=False)
    for module in model.modules():  # the setters are not recursive
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without it a factor of 1 still becomes a pre-multiplied sum, which gloo lacks.
            module.set_force_sum_reduction_for_comms(True)


def _shard_dense(model: Decoder, shard: Callable[..., Any], *, reshard: bool) -> None:
    ends: list[nn.Module] = [part for part in (model.norm, model.lm_head) if part is not None]
    if model.embed_tokens is not None and model.is_tied:
        ends.insert(0, model.embed_tokens)  # one weight, one group: two would untie it in silence
    elif model.embed_tokens is not None:
        shard(model.embed_tokens, reshard_after_forward=reshard)
    for layer in model.layers.values():
        shard(layer, reshard_after_forward=reshard)
    if ends:
        shard(ends, reshard_after_forward=False)


def _cut_of_experts(parameter: nn.Parameter, *, mesh: DeviceMesh) -> Shard:
    """Between experts if that comes out even; else, if that does, within each of them."""
    num_shards = mesh.size(mesh.ndim - 1)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    uneven, within = local.shape[0] % num_shards > 0, local.shape[1] % num_shards == 0
    return Shard(1) if uneven and within else Shard(0)


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """The module's own parameters are cast where used; gradients accumulate in their own dtype."""
    own = list(module.parameters(recurse=False))
    if any(parameter.dtype != dtype for parameter in own):
        read_parameters_as(module, lambda parameter: parameter.to(dtype))


def set_last_micro_batch(model: nn.Module, *, zero_stage: int, last: bool) -> None:
    """Stages 0 and 1 keep parameters and gradients whole until the last micro-batch's backward."""
    if zero_stage > 1 or not isinstance(model, FSDPModule):
        return
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)

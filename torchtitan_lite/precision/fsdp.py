"""Weights that travel between the ranks of FSDP in float8: one byte a number, in place of two.

    rank's rows in fp32 -> param_dtype -> float8 and a scale a row -> gathered -> param_dtype

FSDP cuts a weight by rows, so a row is whole where it is cast. What arrives are the numbers that
the linear would have cast the weight to anyway: powers of two scale them, so casting them again, by
whatever block the recipe has, changes no digit. No scale is agreed on between ranks, and none is
kept from one step for the next, where it could be stale. Gradients are reduced as ever.

FSDP asks the local tensor of a parameter for two functions, and finds them here as attributes of
it: parameter, optimizer and checkpoints have no other class to do with.
Proven in tests/precision/test_meshes.py, the bytes counted.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_lite.config import Config
from torchtitan_lite.precision.float8 import E4M3, from_bytes, to_bytes
from torchtitan_lite.precision.linear import Float8Linear

logger = logging.getLogger(__name__)
ALL_GATHER = "quantize.linear.float8.enable_fsdp_float8_all_gather"


def gather_in_float8(model: nn.Module, config: Config, mesh: DeviceMesh) -> None:
    """Let FSDP over `mesh` gather the weights of the float8 linears of `model` as bytes.

    To be called when the parameters have their storage, which may be filled later in place.
    """
    on = config.quantize.linear.float8.enable_fsdp_float8_all_gather
    if not on or mesh.size(mesh.ndim - 1) == 1:
        return
    weights = [module.weight for module in model.modules() if isinstance(module, Float8Linear)]
    uneven = [weight for weight in weights if not _is_cut_evenly(weight)]
    if uneven:
        logger.warning(
            f"{ALL_GATHER} = true: {len(uneven)} of {len(weights)} weights, such as one of "
            f"{tuple(uneven[0].shape)}, have rows that the ranks do not divide; these are gathered "
            "in high precision"
        )
    for weight in weights:
        if _is_cut_evenly(weight):
            assert isinstance(weight, DTensor)
            local: Any = weight._local_tensor  # the object that FSDP asks; to_local makes others
            # The same memory; a reference to `local` itself would be a circle.
            local.fsdp_pre_all_gather = partial(send, local.detach())
            local.fsdp_post_all_gather = receive


def _is_cut_evenly(weight: Tensor) -> bool:
    assert isinstance(weight, DTensor)
    cuts = [
        size
        for size, placement in zip(weight.device_mesh.shape, weight.placements, strict=True)
        if getattr(placement, "dim", None) == 0
    ]
    return weight.shape[0] % math.prod(cuts) == 0


def send(
    rows: Tensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> tuple[tuple[Tensor], None]:
    """What a rank sends of its rows (rows, in)."""
    return (to_bytes(rows.to(mp_policy.param_dtype), E4M3),), None


def receive(
    outputs: tuple[Tensor], metadata: None, dtype: torch.dtype, *, out: Any = None
) -> tuple[Tensor, tuple[Tensor]] | None:
    """What came of all ranks -> the weight (out, in) in `dtype`, or into `out`."""
    whole = from_bytes(outputs[0], E4M3, into=dtype)
    if out is None:
        return whole, (whole,)
    with torch.no_grad():
        weight = out.to_local() if isinstance(out, DTensor) else out
        # Backward gathers again what it knows from forward: the same numbers, so not a change.
        with torch.autograd._unsafe_preserve_version_counter(weight):
            weight.copy_(whole)
    return None

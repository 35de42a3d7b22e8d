"""Activations that travel between the ranks of tensor parallelism in float8.

Under sequence parallelism a block gathers its input, and in backward the gradient of its output
(parallel/tensor.py). Where linears in float8 alone read what arrives, they would round it anyway:

    x (batch, seq / tp, hidden)   -> bytes and a scale a row, hidden + 4 bytes
    gathered                      -> x in its own dtype, rounded to float8; cast again by the recipe

Powers of two scale the rows, so the second cast changes no digit, whatever block the recipe has.
What is summed, in the reduce-scatters, travels in high precision. A bias that is added behind the
sum has the gradient that was not gathered.
Proven in tests/precision/test_gather.py, the bytes counted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan_lite.ops.collectives import conjugate, gather, scatter_sum
from torchtitan_lite.precision.float8 import E4M3, from_bytes, to_bytes
from torchtitan_lite.precision.linear import Float8Linear

logger = logging.getLogger(__name__)
TP_ALL_GATHER = "quantize.linear.float8.enable_tp_float8_all_gather"


def all_gather_in_float8(x: Tensor, *, dim: int, group: ProcessGroup) -> Tensor:
    """As ops.collectives.all_gather of x (..., features) whose gradient is a share of a sum."""
    return conjugate(x, partial(_gather, dtype=E4M3), scatter_sum, dim=dim, group=group)


def reduce_scatter_from_float8(
    x: Tensor, *, dim: int, group: ProcessGroup, gradient: torch.dtype
) -> Tensor:
    """As ops.collectives.reduce_scatter; its backward gathers in the format `gradient`."""
    return conjugate(x, scatter_sum, partial(_gather, dtype=gradient), dim=dim, group=group)


def _gather(x: Tensor, dim: int, group: ProcessGroup, dtype: torch.dtype) -> Tensor:
    return from_bytes(gather(to_bytes(x, dtype), dim, group), dtype, into=x.dtype)


def all_read_float8(block: nn.Module, readers: Collection[str]) -> bool:
    """Whether all linears of `block` that have one of these names are in float8, and some are."""
    found = [child for name, child in block.named_children() if name in readers]
    return bool(found) and all(isinstance(child, Float8Linear) for child in found)


def warn_of_high_gathers(high: list[str]) -> None:
    """Tell which modules do not gather in float8, by their names."""
    if high:
        logger.warning(
            f"{TP_ALL_GATHER} = true: {len(high)} gathers stay in high precision, such as that of "
            f"{high[0]}: what arrives there is read by a linear that is not in float8"
        )

"""Activations that travel between the ranks of tensor parallelism in float8.

Under sequence parallelism a block gathers its input, and in backward the gradient of its output
(parallel/tensor.py). Where linears in float8 alone read what arrives, they would round it anyway:

    x (batch, seq / tp, hidden)   -> bytes and a scale a row, hidden + 4 bytes
    gathered                      -> x in its own dtype, rounded to float8; cast again by the recipe

Powers of two scale the rows, so the second cast changes no digit, whatever block the recipe has.
What is summed, in the reduce-scatters, travels in high precision. A bias that is added behind the
sum has the gradient that was not gathered. Bytes are sent as uint8, since gloo knows no float8.
Proven in tests/precision/test_gather.py, the bytes counted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan_lite.ops.collectives import gather, scatter_sum
from torchtitan_lite.precision.float8 import E4M3, cast
from torchtitan_lite.precision.linear import Float8Linear

logger = logging.getLogger(__name__)
TP_ALL_GATHER = "quantize.linear.float8.enable_tp_float8_all_gather"
SCALE_BYTES = 4


def all_gather_in_float8(x: Tensor, *, dim: int, group: ProcessGroup) -> Tensor:
    """As ops.collectives.all_gather of x (..., features) whose gradient is a share of a sum."""
    return _AllGather.apply(x, dim, group)


def reduce_scatter_from_float8(
    x: Tensor, *, dim: int, group: ProcessGroup, gradient: torch.dtype
) -> Tensor:
    """As ops.collectives.reduce_scatter; its backward gathers in the format `gradient`."""
    return _ReduceScatter.apply(x, dim, group, gradient)


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


def _gather(x: Tensor, dtype: torch.dtype, dim: int, group: ProcessGroup) -> Tensor:
    rows, width = x.flatten(0, -2), x.shape[-1]
    scaled = cast(rows, dtype, (1, 0), powers_of_two=True)
    sent = torch.cat((scaled.values.view(torch.uint8), scaled.scale.view(torch.uint8)), dim=1)
    whole = gather(sent.view(*x.shape[:-1], width + SCALE_BYTES), dim, group)
    values, scale = (part.contiguous() for part in whole.split((width, SCALE_BYTES), dim=-1))
    return (values.view(dtype).float() * scale.view(torch.float32)).to(x.dtype)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, E4M3, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return scatter_sum(grad, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: ProcessGroup, gradient: torch.dtype
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.gradient = dim, group, gradient
        return scatter_sum(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad, ctx.gradient, ctx.dim, ctx.group), None, None, None

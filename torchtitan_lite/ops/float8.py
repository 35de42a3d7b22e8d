"""Float8, block by block: numbers that share a scale, and products of them.

    x  (rows, columns)      values (rows, columns) float8
                            scale  (rows / height, columns / width) fp32     x ~ values * scale

    block   all   row   piece of a row   square
    height   0     1     1               128       rows that share a scale; 0: all there are
    width    0     0     128             128

A torch expression says what is computed, and computes it wherever there is no kernel. The kernel
that casts gives the same bits; the one that multiplies adds the same products in another order, 128
of them in float8 by the device, then the sums of those, scaled, in fp32.

The recipes are told in precision/float8.py. Proven in tests/ops/test_kernels.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite.device import INTERPRETS_TRITON, has_float8, has_triton

SMALLEST_AMAX = 1e-12  # so that zeros have a scale; torchao's, so that results are equal
WIDTH = 128  # of the pieces and squares that are multiplied by a kernel of their own

Block = tuple[int, int]  # rows and columns that share a scale; 0: all there are


def cast_blocks(
    x: Tensor, dtype: torch.dtype, block: Block, *, powers_of_two: bool, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x: (rows, columns), neither of them 0 -> values and scales; see precision/float8.py."""
    if has_triton(x.device.type) and x.dtype != torch.float64:
        return _cast_blocks(x, dtype, *block, powers_of_two, amax)
    return cast_blocks_reference(x, dtype, block, powers_of_two=powers_of_two, amax=amax)


def cast_blocks_reference(
    x: Tensor, dtype: torch.dtype, block: Block, *, powers_of_two: bool, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    largest = torch.finfo(dtype).max
    blocks = _blocks(x, (block[0] or rows, block[1] or columns))
    own = blocks.abs().amax((1, 3), keepdim=True) if amax is None else amax.view(1, 1, 1, 1)
    # In fp64, where eager and compiled code divide alike.
    factor = (largest / own.double().clamp(min=SMALLEST_AMAX)).float()  # (R, 1, C, 1)
    if powers_of_two:
        factor = factor / (2 * torch.frexp(factor).mantissa)  # the next one below
    # Its own largest needs no cut: the factor, rounded, passes the end by less than half a step.
    scaled = blocks.float() * factor
    if amax is not None:
        scaled = torch.where(blocks.isfinite(), scaled.clamp(-largest, largest), torch.nan)
    values = scaled.to(dtype).flatten(2).flatten(0, 1)[:rows, :columns]
    return values, factor.reciprocal()[:, 0, :, 0]


def expand_blocks(values: Tensor, scale: Tensor, block: Block) -> Tensor:
    """The numbers that (values, scale) stand for, in fp32."""
    rows, columns = values.shape
    blocks = _blocks(values.float(), block) * scale[:, None, :, None]
    return blocks.flatten(2).flatten(0, 1)[:rows, :columns]


def _blocks(x: Tensor, block: Block) -> Tensor:
    """(rows, columns) -> (R, block rows, C, block columns), filled up with zeros."""
    (rows, columns), (height, width) = x.shape, block
    padded = F.pad(x, (0, -columns % width, 0, -rows % height))
    return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))


def scaled_matmul_reference(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, height: int, dtype: torch.dtype
) -> Tensor:
    left = expand_blocks(a, scale_a, (1, WIDTH))
    return (left @ expand_blocks(b, scale_b, (height, WIDTH)).t()).to(dtype)


# --- the kernels as operators, so that compiled code and fake tensors know their shapes ---------


@torch.library.custom_op("torchtitan_lite::cast_blocks", mutates_args=())
def _cast_blocks(
    x: Tensor,
    dtype: torch.dtype,
    height: int,
    width: int,
    powers_of_two: bool,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rule: dict[str, Any] = {"powers_of_two": powers_of_two, "amax": amax}
    if not _has_float8(x):
        values, scale = cast_blocks_reference(x, dtype, (height, width), **rule)
        return values.contiguous(), scale.contiguous()
    from torchtitan_lite.ops import kernels

    return kernels.cast_blocks(x, dtype, (height, width), **rule, smallest_amax=SMALLEST_AMAX)


@_cast_blocks.register_fake
def _(
    x: Tensor,
    dtype: torch.dtype,
    height: int,
    width: int,
    powers_of_two: bool,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    shape = -(-rows // (height or rows)), -(-columns // (width or columns))
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("torchtitan_lite::scaled_matmul", mutates_args=())
def scaled_matmul(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, height: int, dtype: torch.dtype
) -> Tensor:
    """a: (M, K) of pieces, b: (N, K) of pieces (height 1) or squares -> a @ b^T: (M, N)."""
    if not _has_float8(a):
        return scaled_matmul_reference(a, scale_a, b, scale_b, height, dtype)
    from torchtitan_lite.ops import kernels

    return kernels.scaled_matmul(a, scale_a, b, scale_b, height=height, dtype=dtype)


@scaled_matmul.register_fake
def _(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, height: int, dtype: torch.dtype
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def _has_float8(x: Tensor) -> bool:
    return INTERPRETS_TRITON or has_float8(x.device.type)

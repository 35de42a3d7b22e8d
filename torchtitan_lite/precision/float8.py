"""Float8: why two formats, why a scale, and what is kept high.

Eight bits make 256 numbers, which can be spent in two ways:

            exponent  mantissa   step          from (normal)   to         for
    E4M3    4 bits    3 bits     1/8 .. 1/16   2^-6            448        activations, weights
    E5M2    5 bits    2 bits     1/4 .. 1/8    2^-14           57344      gradients

A row of activations or weights is of one order of magnitude and wants the finer step; a gradient
spreads over many orders and wants the longer way down to zero. And neither format lies where the
numbers happen to be (all of a gradient of 1e-9 would be zero), so a block of numbers shares a
scale that moves its largest to the end of the format:

    amax = max |x|      scale = amax / largest      q = float8(x / scale)      x ~ q * scale

                 block of x and of the gradient   block of the weight   the gradient is
    tensorwise   all                              all                   E5M2
    rowwise      a row                            a row                 E4M3
    blockwise    1 x 128                          128 x 128             E4M3 (arXiv:2412.19437, 3.3)

A row runs along the dimension that a product sums over. The fewer numbers share a scale, the less
an outlier costs its neighbours, so that a row, or a piece of it, does without E5M2's range. The
three products of a linear sum over three dimensions, features in, features out and tokens, so a
tensor in two products is cast twice, unless its blocks are square.

Scales are rounded to powers of two, unless told otherwise. That loses nothing: such a scale changes
an exponent and no digit, so x is rounded as it would be under any other, and what a number becomes
depends neither on the rank's other tokens nor on the rest of a weight that is cut. (Numbers below
the smallest normal one excepted, at less than 2^-14 of the largest.)

Kept high: sums of products in fp32, scales in fp32, the parameter itself and its gradient, biases,
norms, the softmax, the embedding, all that lies between layers and, unless they are named, routers,
their experts and the head.

An infinity or a NaN makes all that shares its scale NaN: it is not hidden.
Proven in tests/precision/test_float8.py, against torchao among others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite.device import has_triton
from torchtitan_lite.ops.float8 import WIDTH, Block, cast_blocks, expand_blocks, scaled_matmul

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALE_BYTES = 4
ALIGNMENT = 16  # kernels take matrices whose rows are multiples of 16 bytes


@dataclass(frozen=True)
class Recipe:
    """How the tensors of a linear are cast, and by what they are multiplied."""

    block: Block  # of the input and of the output's gradient
    weight_block: Block
    gradient: torch.dtype
    powers_of_two: bool = True
    emulate: bool = True  # multiply what float8 holds, in fp32
    delayed: bool = False  # scales come from the steps before (delayed.py)


RECIPES = {
    "tensorwise": Recipe((0, 0), (0, 0), E5M2),
    "rowwise": Recipe((1, 0), (1, 0), E4M3),
    "blockwise": Recipe((1, 128), (128, 128), E4M3),
}


@dataclass(frozen=True)
class Scaled:
    """A matrix in float8: x ~ values * scale, block by block."""

    values: Tensor  # (rows, columns)
    scale: Tensor  # (rows / block rows, columns / block columns) fp32
    block: Block  # without zeros

    @property
    def t(self) -> Scaled:
        return Scaled(self.values.t(), self.scale.t(), self.block[::-1])

    def high(self) -> Tensor:
        """The numbers that it stands for, in fp32."""
        return expand_blocks(self.values, self.scale, self.block)


def cast(
    x: Tensor,
    dtype: torch.dtype,
    block: Block,
    *,
    powers_of_two: bool,
    amax: Tensor | None = None,
) -> Scaled:
    """x: (rows, columns), neither of them 0, in float8; blocks at the ends may be cut short.

    `amax`, one number, stands for the largest of x, which may be larger: a number beyond the end of
    the format then becomes that end, and one that is not finite NaN.
    """
    assert amax is None or block == (0, 0)
    values, scale = cast_blocks(x, dtype, block, powers_of_two=powers_of_two, amax=amax)
    return Scaled(values, scale, (block[0] or x.shape[0], block[1] or x.shape[1]))


def to_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x: (..., columns) -> (..., columns + 4): each row in float8, and behind it its scale.

    As uint8, since gloo knows no float8. A cast of what arrives changes no digit, whatever block it
    has, as powers of two scale the rows.
    """
    scaled = cast(x.flatten(0, -2), dtype, (1, 0), powers_of_two=True)
    both = torch.cat((scaled.values.view(torch.uint8), scaled.scale.view(torch.uint8)), dim=1)
    return both.unflatten(0, x.shape[:-1])


def from_bytes(sent: Tensor, dtype: torch.dtype, *, into: torch.dtype) -> Tensor:
    """The numbers that to_bytes was given, rounded to `dtype`; in bf16 or fp32, which hold them."""
    values, scale = sent[..., :-SCALE_BYTES], sent[..., -SCALE_BYTES:].contiguous()
    return values.view(dtype).to(into) * scale.view(torch.float32).to(into)


def multiply(a: Scaled, b: Scaled, *, dtype: torch.dtype, emulate: bool) -> Tensor:
    """a: (M, K), b: (N, K) -> a @ b^T: (M, N) in `dtype`, summed in fp32.

    Emulated, the same float8 numbers are multiplied in fp32, so only the order of sums differs.
    """
    if emulate:
        return (a.high() @ b.high().t()).to(dtype)
    of_pieces = a.block == (1, WIDTH) and b.block in ((1, WIDTH), (WIDTH, WIDTH))
    if of_pieces and has_triton(a.values.device.type):
        return scaled_matmul(a.values, a.scale, b.values, b.scale, b.block[0], dtype)
    num_columns = b.values.shape[0]
    missing = -num_columns % ALIGNMENT
    left, right = _aligned(a.values), _aligned(b.values, more_rows=missing)
    scale_a, scale_b = a.scale.reshape(-1, 1), b.scale.reshape(1, -1)  # one each, or one a row
    if missing and scale_b.numel() > 1:
        scale_b = F.pad(scale_b, (0, missing))
    out = torch._scaled_mm(
        left, right.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype
    )  # without fast accumulation, which sums in fewer bits
    return out[:, :num_columns]


def _aligned(values: Tensor, *, more_rows: int = 0) -> Tensor:
    """Row-major, and filled up with zeros, which are zeros byte by byte, to whole 16 bytes."""
    values, missing = values.contiguous(), -values.shape[1] % ALIGNMENT
    if not missing and not more_rows:
        return values  # padded by nothing, it would be a copy
    return F.pad(values.view(torch.uint8), (0, missing, 0, more_rows)).view(values.dtype)

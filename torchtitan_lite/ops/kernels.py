"""Triton kernels. Each computes what a torch expression beside its operator computes.

    kernel          a program has                    operator
    amax            a tile of x                      float8.cast_blocks, one scale for all
    cast            a tile, or rows, read twice      float8.cast_blocks
    scaled_matmul   a tile of the product            float8.scaled_matmul
    gather          a piece of a row                 permute.gather_rows
    combine         a piece of a token, its k rows   permute.combine_rows
    dot_rows        a pair: two rows                 permute.combine_rows, for its weights

They want nothing of a shape: what lies outside is masked. No two programs add to one number, so
equal runs are equal bit by bit. Only the largest of all numbers is found by atomics, and those are
of integers: the bits of |x| sort like the numbers, with NaN above infinity, whoever comes last.

This file needs Triton, so it is imported where a kernel is first launched. TRITON_INTERPRET=1 runs
them on a CPU, by numpy, which knows fp32 alone well: there operands are given, and results taken,
in fp32. Proven in tests/ops/test_kernels.py, which also compiles each for several devices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_lite.device import INTERPRETS_TRITON

PIECE = 1024  # numbers of a row that a program moves at once
# Rows and columns that a program casts at once, by the block that shares a scale (0: all).
TILES = {(0, 0): (32, 128), (1, 0): (4, 512), (1, 128): (32, 128), (128, 128): (128, 128)}
TRANSPOSED_ROWS = (32, 64)  # in the place of (4, 512) where columns lie together in memory


def _result(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """For a kernel to write to; its reader converts it to `dtype`, which it has on a device."""
    return like.new_empty(shape, dtype=torch.float32 if INTERPRETS_TRITON else dtype)


def _operand(x: Tensor) -> Tensor:
    return x.float() if INTERPRETS_TRITON else x


# --- float8 -----------------------------------------------------------------------------------


@triton.jit
def _magnitude(x):  # type: ignore[no-untyped-def]
    """The bits of |x|: an integer that grows with |x|, and is largest for NaN."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _round(x, SMALLEST: tl.constexpr, EPSILON: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 -> fp32 that a format of this smallest normal number and this step above 1 holds.

    Some devices take a way over fp16, which would round twice. A sum whose last bit is worth a step
    is rounded to steps, ties to even; one step holds below the smallest normal number. The sign is
    put back by its bit, since that of zero counts.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)  # of two, at most |x|
    far = tl.maximum(power, SMALLEST) * (1.5 * 2**23 * EPSILON)
    rounded = (size.to(tl.float32, bitcast=True) + far) - far
    return (rounded.to(tl.int32, bitcast=True) | (bits ^ size)).to(tl.float32, bitcast=True)


@triton.jit
def _amax_kernel(  # type: ignore[no-untyped-def]
    x, amax, num_rows, num_columns, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < num_rows) & (columns < num_columns)
    tile = tl.load(x + rows * row + columns * column, mask=inside, other=0.0)
    tl.atomic_max(amax, tl.max(tl.max(_magnitude(tile), axis=1), axis=0))


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    x,  # in memory a row is `row` numbers behind the one before it, a column `column`
    amax,  # bits of the largest number, read if all share a scale
    values,
    scales,
    num_rows,
    num_columns,
    row,
    column,
    span,  # columns of a program
    height,  # rows that share a scale
    num_scale_columns,
    LARGEST: tl.constexpr,  # of the format, as the next two
    SMALLEST: tl.constexpr,
    EPSILON: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    FACTOR_OF_ZEROS: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
    SHARED_BY: tl.constexpr,  # "all", "rows" of the program, or the "row"
    IS_CUT: tl.constexpr,  # numbers may lie beyond the end of the format
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = block.to(tl.int64) * span + tl.arange(0, COLUMNS)
    bits = tl.zeros([ROWS], tl.int32)
    if SHARED_BY == "all":
        bits += tl.load(amax)
    else:
        for start in range(0, span, COLUMNS):
            columns = first + start
            inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
            offsets = rows[:, None] * row + columns[None, :] * column
            tile = tl.load(x + offsets, mask=inside, other=0.0)
            bits = tl.maximum(bits, tl.max(_magnitude(tile), axis=1))
        if SHARED_BY == "rows":
            bits = tl.zeros([ROWS], tl.int32) + tl.max(bits, axis=0)
    largest_here = bits.to(tl.float32, bitcast=True)
    # Rounded as IEEE says; the quotient of `/` may be the next number.
    factor = tl.div_rn(tl.full([ROWS], LARGEST, tl.float32), largest_here)
    factor = tl.where(largest_here <= SMALLEST_AMAX, FACTOR_OF_ZEROS, factor)
    if POWERS_OF_TWO:  # the exponent alone; that of 0, as infinity gives, or of NaN means nothing
        power = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.where(factor > 0, power, float("nan"))
    for start in range(0, span, COLUMNS):
        columns = first + start
        inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        tile = tl.load(x + rows[:, None] * row + columns[None, :] * column, mask=inside, other=0.0)
        scaled = tile.to(tl.float32) * factor[:, None]
        if IS_CUT:  # but what is not finite is not hidden
            scaled = tl.where(scaled > LARGEST, LARGEST, scaled)
            scaled = tl.where(scaled < -LARGEST, -LARGEST, scaled)
            scaled = tl.where(_magnitude(tile) < 0x7F800000, scaled, float("nan"))
        places = values + rows[:, None] * num_columns + columns[None, :]
        rounded = _round(scaled, SMALLEST, EPSILON)
        tl.store(places, rounded.to(values.dtype.element_ty), mask=inside)
    has_scale = (rows < num_rows) & (rows % height == 0) & (block < num_scale_columns)
    scale = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), factor)
    tl.store(scales + rows // height * num_scale_columns + block, scale, mask=has_scale)


def cast_blocks(
    x: Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    *,
    powers_of_two: bool,
    smallest_amax: float,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = x.shape
    tile = TILES[block]
    if block == (1, 0) and x.stride(1) != 1:
        tile = TRANSPOSED_ROWS
    height, width = block[0] or num_rows, block[1] or num_columns
    span = tile[1] if block == (0, 0) else width
    grid = (triton.cdiv(num_rows, tile[0]), triton.cdiv(num_columns, span))
    if amax is not None:
        bits = amax.float().view(1).view(torch.int32)
    else:
        bits = x.new_zeros(1, dtype=torch.int32)
        if block == (0, 0):
            _amax_kernel[grid](x, bits, *x.shape, *x.stride(), ROWS=tile[0], COLUMNS=tile[1])
    values = _result(x, (num_rows, num_columns), dtype)
    shape = triton.cdiv(num_rows, height), triton.cdiv(num_columns, width)
    scales = x.new_empty(shape, dtype=torch.float32)
    format = torch.finfo(dtype)
    _cast_kernel[grid](
        *(x, bits, values, scales, *x.shape, *x.stride(), span, height, shape[1]),
        LARGEST=format.max,
        SMALLEST=format.smallest_normal,
        EPSILON=format.eps,
        SMALLEST_AMAX=smallest_amax,
        FACTOR_OF_ZEROS=format.max / smallest_amax,
        POWERS_OF_TWO=powers_of_two,
        SHARED_BY={0: "all", 1: "row"}.get(block[0], "rows"),
        IS_CUT=amax is not None,
        ROWS=tile[0],
        COLUMNS=tile[1],
        num_warps=8 if tile[0] * tile[1] > 4096 else 4,
    )
    return values.to(dtype), scales


@triton.jit
def _scaled_matmul_kernel(  # type: ignore[no-untyped-def]
    a,  # (M, K)
    scale_a,  # (M, K / BLOCK)
    b,  # (N, K)
    scale_b,  # (N / height, K / BLOCK)
    out,  # (M, N)
    M,
    N,
    K,
    height,  # rows of b that share a scale
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    num_blocks = tl.cdiv(K, BLOCK)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(0, num_blocks):
        k = block * BLOCK + tl.arange(0, BLOCK)
        left = tl.load(
            a + rows[:, None] * K + k[None, :],
            mask=(rows < M)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        right = tl.load(
            b + columns[None, :] * K + k[:, None],
            mask=(columns < N)[None, :] & (k < K)[:, None],
            other=0.0,
        )
        by_row = tl.load(scale_a + rows * num_blocks + block, mask=rows < M, other=0.0)
        by_column = tl.load(
            scale_b + columns // height * num_blocks + block, mask=columns < N, other=0.0
        )
        # Beside the products of a block, which the device sums as it does, all sums are of fp32.
        total += tl.dot(left, right) * by_row[:, None] * by_column[None, :]
    places = out + rows[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=inside)


def scaled_matmul(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, *, height: int, dtype: torch.dtype
) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    out = _result(a, (m, n), dtype)
    rows, columns = 64, 128
    operands = (_operand(a), scale_a, _operand(b), scale_b)
    _scaled_matmul_kernel[triton.cdiv(m, rows), triton.cdiv(n, columns)](
        *(t.contiguous() for t in operands),
        *(out, m, n, k, height),
        ROWS=rows,
        COLUMNS=columns,
        BLOCK=128,
        num_warps=4,
        num_stages=3,
    )
    return out.to(dtype)


# --- rows of tokens to experts and back ---------------------------------------------------------


@triton.jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    x, order, weights, out, width, top_k, IS_WEIGHTED: tl.constexpr, PIECE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    pair = tl.load(order + row)
    values = tl.load(x + pair // top_k * width + columns, mask=columns < width, other=0.0)
    if IS_WEIGHTED:
        values = values.to(tl.float32) * tl.load(weights + pair).to(tl.float32)
    tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=columns < width)


def gather(x: Tensor, order: Tensor, top_k: int, weights: Tensor | None) -> Tensor:
    num_rows, width = order.shape[0], x.shape[1]
    out = _result(x, (num_rows, width), x.dtype)
    source = _operand(x.contiguous())
    factors = source if weights is None else _operand(weights.contiguous())
    if out.numel():
        _gather_kernel[num_rows, triton.cdiv(width, PIECE)](
            *(source, order, factors, out, width, top_k),
            IS_WEIGHTED=weights is not None,
            PIECE=PIECE,
        )
    return out.to(x.dtype)


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    rows,
    places,
    weights,
    out,
    width,
    TOP_K: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    PIECE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    total = tl.zeros([PIECE], tl.float32)
    for j in range(TOP_K):
        place = tl.load(places + token * TOP_K + j)
        values = tl.load(rows + place * width + columns, mask=columns < width, other=0.0)
        values = values.to(tl.float32)
        if IS_WEIGHTED:
            values = values * tl.load(weights + token * TOP_K + j).to(tl.float32)
        total += values
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=columns < width)


def combine(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    (num_tokens, top_k), width = places.shape, rows.shape[1]
    out = _result(rows, (num_tokens, width), rows.dtype)
    source = _operand(rows.contiguous())
    factors = source if weights is None else _operand(weights.contiguous())
    if out.numel():
        _combine_kernel[num_tokens, triton.cdiv(width, PIECE)](
            *(source, places, factors, out, width),
            TOP_K=top_k,
            IS_WEIGHTED=weights is not None,
            PIECE=PIECE,
        )
    return out.to(rows.dtype)


@triton.jit
def _dot_rows_kernel(  # type: ignore[no-untyped-def]
    x, rows, places, out, width, top_k, PIECE: tl.constexpr
):
    pair = tl.program_id(0).to(tl.int64)
    place = tl.load(places + pair)
    total = tl.zeros([PIECE], tl.float32)
    for start in range(0, width, PIECE):
        columns = start + tl.arange(0, PIECE)
        left = tl.load(x + pair // top_k * width + columns, mask=columns < width, other=0.0)
        right = tl.load(rows + place * width + columns, mask=columns < width, other=0.0)
        total += left.to(tl.float32) * right.to(tl.float32)
    tl.store(out + pair, tl.sum(total, axis=0).to(out.dtype.element_ty))


def dot_rows(x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    width, top_k = rows.shape[1], places.shape[1]
    out = _result(rows, (places.shape[0], top_k), rows.dtype)
    if out.numel():
        _dot_rows_kernel[(places.numel(),)](
            *(_operand(x.contiguous()), _operand(rows.contiguous()), places, out, width, top_k),
            PIECE=PIECE,
        )
    return out.to(rows.dtype)

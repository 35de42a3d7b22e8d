"""Rows of tokens in the order of their experts, and back.

Token t chooses k experts: the pairs t * k, ..., t * k + k - 1. Sorted by expert, the i-th pair is
order[i]. Two tokens, k = 2:

    pair     0  1  2  3            token t has the pairs 2 t and 2 t + 1
    expert   3  0  1  3
    order    1  2  0  3            the pairs by expert
    gather   t0 t1 t0 t1           row i: the token of pair order[i]
    places   2  0 | 1  3           where the pairs of each token lie among the rows
    combine  token 0: w * row 2 + w' * row 0

Each is the other's backward. A token's k rows are added in the order of its choices, in fp32, by
one program, which writes a number once: no atomics, no wait for the host, equal runs are equal.

The torch expressions serve wherever there is no kernel; `combine_rows_reference` sums in the same
order, as a product of the weights and the rows in their places.
Proven in tests/ops/test_kernels.py, and where the kernels stand in tests/models/test_moe.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.device import has_triton

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gather_rows(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """x: (tokens, width), order: (tokens * top_k,), a permutation -> (tokens * top_k, width)."""
    if has_triton(x.device.type) and x.dtype in _DTYPES:
        return _Gather.apply(x, order, top_k)
    return gather_rows_reference(x, order, top_k)


def gather_rows_reference(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    return x[order // top_k]


def combine_rows(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """rows: (tokens * top_k, width), weights: (tokens, top_k), order as above -> (tokens, width).

    The weights are rounded to the dtype of the rows.
    """
    if has_triton(rows.device.type) and rows.dtype in _DTYPES:
        return _Combine.apply(rows, order, weights.type_as(rows))
    return combine_rows_reference(rows, order, weights)


def combine_rows_reference(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    pairs = torch.empty_like(rows).index_copy(0, order, rows).unflatten(0, weights.shape)
    return (weights[:, None].type_as(pairs) @ pairs).squeeze(1)


def take_rows(rows: Tensor, places: Tensor) -> Tensor:
    """rows[places], no two places alike: then no row's gradient is a sum, to be sorted for."""
    return _Take.apply(rows, places)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_rows = rows.shape[0]
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, grad.shape[1]).index_copy_(0, places, grad), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return _gather(x, order, top_k, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _combine(grad, _places(order, ctx.top_k), None), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, order, weights)
        return _combine(rows, _places(order, weights.shape[1]), weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        rows, order, weights = ctx.saved_tensors
        top_k = weights.shape[1]
        grad_weights = _dot_rows(grad, rows, _places(order, top_k))
        return _gather(grad, order, top_k, weights), None, grad_weights


def _places(order: Tensor, top_k: int) -> Tensor:
    """The inverse of a permutation of the pairs: (tokens, top_k)."""
    pairs = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(pairs).index_copy_(0, order, pairs).view(-1, top_k)


# --- the kernels as operators, so that compiled code and fake tensors know their shapes ---------


@torch.library.custom_op("torchtitan_lite::gather", mutates_args=())
def _gather(x: Tensor, order: Tensor, top_k: int, weights: Tensor | None) -> Tensor:
    from torchtitan_lite.ops import kernels

    return kernels.gather(x, order, top_k, weights)


@_gather.register_fake
def _(x: Tensor, order: Tensor, top_k: int, weights: Tensor | None) -> Tensor:
    return x.new_empty(order.shape[0], x.shape[1])


@torch.library.custom_op("torchtitan_lite::combine", mutates_args=())
def _combine(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    from torchtitan_lite.ops import kernels

    return kernels.combine(rows, places, weights)


@_combine.register_fake
def _(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty(places.shape[0], rows.shape[1])


@torch.library.custom_op("torchtitan_lite::dot_rows", mutates_args=())
def _dot_rows(x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    from torchtitan_lite.ops import kernels

    return kernels.dot_rows(x, rows, places)


@_dot_rows.register_fake
def _(x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return rows.new_empty(places.shape)

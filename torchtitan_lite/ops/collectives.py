"""The collectives of tensor and of expert parallelism, each with its conjugate as backward.

    forward                     backward
    all_gather(dim)             reduce_scatter(dim), or this rank's slice
    reduce_scatter(dim)         all_gather(dim)
    copy_to_ranks (nothing)     all_reduce
    all_reduce                  nothing
    keep_slice(dim) (nothing)   all_gather
    all_to_all(send, receive)   all_to_all(receive, send)

Where every rank computes with its own shard of a weight, the gradient that comes back to a
gathered or copied input is one rank's share of a sum: it is reduced. Where all ranks compute the
same thing, each already holds the whole gradient, and takes its slice (`grad_is_partial=False`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 renamed them and 2.11 knows only the former names.
_gather_single = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_scatter_single = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


def all_gather(x: Tensor, *, dim: int, group: ProcessGroup, grad_is_partial: bool) -> Tensor:
    """Concatenate the ranks' x along `dim`."""
    return _AllGather.apply(x, dim, group, grad_is_partial)


def reduce_scatter(x: Tensor, *, dim: int, group: ProcessGroup) -> Tensor:
    """Sum the ranks' x and keep this rank's slice of `dim`, which the group must divide."""
    return _ReduceScatter.apply(x, dim, group)


def copy_to_ranks(x: Tensor, *, group: ProcessGroup) -> Tensor:
    """x itself, which every rank holds; the ranks' gradients are summed."""
    return _CopyToRanks.apply(x, group)


def all_reduce(x: Tensor, *, group: ProcessGroup) -> Tensor:
    """The sum of the ranks' x; each rank then holds the whole gradient already."""
    return _AllReduce.apply(x, group)


def keep_slice(x: Tensor, *, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's slice of x, which every rank holds; the group must divide `dim`.

    Each rank then holds the whole gradient of x.
    """
    return _KeepSlice.apply(x, dim, group)


def all_to_all(x: Tensor, *, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    """(sum(send), ...) -> (sum(receive), ...): blocks of rows to, and from, each rank in turn.

    What this rank sends to another is what that one receives from it; any number may be 0.
    """
    return _AllToAll.apply(x, send, receive, group)


def gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """all_gather outside of autograd."""
    return funcol.wait_tensor(_gather_single(x.contiguous(), dim, group))


def scatter_sum(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """reduce_scatter outside of autograd."""
    return funcol.wait_tensor(_scatter_single(x.contiguous(), "sum", dim, group))


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", group))


def _exchange(x: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    return funcol.wait_tensor(funcol.all_to_all_single(x.contiguous(), receive, send, group))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup, partial: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.partial = dim, group, partial
        return gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.partial:
            return scatter_sum(grad, ctx.dim, ctx.group), None, None, None
        mine = grad.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)]
        return mine.contiguous(), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return scatter_sum(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gather(grad, ctx.dim, ctx.group), None, None


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grad, ctx.group), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _KeepSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gather(grad, ctx.dim, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: list[int], receive: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None

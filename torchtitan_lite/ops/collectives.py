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

from collections.abc import Callable
from functools import partial
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
    back = scatter_sum if grad_is_partial else _own_slice
    return conjugate(x, gather, back, dim=dim, group=group)


def reduce_scatter(x: Tensor, *, dim: int, group: ProcessGroup) -> Tensor:
    """Sum the ranks' x and keep this rank's slice of `dim`, which the group must divide."""
    return conjugate(x, scatter_sum, gather, dim=dim, group=group)


def copy_to_ranks(x: Tensor, *, group: ProcessGroup) -> Tensor:
    """x itself, which every rank holds; the ranks' gradients are summed."""
    return conjugate(x, _same, _sum, group=group)


def all_reduce(x: Tensor, *, group: ProcessGroup) -> Tensor:
    """The sum of the ranks' x; each rank then holds the whole gradient already."""
    return conjugate(x, _sum, _same, group=group)


def keep_slice(x: Tensor, *, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's slice of x, which every rank holds; the group must divide `dim`.

    Each rank then holds the whole gradient of x.
    """
    return conjugate(x, _own_slice, gather, dim=dim, group=group)


def all_to_all(x: Tensor, *, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    """(sum(send), ...) -> (sum(receive), ...): blocks of rows to, and from, each rank in turn.

    What this rank sends to another is what that one receives from it; any number may be 0.
    """
    there = partial(_exchange, send=send, receive=receive)
    back = partial(_exchange, send=receive, receive=send)
    return conjugate(x, there, back, group=group)


def conjugate(
    x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], **options: Any
) -> Tensor:
    """there(x, **options), whose gradient comes back by back(gradient, **options)."""
    return _Conjugate.apply(x, partial(there, **options), partial(back, **options))


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


# --- outside of autograd ------------------------------------------------------------------------


def gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The ranks' x, one behind the other along `dim`."""
    return funcol.wait_tensor(_gather_single(x.contiguous(), dim, group))


def scatter_sum(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's slice of `dim` of the sum of the ranks' x."""
    return funcol.wait_tensor(_scatter_single(x.contiguous(), "sum", dim, group))


def _same(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", group))


def _own_slice(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def _exchange(x: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    return funcol.wait_tensor(funcol.all_to_all_single(x.contiguous(), receive, send, group))

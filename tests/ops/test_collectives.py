"""Each collective's backward is the conjugate of its forward.

Stacked over the ranks, a collective is a linear map A, and its backward must be A transposed. So
the same map is written down with `cat` and `sum` over all ranks' tensors in one process, and
autograd transposes it. Values are small integers: every comparison is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.world import run_ranks
from torchtitan_lite.ops import collectives

SHAPE = (4, 8, 12)  # each divided by 2 and by 4, no two equal

Apply = Callable[[Tensor, int, dist.ProcessGroup], Tensor]
Whole = Callable[[list[Tensor], int], list[Tensor]]  # all ranks' x, dim -> all ranks' y


def _sum_of(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


COLLECTIVES: dict[str, tuple[Apply, Whole, bool]] = {
    # name: (ours, all ranks at once, whether the ranks use their y each in their own way)
    "all_gather, each its own": (
        lambda x, dim, group: collectives.all_gather(x, dim=dim, group=group, grad_is_partial=True),
        lambda xs, dim: [torch.cat(xs, dim)] * len(xs),
        True,
    ),
    "all_gather, all the same": (
        lambda x, dim, group: collectives.all_gather(
            x, dim=dim, group=group, grad_is_partial=False
        ),
        lambda xs, dim: [torch.cat(xs, dim)],
        False,
    ),
    "reduce_scatter": (
        lambda x, dim, group: collectives.reduce_scatter(x, dim=dim, group=group),
        lambda xs, dim: list(_sum_of(xs).chunk(len(xs), dim)),
        True,
    ),
    "copy_to_ranks": (
        lambda x, dim, group: collectives.copy_to_ranks(x, group=group),
        lambda xs, dim: [xs[0]] * len(xs),
        True,
    ),
    "all_reduce": (
        lambda x, dim, group: collectives.all_reduce(x, group=group),
        lambda xs, dim: [_sum_of(xs)],
        False,
    ),
    "keep_slice": (
        lambda x, dim, group: collectives.keep_slice(x, dim=dim, group=group),
        lambda xs, dim: list(xs[0].chunk(len(xs), dim)),
        True,
    ),
}
WHOLE = ("copy_to_ranks", "keep_slice")  # they take what every rank holds
DIMS = (0, 1, -1)


def _integers(shape: torch.Size | tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).float()


def _input(name: str, rank: int) -> Tensor:
    return _integers(SHAPE, 0 if name in WHOLE else rank).requires_grad_()


def _upstream(name: str, rank: int, shape: torch.Size) -> Tensor:
    return _integers(shape, 100 + (rank if COLLECTIVES[name][2] else 0))


def _on_rank() -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    found = {}
    for name, (ours, _, _) in COLLECTIVES.items():
        for dim in DIMS:
            x = _input(name, rank)
            # Neither the input nor the upstream gradient is contiguous.
            y = ours(x.transpose(0, 1).contiguous().transpose(0, 1), dim, group)
            upstream = _upstream(name, rank, y.shape).transpose(0, 2).contiguous().transpose(0, 2)
            (grad,) = torch.autograd.grad(y, x, upstream)
            found[name, dim] = (y.detach(), grad)
    return found


@cache
def _on_ranks(world_size: int) -> list[dict[tuple[str, int], tuple[Tensor, Tensor]]]:
    return run_ranks(_on_rank, world_size)


def _expected(name: str, dim: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """All ranks' outputs, and the transposed map of all ranks' upstream gradients."""
    _, whole, _ = COLLECTIVES[name]
    xs = [_input(name, rank) for rank in range(world_size)]
    ys = whole(xs, dim)
    # Where all ranks hold the one y and use it in the one way, it is counted once.
    loss = sum((y * _upstream(name, rank, y.shape)).sum() for rank, y in enumerate(ys))
    grads = torch.autograd.grad(loss, xs, allow_unused=True)  # type: ignore[arg-type]
    outputs = ys if len(ys) == world_size else ys * world_size
    if name in WHOLE:
        grads = (grads[0],) * world_size
    return outputs, list(grads)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_backward_is_the_transposed_forward(name: str, dim: int, world_size: int) -> None:
    outputs, grads = _expected(name, dim, world_size)
    for rank, found in enumerate(_on_ranks(world_size)):
        y, grad = found[name, dim]
        assert torch.equal(y, outputs[rank].detach())
        assert torch.equal(grad, grads[rank])


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ("all_gather, each its own", "all_gather, all the same"),
        ("all_gather, all the same", "all_gather, each its own"),
        ("all_reduce", "copy_to_ranks"),
    ],
)
def test_the_backward_of_another_collective_would_be_seen(ours: str, other: str) -> None:
    """The twin: a gather that sums what is whole, or keeps a share of what is a sum."""
    _, grads = _expected(other, 1, 2)
    assert not torch.equal(_on_ranks(2)[1][ours, 1][1], grads[1])


def _broadcast_gradient() -> list[Tensor]:
    """`.sum()` hands back a gradient without memory of its own."""
    group = dist.group.WORLD
    grads = []
    for ours, _, _ in COLLECTIVES.values():
        x = torch.ones(SHAPE, requires_grad=True)
        ours(x, 1, group).sum().backward()  # type: ignore[arg-type]
        assert x.grad is not None
        grads.append(x.grad)
    return grads


def test_a_broadcast_gradient_is_taken() -> None:
    summed = {"all_gather, each its own", "copy_to_ranks"}
    for grads in run_ranks(_broadcast_gradient, 2):
        for name, grad in zip(COLLECTIVES, grads, strict=True):
            assert torch.equal(grad, torch.full(SHAPE, 2.0 if name in summed else 1.0)), name


# --- rows to whom they belong -----------------------------------------------------------------

# How many rows rank i sends to rank j: uneven; none to, and none from, some rank; none at all.
ROWS: dict[str, Callable[[int, int], int]] = {
    "uneven": lambda i, j: (3 * i + 2 * j + 1) % 5,
    "all to rank 1": lambda i, j: (i + 2) * (j == 1),
    "all from rank 1": lambda i, j: (j + 1) * (i == 1),
    "none": lambda i, j: 0,
}


def _sent(name: str, rank: int, size: int) -> list[int]:
    return [ROWS[name](rank, other) for other in range(size)]


def _exchanged() -> dict[str, tuple[Tensor, Tensor]]:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    found = {}
    for name in ROWS:
        send = _sent(name, rank, size)
        receive = [_sent(name, other, size)[rank] for other in range(size)]
        x = _integers((3, sum(send)), rank).requires_grad_()
        y = collectives.all_to_all(x.T, send=send, receive=receive, group=group)
        upstream = _integers((3, sum(receive)), 100 + rank).T
        (grad,) = torch.autograd.grad(y, x, upstream)
        found[name] = (y.detach(), grad)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_rows_and_their_gradients_cross_whatever_their_number(size: int) -> None:
    ranks = run_ranks(_exchanged, size)
    for name in ROWS:
        sent = [_sent(name, rank, size) for rank in range(size)]
        xs = [_integers((3, sum(sent[rank])), rank).T.requires_grad_() for rank in range(size)]
        blocks = [x.split(own) for x, own in zip(xs, sent, strict=True)]
        ys = [torch.cat([of_rank[rank] for of_rank in blocks]) for rank in range(size)]
        loss = sum((y * _integers((3, len(y)), 100 + r).T).sum() for r, y in enumerate(ys))
        grads = torch.autograd.grad(loss, xs)  # type: ignore[arg-type]
        for rank, found in enumerate(ranks):
            y, grad = found[name]
            assert torch.equal(y, ys[rank].detach()), name
            assert torch.equal(grad.T, grads[rank]), name


def _uneven_scatter() -> str:
    try:
        collectives.reduce_scatter(torch.ones(3, 5), dim=1, group=dist.group.WORLD)  # type: ignore[arg-type]
    except (AssertionError, RuntimeError) as error:
        return str(error) or "refused"
    return ""


def test_a_dim_that_the_group_does_not_divide_is_refused() -> None:
    assert all(run_ranks(_uneven_scatter, 2))

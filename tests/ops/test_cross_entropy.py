"""linear_cross_entropy against F.cross_entropy: values, gradients, chunks, shards, padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.world import run_ranks
from torchtitan_lite.ops.cross_entropy import linear_cross_entropy

TOKENS, HIDDEN, VOCAB, PADDED = 37, 16, 61, 128


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(PADDED, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    labels[::5] = -100
    return x.requires_grad_(), weight.requires_grad_(), labels


def _reference(z_loss_weight: float, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, labels = _inputs()
    logits = (x @ weight.t())[:, :VOCAB]
    cross_entropy = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    z = (torch.logsumexp(logits, dim=1).square() * (labels != -100)).sum()
    loss = cross_entropy + z_loss_weight * z
    grad_x, grad_weight = torch.autograd.grad(loss * scale, (x, weight))
    return torch.stack((loss, cross_entropy, z)).detach(), grad_x, grad_weight


@pytest.mark.parametrize("num_chunks", [1, 4, 37, 100])
@pytest.mark.parametrize("z_loss_weight", [0.0, 1e-2])
def test_any_chunking_equals_plain_cross_entropy(num_chunks: int, z_loss_weight: float) -> None:
    x, weight, labels = _inputs()
    sums = linear_cross_entropy(
        x, weight, labels, vocab_size=VOCAB, num_chunks=num_chunks, z_loss_weight=z_loss_weight
    )
    grads = torch.autograd.grad(sums[0] / 7, (x, weight))
    expected = _reference(z_loss_weight, 1 / 7)
    for ours, reference in zip((sums.detach(), *grads), expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)
    assert grads[1][VOCAB:].abs().max() == 0, "a padded row has a gradient"


def test_z_is_the_square_of_the_logsumexp_also_of_shifted_logits() -> None:
    """A z-loss of logsumexp(logits - max) would not notice a shift of all logits by 50."""
    x = torch.ones(3, 1)
    weight = torch.full((8, 1), 50.0)
    sums = linear_cross_entropy(x, weight, torch.zeros(3, dtype=torch.long), vocab_size=8)
    expected = 3 * (50 + torch.log(torch.tensor(8.0))) ** 2
    torch.testing.assert_close(sums[2], expected)


def test_no_valid_label_gives_zero_loss_and_zero_gradients() -> None:
    x, weight, labels = _inputs()
    sums = linear_cross_entropy(x, weight, torch.full_like(labels, -100), vocab_size=VOCAB)
    grads = torch.autograd.grad(sums[0], (x, weight))
    assert sums.tolist() == [0, 0, 0]
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_bf16_gradients_are_scaled_in_fp32() -> None:
    """1/1000 in bf16 is off by 1e-3; the ratio of the gradients' norms must not show it."""
    x, weight, labels = _inputs(torch.bfloat16)
    sums = linear_cross_entropy(x, weight, labels, vocab_size=VOCAB, num_chunks=2)
    (plain,) = torch.autograd.grad(sums[0], weight, retain_graph=True)
    (scaled,) = torch.autograd.grad(sums[0] / 1000, weight)
    ratio = (scaled.double().norm() / plain.double().norm() * 1000).item()
    assert abs(ratio - 1) < 3e-4
    rounded = torch.tensor(1 / 1000).bfloat16().item() * 1000
    assert abs(rounded - 1) > 3e-4, "the twin: a scale rounded to bf16 would be seen"


class _LargestFloat(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float32:
            self.largest = max(self.largest, out.numel())
        return out


def test_the_logits_never_exist_whole() -> None:
    x = torch.randn(256, 8, requires_grad=True)
    weight = torch.randn(128, 8, requires_grad=True)
    labels = torch.randint(128, (256,))
    largest = {}
    for num_chunks in (1, 8):
        with _LargestFloat() as mode:
            linear_cross_entropy(x, weight, labels, vocab_size=128, num_chunks=num_chunks)[
                0
            ].backward()
        largest[num_chunks] = mode.largest
    assert largest == {1: 256 * 128, 8: 256 * 128 // 8}


def test_without_gradients_none_are_computed() -> None:
    x, weight, labels = _inputs()
    with torch.no_grad():
        sums = linear_cross_entropy(x, weight, labels, vocab_size=VOCAB)
    assert not sums.requires_grad


def _vocabulary_shard(num_chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, labels = _inputs()
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = PADDED // world
    shard = weight.detach()[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    sums = linear_cross_entropy(
        x,
        shard,
        labels,
        vocab_size=VOCAB,
        num_chunks=num_chunks,
        z_loss_weight=1e-2,
        first_row=rank * rows,
        group=dist.group.WORLD,
    )
    return sums.detach(), *torch.autograd.grad(sums[0], (x, shard))


@pytest.mark.parametrize("world_size", [2, 4])
def test_vocabulary_shards_equal_the_whole_also_when_a_shard_is_all_padding(
    world_size: int,
) -> None:
    expected = _reference(1e-2, 1.0)
    results = run_ranks(_vocabulary_shard, world_size, 3)
    for sums, _, _ in results:
        torch.testing.assert_close(sums, expected[0], rtol=1e-5, atol=1e-5)
    grad_x = torch.stack([result[1] for result in results]).sum(0)
    torch.testing.assert_close(grad_x, expected[1], rtol=1e-5, atol=1e-5)
    grad_weight = torch.cat([result[2] for result in results])
    torch.testing.assert_close(grad_weight, expected[2], rtol=1e-5, atol=1e-5)

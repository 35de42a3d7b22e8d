"""One kernel for all experts is a loop over them, forward and backward; aligning loses no row."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite.ops.grouped import ALIGNMENT, align_blocks, best_kernel, grouped_linear

CPU = torch.device("cpu")
KERNELS = ["grouped", "loop"]
IN, OUT = 16, 24
COUNTS = {
    "several": [3, 5, 1, 7],
    "some_empty": [0, 4, 0, 0],
    "all_to_one": [0, 0, 0, 16],
    "one_row": [0, 1, 0, 0],
    "none": [0, 0, 0, 0],
}


def inputs(num_rows: int, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = (num_rows, IN), (num_experts, OUT, IN), (num_rows, OUT)
    x, weight, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x.requires_grad_(), weight.requires_grad_(), grad


def by_row(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """The oracle: each row times the matrix of its expert, none of both kernels."""
    expert = [e for e, count in enumerate(counts) for _ in range(count)]
    return torch.einsum("ni,noi->no", x[: len(expert)], weight[expert])


@pytest.mark.parametrize("extra_rows", [0, 6], ids=lambda n: f"{n}_rows_behind")
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_both_kernels_equal_a_product_a_row(
    kernel: str, dtype: torch.dtype, counts: list[int], extra_rows: int
) -> None:
    """Result and both gradients, in bf16 to its rounding; rows behind the last block touch none."""
    num_rows = sum(counts)
    x, weight, grad = inputs(num_rows + extra_rows, len(counts), dtype)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    expected = by_row(exact_x, exact_weight, counts)
    expected_grads = torch.autograd.grad(
        expected, (exact_x, exact_weight), grad[:num_rows].double()
    )
    out = grouped_linear(x, weight, torch.tensor(counts), kernel=kernel)
    assert out.shape == (num_rows + extra_rows, OUT) and out.dtype == dtype
    grad_x, grad_weight = torch.autograd.grad(out, (x, weight), grad)
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (1e-2, 5e-2)
    for ours, reference in (
        (out[:num_rows], expected),
        (grad_x[:num_rows], expected_grads[0][:num_rows]),
        (grad_weight, expected_grads[1]),
    ):
        torch.testing.assert_close(ours.double(), reference, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_at_another_experts_matrix_would_be_seen(kernel: str) -> None:
    counts = COUNTS["several"]
    x, weight, _ = inputs(sum(counts), len(counts), torch.float32)
    moved = [counts[0] + 1, counts[1] - 1, *counts[2:]]
    out = grouped_linear(x, weight, torch.tensor(moved), kernel=kernel)
    assert (out - by_row(x, weight, counts)).abs().max() > 1e-2


def test_what_lies_behind_the_last_block_is_zero_in_the_loop() -> None:
    x, weight, grad = inputs(9, 4, torch.float32)
    out = grouped_linear(x, weight, torch.tensor([2, 0, 3, 0]), kernel="loop")
    (grad_x,) = torch.autograd.grad(out, x, grad)
    assert not out[5:].any() and not grad_x[5:].any()


# --- aligned blocks ---------------------------------------------------------------------------


def random_counts(seed: int) -> list[int]:
    """Of 1 to 12 experts, about a third of them without a row."""
    draw = random.Random(seed)
    return [draw.choice((0, draw.randint(1, 40), draw.randint(1, 9))) for _ in range(seed % 12 + 1)]


@pytest.mark.parametrize("multiple", [1, 4, 8])
def test_aligning_keeps_every_row_in_its_block_for_any_counts(multiple: int) -> None:
    """Places ascend and are the first of each block; the others of a block are free."""
    for seed in range(200):
        counts = random_counts(seed)
        num_rows = sum(counts)
        lengths, places, size = align_blocks(torch.tensor(counts), num_rows, multiple)
        assert all(length % multiple == 0 for length in lengths.tolist())
        assert all(0 <= a - b < multiple for a, b in zip(lengths.tolist(), counts, strict=True))
        starts = [sum(lengths.tolist()[:e]) for e in range(len(counts))]
        wanted = [start + i for start, n in zip(starts, counts, strict=True) for i in range(n)]
        assert places.tolist() == wanted
        assert sum(lengths.tolist()) <= size, "the buffer holds all blocks"


def test_the_buffer_does_not_depend_on_the_counts() -> None:
    """So its length is known without a wait, and no step of a run needs another."""
    sizes = set()
    for seed in range(100):
        cuts = sorted(random.Random(seed).choices(range(64), k=7))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, 63], strict=True)]
        assert sum(counts) == 63 and len(counts) == 8
        sizes.add(align_blocks(torch.tensor(counts), 63, 8)[2])
    assert sizes == {63 + 8 * 7 + 1}, "63 rows, at most 7 free ones for each of 8 experts, rounded"


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_product_in_aligned_blocks_is_the_product(kernel: str) -> None:
    """Result and gradients, though the free rows are multiplied and those behind are anything."""
    for seed in range(40):
        counts = torch.tensor(random_counts(seed))
        num_rows = int(counts.sum())
        x, weight, grad = inputs(num_rows, len(counts), torch.float32)
        expected = grouped_linear(x, weight, counts, kernel="loop")
        expected_grads = torch.autograd.grad(expected, (x, weight), grad)
        lengths, places, size = align_blocks(counts, num_rows, 8)
        padded = x.new_zeros(size, IN).index_copy(0, places, x)
        assert padded.count_nonzero() == x.count_nonzero(), "zero rows only between"
        out = grouped_linear(padded, weight, lengths, kernel=kernel)[places]
        grads = torch.autograd.grad(out, (x, weight), grad)
        for ours, reference in zip((out, *grads), (expected, *expected_grads), strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


# --- which kernel -----------------------------------------------------------------------------


def test_the_best_kernel_is_one_that_runs() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for widths in ((16, 24), (16, 8), (10, 24), (16, 7), (4, 4)):
            kernel = best_kernel(CPU, dtype, widths)
            x = torch.randn(5, widths[0], dtype=dtype, requires_grad=True)
            weight = torch.randn(2, widths[1], widths[0], dtype=dtype, requires_grad=True)
            out = grouped_linear(x, weight, torch.tensor([2, 3]), kernel=kernel)
            (out * out).sum().backward()
            is_aligned = all(width * dtype.itemsize % ALIGNMENT == 0 for width in widths)
            assert kernel == ("grouped" if is_aligned and dtype != torch.float64 else "loop")


def test_a_width_that_is_called_misaligned_does_not_run_grouped() -> None:
    """Nor does fp64: the fallback is taken where it must be, and there only."""
    for dtype, width in ((torch.float32, 7), (torch.bfloat16, 12), (torch.float64, 16)):
        x, weight = torch.randn(5, width, dtype=dtype), torch.randn(2, 16, width, dtype=dtype)
        with pytest.raises(RuntimeError):
            F.grouped_mm(x, weight.transpose(1, 2), offs=torch.tensor([2, 5], dtype=torch.int32))

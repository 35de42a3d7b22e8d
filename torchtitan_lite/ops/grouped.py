"""Matrix products of many experts at once: each multiplies its own block of rows.

    x (rows, in), sorted by expert            weight (experts, out, in)
    +------------------+
    | expert 0  3 rows |  x  weight[0].T
    | expert 1  0 rows |                      an empty block is no product
    | expert 2  5 rows |  x  weight[2].T
    +------------------+

"grouped" is one kernel for all experts (F.grouped_mm), which needs the counts on the device alone;
"loop" is one product for each expert, the oracle and the fallback, which needs them on the host.

On accelerators the kernel's weight gradient wants blocks whose length is a multiple of ALIGNMENT
bytes: `align_blocks` says where each row goes in a buffer with zero rows between the blocks. A
zero row adds nothing to any gradient, and what comes out of it is never read, so no row is lost.

Proven in tests/ops/test_grouped.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite.device import grouped_kernel_dtypes

ALIGNMENT = 16  # bytes


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, *, kernel: str) -> Tensor:
    """x: (rows, in), weight: (experts, out, in), counts: (experts,) int64 -> (rows, out).

    Rows behind the last block come out, and get as their gradient, anything ("grouped") or zeros
    ("loop").
    """
    if kernel == "grouped":
        ends = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    sizes = counts.tolist()
    blocks = x[: sum(sizes)].split(sizes)
    products = [F.linear(block, expert) for block, expert in zip(blocks, weight, strict=True)]
    rest = x.new_zeros(x.shape[0] - sum(sizes), weight.shape[1])
    return torch.cat([*products, rest])


def grouped_outer(a: Tensor, b: Tensor, counts: Tensor, *, kernel: str) -> Tensor:
    """a^T b of each block of rows: (rows, out), (rows, in) -> (experts, out, in).

    It is the gradient of the weight above: of the gradient of its output, and of x.
    """
    if kernel == "grouped":
        return F.grouped_mm(a.t(), b, offs=counts.cumsum(0).to(torch.int32))
    sizes = counts.tolist()
    blocks = zip(a[: sum(sizes)].split(sizes), b[: sum(sizes)].split(sizes), strict=True)
    return torch.stack([left.t() @ right for left, right in blocks])


def align_blocks(counts: Tensor, num_rows: int, multiple: int) -> tuple[Tensor, Tensor, int]:
    """Blocks of `counts` rows, `num_rows` in all, with each length rounded up to `multiple`.

    Returns (the lengths, for each row its place, the length of a buffer that holds any such
    blocks). No wait for the device: the buffer is as long as the worst case.
    """
    lengths = -(-counts // multiple) * multiple
    shifts = (lengths - counts).cumsum(0) - (lengths - counts)  # zero rows before each block
    rows = torch.arange(num_rows, device=counts.device)
    block = torch.searchsorted(counts.cumsum(0), rows, right=True)
    size = num_rows + counts.shape[0] * (multiple - 1)
    return lengths, rows + shifts[block], -(-size // multiple) * multiple


def best_kernel(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> str:
    """The kernel for matrices of these widths on `device`: "grouped" where there is one.

    It wants rows that begin at multiples of ALIGNMENT bytes.
    """
    is_known = str(dtype).removeprefix("torch.") in grouped_kernel_dtypes(device.type)
    is_aligned = all(width * dtype.itemsize % ALIGNMENT == 0 for width in widths)
    return "grouped" if is_known and is_aligned else "loop"

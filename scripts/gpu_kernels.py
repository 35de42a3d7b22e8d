"""Each kernel of this project beside plain torch on the same device: its error and its bound.

    PYTHONPATH=. python scripts/gpu_kernels.py [--device cpu]

CHECKS lists them: a name, and a function of the device that returns the error it found and the
bound that this must not pass, or raises Skipped. Errors are relative to the largest number of the
reference, unless said otherwise; where results must be the same bit by bit, the error is how many
numbers are not. References compute the same inputs in fp32.

A failure does not end the run. An error of the device does end the process, whose every further
call would fail: it goes on with the next check in a new one. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite import device as devices
from torchtitan_lite.models.attention import RowMask
from torchtitan_lite.models.backends import attend as attend_rows
from torchtitan_lite.ops import attention, float8, permute
from torchtitan_lite.ops.grouped import grouped_linear
from torchtitan_lite.precision.float8 import E4M3, E5M2, RECIPES, Block, cast
from torchtitan_lite.precision.linear import Float8Linear

Check = Callable[[torch.device], tuple[float, float]]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SAME_BITS = 0.0


class Skipped(Exception):
    """This device has no such kernel."""


def random(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Drawn on the CPU, so that every device sees the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest, relative to the largest number of its reference; NaN is inf."""
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape, f"{tuple(mine.shape)} instead of {tuple(other.shape)}"
        largest = other.double().abs().max().clamp_min(1e-300)
        error = ((mine.double() - other.double()).abs().max() / largest).item()
        worst = math.inf if math.isnan(error) else max(worst, error)
    return worst


def with_gradients(function: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> list:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


# --- attention ----------------------------------------------------------------------------------


def document_mask(device: torch.device, batch: int, seq: int, *, dead: bool) -> Tensor:
    """(batch, 1, seq, seq): causal within documents of 50; `dead`: every 7th query sees nothing."""
    places = torch.arange(seq, device=device)
    number = torch.stack([(places + row) // 50 for row in range(batch)])
    mask = (number[:, :, None] == number[:, None]) & (places[:, None] >= places)
    if dead:
        mask = mask & (places % 7 > 0)[:, None]
    return mask[:, None]


def block_attention(
    device: torch.device, *, kernel: str, dtype: torch.dtype, mask: str, width: int, value: int
) -> tuple[float, float]:
    """ops/attention.py: out and gradients, as of one block of context parallelism."""
    if (kernel == "cpu") != (device.type == "cpu"):
        raise Skipped("no such kernel here")
    batch, heads, kv_heads, seq = 2, 8, 2, 333
    new = partial(random, device=device, dtype=dtype)
    q, k = new(batch, heads, seq, width, seed=1), new(batch, kv_heads, seq, width, seed=2)
    v, grad = new(batch, kv_heads, seq, value, seed=3), new(batch, heads, seq, value, seed=4)
    seen = None
    if mask in ("documents", "dead"):
        seen = document_mask(device, batch, seq, dead=mask == "dead")
    rule = {"mask": seen, "causal": mask == "causal", "scale": width**-0.5}
    q32, k32, v32, grad32 = (t.float() for t in (q, k, v, grad))
    out32, lse32 = attention.attend_reference(q32, k32, v32, **rule)
    expected = [out32]
    expected += attention.attend_backward_reference(grad32, q32, k32, v32, out32, lse32, **rule)
    out, lse = attention.attend(q, k, v, **rule, kernel=kernel)
    grads = attention.attend_backward(grad, q, k, v, out, lse, **rule, kernel=kernel)
    alive = lse32 > -math.inf
    assert torch.equal(lse > -math.inf, alive), "other queries see nothing"
    found = difference([out, *grads], expected)
    return max(found, difference([lse[alive]], [lse32[alive]])), BOUNDS[dtype]


def backend(
    device: torch.device, *, name: str, dtype: torch.dtype, documents: bool, window: int | None
) -> tuple[float, float]:
    """models/backends.py: flex or varlen beside sdpa with a dense mask, on packed rows."""
    trains = str(dtype).removeprefix("torch.") in devices.attention_dtypes(device.type, name)
    if not trains and (device.type, name) != ("cpu", "flex"):
        raise Skipped("no such kernel here")
    batch, heads, kv_heads, seq, width = 2, 8, 2, 777, 64
    new = partial(random, device=device, dtype=dtype)
    q, k = new(batch, heads, seq, width, seed=1), new(batch, kv_heads, seq, width, seed=2)
    v, grad = new(batch, kv_heads, seq, width, seed=3), new(batch, heads, seq, width, seed=4)
    places = torch.arange(seq, device=device)
    numbers = torch.stack([places // 100, (places + 30) // 257]) if documents else None
    masks = [RowMask(numbers, num_keys=seq, device=device) for _ in range(2)]
    rule: dict[str, Any] = {"window": window, "scale": None}

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_rows(q, k, v, masks[0], **rule, backend=name)

    def compute_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_rows(q, k, v, masks[1], **rule)

    high = [t.float() for t in (q, k, v)]
    if not trains:
        return difference([compute(q, k, v)], [compute_reference(*high)]), BOUNDS[dtype]
    found = with_gradients(compute, [q, k, v], grad)
    return difference(found, with_gradients(compute_reference, high, grad)), BOUNDS[dtype]


# --- experts ------------------------------------------------------------------------------------


def experts(device: torch.device, *, counts: list[int]) -> tuple[float, float]:
    """One kernel for the products of all experts beside a product each, in bf16."""
    if "bfloat16" not in devices.grouped_kernel_dtypes(device.type):
        raise Skipped("no grouped kernel in bfloat16")
    new = partial(random, device=device, dtype=torch.bfloat16)
    leaves = [new(sum(counts), 256), new(len(counts), 384, 256, seed=1)]
    grad, ends = new(sum(counts), 384, seed=2), torch.tensor(counts, device=device)
    found, expected = (
        with_gradients(
            lambda x, w, kernel=kernel: grouped_linear(x, w, ends, kernel=kernel), of, grad
        )
        for kernel, of in (("grouped", leaves), ("loop", [t.float() for t in leaves]))
    )
    return difference(found, expected), BOUNDS[torch.bfloat16]


def rows_of_experts(device: torch.device, *, dtype: torch.dtype) -> tuple[float, float]:
    """ops/permute.py: rows to the order of their experts and back, with all gradients."""
    need_triton(device)
    tokens, top_k, width = (9, 3, 1100) if device.type == "cpu" else (300, 3, 1500)
    new = partial(random, device=device, dtype=dtype)
    order = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(0)).to(device)
    x, rows = new(tokens, width), new(tokens * top_k, width, seed=1)
    weights = random(tokens, top_k, device=device, dtype=torch.float32, seed=2)
    weights = weights.abs().to(dtype).float()  # as the kernel rounds them
    grads = new(tokens * top_k, width, seed=3), new(tokens, width, seed=4)
    found = with_gradients(lambda x: permute.gather_rows(x, order, top_k), [x], grads[0])
    expected = with_gradients(
        lambda x: permute.gather_rows_reference(x, order, top_k), [x.float()], grads[0]
    )
    found += with_gradients(
        lambda rows, weights: permute.combine_rows(rows, order, weights), [rows, weights], grads[1]
    )
    expected += with_gradients(
        lambda rows, weights: permute.combine_rows_reference(rows, order, weights),
        [rows.float(), weights],
        grads[1],
    )
    return difference(found, expected), BOUNDS[dtype]


# --- float8 -------------------------------------------------------------------------------------


def need_triton(device: torch.device) -> None:
    if not devices.has_triton(device.type):
        raise Skipped("no Triton here (on CPU: TRITON_INTERPRET=1)")


def cast_kernel(
    device: torch.device, *, block: Block, dtype: torch.dtype, of: torch.dtype
) -> tuple[float, float]:
    """The Triton kernel beside the torch expression, also transposed: the same bits."""
    need_triton(device)
    num_rows, num_columns = (70, 300) if device.type == "cpu" else (513, 1030)
    x = random(num_rows, num_columns, device=device, dtype=of)
    x = x * 10.0 ** torch.linspace(-9, 9, num_rows, device=device, dtype=of)[:, None]
    x[1], x[:, 3] = 0.0, 0.0
    num_other = 0
    for matrix in (x, x.t()):
        for powers_of_two in (True, False):
            found = float8.cast_blocks(matrix, dtype, block, powers_of_two=powers_of_two)
            expected = float8.cast_blocks_reference(
                matrix, dtype, block, powers_of_two=powers_of_two
            )
            for ours, theirs in zip(found, expected, strict=True):
                num_other += int((ours.float() != theirs.float()).sum())
    return float(num_other), SAME_BITS


def scaled_matmul(device: torch.device, *, height: int, dtype: torch.dtype) -> tuple[float, float]:
    """The blockwise product's kernel beside fp32 of what float8 holds; error of the norms."""
    need_triton(device)
    a, b = (
        cast(
            random(rows, 1100, device=device, dtype=torch.bfloat16, seed=rows),
            E4M3,
            block,
            powers_of_two=True,
        )
        for rows, block in ((300, (1, 128)), (530, (height, 128)))
    )
    arguments = (a.values, a.scale, b.values, b.scale, height, dtype)
    found = float8.scaled_matmul(*arguments).double()
    expected = float8.scaled_matmul_reference(*arguments[:-1], torch.float32).double()
    error = ((found - expected).norm() / expected.norm()).item()
    # The device sums 128 products in fewer bits than fp32 has.
    return error, {torch.float32: 1e-3, torch.bfloat16: 4e-3}[dtype]


def float8_linear(device: torch.device, *, recipe: str, dtype: torch.dtype) -> tuple[float, float]:
    """A linear by torch._scaled_mm or Triton beside one emulated; error of the norms."""
    if recipe not in devices.float8_recipes(device.type, str(dtype).removeprefix("torch.")):
        raise Skipped("no such kernel here")
    x = random(520, 512, device=device, dtype=dtype)
    weight = random(784, 512, device=device, dtype=dtype, seed=1)
    grad = 1e-6 * random(520, 784, device=device, dtype=dtype, seed=2)
    results = []
    for emulate in (False, True):
        linear = torch.nn.Linear(512, 784, bias=False, device=device, dtype=dtype)
        linear.__class__ = Float8Linear
        linear.recipe = replace(RECIPES[recipe], emulate=emulate)  # type: ignore[assignment]
        linear.weight.data.copy_(weight)
        leaf = x.clone().requires_grad_()
        out = linear(leaf)
        results.append((out, *torch.autograd.grad(out, (leaf, linear.weight), grad)))
    errors = [
        ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
        for ours, theirs in zip(*results, strict=True)
    ]
    return max(errors), {torch.float32: 1e-3, torch.bfloat16: 4e-3}[dtype]


def compiled_float8(device: torch.device) -> tuple[float, float]:
    """torch.compile of a rowwise linear beside the same, eager."""
    if device.type == "cpu":
        raise Skipped("covered by the tests there")
    linear = torch.nn.Linear(512, 784, bias=False, device=device, dtype=torch.bfloat16)
    linear.__class__ = Float8Linear
    linear.recipe = replace(RECIPES["rowwise"], emulate=False)  # type: ignore[assignment]
    x = random(520, 512, device=device, dtype=torch.bfloat16)
    grad = random(520, 784, device=device, dtype=torch.bfloat16, seed=2)
    found = with_gradients(torch.compile(linear, fullgraph=True), [x], grad)
    return difference(found, with_gradients(linear, [x], grad)), BOUNDS[torch.bfloat16]


def plain_attention(device: torch.device, *, dtype: torch.dtype) -> tuple[float, float]:
    """torch's own choice for sdpa, which all of training rests on, beside the formula."""
    new = partial(random, device=device, dtype=dtype)
    q, k, v, grad = (new(2, 8, 333, 64, seed=seed) for seed in range(4))

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(333, 333, dtype=torch.bool, device=device).triu(1)
        return (q @ k.mT / 8).masked_fill(hidden, -math.inf).softmax(-1) @ v

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    found = with_gradients(fused, [q, k, v], grad)
    expected = with_gradients(formula, [t.float() for t in (q, k, v)], grad)
    return difference(found, expected), BOUNDS[dtype]


# --- the list -----------------------------------------------------------------------------------

_FP32, _BF16 = torch.float32, torch.bfloat16
CHECKS: list[tuple[str, Check]] = [
    *((f"sdpa {d}", partial(plain_attention, dtype=d)) for d in (_FP32, _BF16)),
    *(
        (
            f"block attention, {kernel} {dtype}, {mask}, {width} | {value} wide",
            partial(
                block_attention, kernel=kernel, dtype=dtype, mask=mask, width=width, value=value
            ),
        )
        for kernel, dtype, masks in (
            ("cpu", _FP32, ("none", "causal", "documents", "dead")),
            ("cpu", _BF16, ("none", "causal", "documents", "dead")),
            ("flash", _BF16, ("none", "causal")),
            ("efficient", _FP32, ("none", "causal", "documents", "dead")),
            ("efficient", _BF16, ("none", "causal", "documents", "dead")),
        )
        for mask in masks
        for width, value in ((64, 64), (128, 128), (44, 20))
    ),
    *(
        (f"grouped products of {counts} rows", partial(experts, counts=counts))
        for counts in ([64, 8, 120, 256], [0, 512, 0, 8], [0, 0, 0, 64])
    ),
    *(
        (f"rows to experts and back, {d}", partial(rows_of_experts, dtype=d))
        for d in (_FP32, _BF16)
    ),
    *(
        (
            f"cast {of} to {dtype}, blocks of {block}",
            partial(cast_kernel, block=block, dtype=dtype, of=of),
        )
        for block in ((0, 0), (1, 0), (1, 128), (128, 128))
        for dtype in (E4M3, E5M2)
        for of in (_FP32, _BF16)
    ),
    *(
        (f"product of blocks, height {h}, {d}", partial(scaled_matmul, height=h, dtype=d))
        for h in (1, 128)
        for d in (_FP32, _BF16)
    ),
    *(
        (f"linear in float8, {recipe}, {dtype}", partial(float8_linear, recipe=recipe, dtype=dtype))
        for recipe in RECIPES
        for dtype in (_FP32, _BF16)
    ),
    ("linear in float8, compiled", compiled_float8),
    # What is compiled takes longest.
    *(
        (
            f"{name} {dtype}, {'documents' if documents else 'whole rows'}, window {window}",
            partial(backend, name=name, dtype=dtype, documents=documents, window=window),
        )
        for name in ("varlen", "flex")
        for dtype in (_FP32, _BF16)
        for documents, window in ((False, None), (True, None), (True, 64))
    ),
]


def still_works(device: torch.device) -> bool:
    """Whether a device, after an error, can still be asked for anything."""
    try:
        return torch.ones(2, device=device).sum().item() == 2
    except RuntimeError:
        return False


def run(device: torch.device, *, only: str, first: int, failed: bool) -> bool:
    """The checks from `first` on with `only` in their name; False if one failed, or had before."""
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    for index, (name, check) in enumerate(CHECKS[first:], first):
        if only not in (name := name.replace("torch.", "")):
            continue
        begin = time.monotonic()
        try:
            error, bound = check(device)
            holds = error <= bound
            failed |= not holds
            seconds = time.monotonic() - begin
            line = f"{error:8.1e} of {bound:7.1e} {seconds:6.1f} s"
            print(f"{'ok' if holds else 'FAILED':6} {name:62} {line}", flush=True)
        except Skipped as reason:
            print(f"-      {name:62} {reason}", flush=True)
        except Exception as error:
            failed, text = True, f"{type(error).__name__}: {error}"
            print(f"FAILED {name:62} {text.splitlines()[0]}", flush=True)
            if not still_works(device):
                rest = ["--only", only, "--from", str(index + 1), "--failed"]
                os.execv(sys.executable, [sys.executable, __file__, *rest])
    return not failed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu"], help="another one than the accelerator")
    parser.add_argument("--only", default="", help="a part of the names of those to run")
    parser.add_argument("--from", type=int, default=0, dest="first", help="number of the first")
    parser.add_argument("--failed", action="store_true", help="one before it has failed")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device or devices.device_type())
    only, first, failed = arguments.only, arguments.first, arguments.failed
    return 0 if run(device, only=only, first=first, failed=failed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

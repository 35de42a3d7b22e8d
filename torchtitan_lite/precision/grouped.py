"""Routed experts whose products are of float8 numbers, by the recipe of the linears.

Each expert is a linear over a block of rows (ops/grouped.py), and is cast as one: its rows, its
weight and, in dw, the columns of its rows alone. What shares a scale lies within one expert.

There is no kernel: the numbers are rounded to float8 and, since bfloat16 holds each of them times
a power of two, multiplied by the kernels of high precision, summed in fp32. The host reads how long
the blocks are. Where nothing is swapped nothing of this runs.
Proven in tests/precision/test_grouped.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lite.config import Config, ConfigError
from torchtitan_lite.ops.float8 import Block
from torchtitan_lite.ops.grouped import grouped_linear, grouped_outer
from torchtitan_lite.precision.float8 import ALIGNMENT, E4M3, Recipe, cast
from torchtitan_lite.precision.linear import recipe_of

logger = logging.getLogger(__name__)
FQNS = "quantize.grouped_mm.float8.fqns"


def float8_grouped_linear(
    x: Tensor, weight: Tensor, counts: Tensor, *, kernel: str, recipe: Recipe
) -> Tensor:
    """As ops.grouped.grouped_linear, each of whose three products is of float8 numbers."""
    return _Products.apply(x, weight, counts, kernel, recipe)


class _Products(torch.autograd.Function):
    """x (rows, in), weight (experts, out, in), counts (experts,) -> (rows, out)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, kernel: str, recipe: Recipe
    ) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        ctx.kernel, ctx.recipe, ctx.sizes = kernel, recipe, counts.tolist()
        x8 = _rounded_rows(x, ctx.sizes, E4M3, recipe.block)
        w8 = torch.stack([_rounded(w, E4M3, recipe.weight_block) for w in weight])
        return grouped_linear(x8, w8, counts, kernel=kernel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, counts), recipe, sizes = ctx.saved_tensors, ctx.recipe, ctx.sizes
        g8 = _rounded_rows(grad, sizes, recipe.gradient, recipe.block)
        w8_t = torch.stack([_rounded(w.t(), E4M3, recipe.weight_block) for w in weight])
        dx = grouped_linear(g8, w8_t, counts, kernel=ctx.kernel)
        across = recipe.block[::-1]  # over the tokens
        g8 = _rounded_rows(grad, sizes, recipe.gradient, across)
        dw = grouped_outer(g8, _rounded_rows(x, sizes, E4M3, across), counts, kernel=ctx.kernel)
        return dx, dw, None, None, None


def _rounded(x: Tensor, dtype: torch.dtype, block: Block) -> Tensor:
    """What float8 holds of x (rows, columns), in the dtype of x; contiguous."""
    return cast(x, dtype, block, powers_of_two=True).high().to(x.dtype) if x.numel() else x


def _rounded_rows(x: Tensor, sizes: list[int], dtype: torch.dtype, block: Block) -> Tensor:
    """Each block of rows on its own; zeros behind the last."""
    parts = [_rounded(part, dtype, block) for part in x[: sum(sizes)].split(sizes)]
    return torch.cat([*parts, torch.zeros_like(x[sum(sizes) :])])


def apply_float8_to_experts(model: nn.Module, config: Config) -> None:
    """Swap the products of those experts of `model`, a stage or all of it, that `config` names."""
    for _, module, reason in _experts(model, config):
        if not reason:
            product = partial(float8_grouped_linear, recipe=recipe_of(config))
            module.product = product  # type: ignore[assignment]


def announce_float8_experts(model: nn.Module, config: Config) -> None:
    """Log which experts of the whole `model` are swapped.

    Raises ConfigError for a name that matches none, and where none can be swapped.
    """
    entries, found = config.quantize.grouped_mm.float8.fqns, list(_experts(model, config))
    if not entries:
        return
    names, reasons = [name for name, _, _ in found], {reason for _, _, reason in found}
    for entry in entries:
        if not any(entry in name for name in names):
            fix = f"name them as in {names[0]}" if names else "the model has none; remove it"
            raise ConfigError(f"{FQNS} = {entry}: no experts have it in their name; {fix}")
    if "" not in reasons:
        told = " and ".join(sorted(reasons))
        raise ConfigError(f"{FQNS} = {entries}: all experts are {told}; remove it")
    recipe, swapped = config.quantize.linear.float8.recipe_name, [r for *_, r in found].count("")
    logger.info(f"float8 {recipe}, emulated: experts of {swapped} of {len(found)} layers")


def _experts(model: nn.Module, config: Config) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, module, and the reason why it stays as it is ("": it does not) of all experts."""
    entries = config.quantize.grouped_mm.float8.fqns
    for name, module in model.named_modules():
        if not hasattr(module, "product"):  # that of moe.Experts
            continue
        sizes = module.gate_proj.shape[1:]
        reason = "" if any(entry in name for entry in entries) else "not named"
        if any(size % ALIGNMENT for size in sizes):
            reason = f"of sizes that {ALIGNMENT} does not divide"
        yield name, module, reason

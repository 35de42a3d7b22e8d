"""Linears whose products are of float8 numbers, in the place of others.

    y = x w^T + b     y  = f8(x) f8(w)^T      sums over features in
                      dx = f8(g) f8(w^T)^T    sums over features out
                      dw = f8(g^T) f8(x^T)^T  sums over tokens

The swap changes what a linear computes and nothing of what it is: the parameter keeps its name, its
precision and its place, so initialisation, plans, FSDP, optimizer and checkpoints see an ordinary
`weight`. It comes before the plans, which then call it with a local shard (parallel/parameters.py)
and sum what it returns, in high precision. What is gathered for it may travel as float8 (fsdp.py,
gather.py).

Backward casts anew what forward was given: a linear keeps for it what an ordinary one keeps.
The head and routers, where they are named, keep their classes and are given other products.
Proven in tests/precision/test_linear.py, test_include.py, and on a mesh in test_meshes.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config import Config, ConfigError
from torchtitan_lite.device import device_type, float8_recipes
from torchtitan_lite.ops.cross_entropy import Products
from torchtitan_lite.precision.delayed import GRADIENT, INPUT, WEIGHT, add_history, largest
from torchtitan_lite.precision.float8 import (
    ALIGNMENT,
    E4M3,
    RECIPES,
    Recipe,
    cast,
    multiply,
)

logger = logging.getLogger(__name__)


class Float8Linear(nn.Linear):
    """An nn.Linear with float8 products; apply_float8 makes one of a linear."""

    recipe: Recipe
    amax_history: Tensor | None  # where the recipe is delayed
    amax: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        past = (self.amax_history, self.amax) if self.recipe.delayed else (None, None)
        out = float8_linear(x, self.weight, recipe=self.recipe, past=past)
        return out if self.bias is None else out + self.bias


def float8_linear(
    x: Tensor,
    weight: Tensor,
    *,
    recipe: Recipe,
    past: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """As F.linear; scales are dynamic where there is no `past`, as delayed.largest takes it."""
    if x.numel() == 0:  # no token has come here, and nothing has no largest number
        return F.linear(x, weight)
    return _Product.apply(x.flatten(0, -2), weight, recipe, *past).unflatten(0, x.shape[:-1])


def head_products(weight: Tensor, *, recipe: Recipe) -> Products:
    """Those of the head, chunk by chunk of a loss (ops/cross_entropy.py); scales are dynamic."""
    low = partial(cast, powers_of_two=recipe.powers_of_two)
    multiplied = partial(multiply, dtype=weight.dtype, emulate=recipe.emulate)
    block, gradient = recipe.block, recipe.gradient
    w, w_t = (low(t, E4M3, recipe.weight_block) for t in (weight, weight.t()))
    return Products(
        out=lambda x: multiplied(low(x, E4M3, block), w),
        dx=lambda g: multiplied(low(g, gradient, block), w_t),
        dw=lambda g, x: multiplied(low(g.t(), gradient, block), low(x.t(), E4M3, block)),
    )


class _Product(torch.autograd.Function):
    """x (tokens, in), weight (out, in) -> x weight^T (tokens, out)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, *past: Tensor | None
    ) -> Tensor:
        amax_x, amax_w = largest(x, INPUT, *past), largest(weight, WEIGHT, *past)
        ctx.save_for_backward(x, weight, amax_x, amax_w)
        ctx.recipe, ctx.past = recipe, past
        low = partial(cast, powers_of_two=recipe.powers_of_two)
        rows = low(x, E4M3, recipe.block, amax=amax_x)
        w = low(weight, E4M3, recipe.weight_block, amax=amax_w)
        return multiply(rows, w, dtype=x.dtype, emulate=recipe.emulate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, amax_x, amax_w), recipe = ctx.saved_tensors, ctx.recipe
        low, block = partial(cast, powers_of_two=recipe.powers_of_two), recipe.block
        g = low(grad, recipe.gradient, block, amax=largest(grad, GRADIENT, *ctx.past))
        # Square blocks are the same either way.
        g_t = g.t if block[0] == block[1] else low(grad.t(), recipe.gradient, block)
        w_t = low(weight.t(), E4M3, recipe.weight_block, amax=amax_w)
        x_t = low(x.t(), E4M3, block, amax=amax_x)
        dx = multiply(g, w_t, dtype=x.dtype, emulate=recipe.emulate)
        dw = multiply(g_t, x_t, dtype=weight.dtype, emulate=recipe.emulate)
        return dx, dw, None, None, None


def apply_float8(model: nn.Module, config: Config) -> None:
    """Swap those linears of `model`, a stage or all of it, that `config` asks for."""
    if not config.quantize.linear.float8.recipe_name:
        return
    recipe = recipe_of(config)
    for _, module, reason in linears(model, config):
        if reason:
            continue
        other: Any = module
        if hasattr(module, "token_loss"):  # a head
            other.token_loss.extra["products"] = partial(head_products, recipe=recipe)
        elif not isinstance(module, nn.Linear):  # a router, in fp32, for which not all have kernels
            other.linear = partial(float8_linear, recipe=replace(recipe, emulate=True))
        else:
            module.__class__ = Float8Linear
            module.recipe = recipe  # type: ignore[assignment]
            if recipe.delayed:
                length = config.quantize.linear.float8.amax_history_length
                add_history(module, length, module.weight.device)


def recipe_of(config: Config) -> Recipe:
    """The recipe that `config` names, and whether it is emulated on this machine."""
    float8 = config.quantize.linear.float8
    known = float8_recipes(device_type(), config.training.mixed_precision_param)
    return replace(
        RECIPES[float8.recipe_name],
        powers_of_two=float8.round_scales_to_power_of_2,
        emulate=float8.emulate or float8.recipe_name not in known,
        delayed=float8.scaling == "delayed",
    )


def announce_float8(model: nn.Module, config: Config) -> None:
    """Log what is swapped in the whole `model`, and what is left and why.

    Raises ConfigError for a filter that matches nothing, and where nothing is left to swap.
    """
    float8 = config.quantize.linear.float8
    if not float8.recipe_name:
        return
    by_reason: dict[str, list[str]] = {}
    for name, _, reason in linears(model, config):
        by_reason.setdefault(reason, []).append(name)
    names = [name for group in by_reason.values() for name in group]
    swapped = by_reason.pop("", [])
    for entry in float8.filter_fqns:
        if not any(entry in name for name in names):
            raise ConfigError(
                f"quantize.linear.float8.filter_fqns = {entry}: no linear of the model has it in "
                f"its name, such as {names[0]}; remove it (lm_head and routers stay as they are)"
            )
    others = [name for name, m in model.named_modules() if _is_left_unless_named(name, m)]
    for entry in float8.include_fqns:
        if not any(entry in name for name in others):
            raise ConfigError(
                f"quantize.linear.float8.include_fqns = {entry}: neither a head nor a router has "
                f"it in its name, but there are {', '.join(others[:2])}; remove it (linears of the "
                "layers are swapped unless filter_fqns names them)"
            )
    if not swapped:
        raise ConfigError(
            f"quantize.linear.float8.recipe_name = {float8.recipe_name}: there is no linear to "
            f"swap, but {_listed(by_reason)}; remove it, or what filter_fqns names too much"
        )
    by = "emulated" if recipe_of(config).emulate else f"{device_type()} kernels"
    left = f"; left are {_listed(by_reason)}" if by_reason else ""
    logger.info(f"float8 {float8.recipe_name}, {by}: {len(swapped)} of {len(names)} linears{left}")


def _is_left_unless_named(name: str, module: nn.Module) -> bool:
    """Whether it is models.layers.LMHead or models.moe.Router, of which nothing is known here."""
    is_head = isinstance(module, nn.Linear) and not name.startswith("layers.")
    return is_head or hasattr(module, "linear")


def _listed(by_reason: dict[str, list[str]]) -> str:
    return ", ".join(f"{len(group)} {why} ({group[0]})" for why, group in by_reason.items())


def linears(model: nn.Module, config: Config) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, module, and the reason why it stays as it is ("": it does not) of each linear.

    Routers are among them where they are to be swapped.
    """
    float8 = config.quantize.linear.float8
    for name, module in model.named_modules():
        included = _is_left_unless_named(name, module)
        included = included and any(entry in name for entry in float8.include_fqns)
        named = [entry for entry in float8.filter_fqns if entry in name]
        if not isinstance(module, nn.Linear):
            if included and not named:
                yield name, module, ""
            continue
        reasons = {
            f"named by {named}": bool(named),
            "outside the layers": not name.startswith("layers.") and not included,
            "with a product of their own": type(module) is not nn.Linear and not included,
            f"of sizes that {ALIGNMENT} does not divide": (
                module.in_features % ALIGNMENT > 0 or module.out_features % ALIGNMENT > 0
            ),
        }
        yield name, module, next((reason for reason, holds in reasons.items() if holds), "")

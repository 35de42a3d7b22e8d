"""Linears whose products are of float8 numbers, in the place of others.

    y = x w^T + b     y  = f8(x) f8(w)^T      sums over features in
                      dx = f8(g) f8(w^T)^T    sums over features out
                      dw = f8(g^T) f8(x^T)^T  sums over tokens

The swap changes what a linear computes and nothing of what it is: the parameter keeps its name, its
precision and its place, so initialisation, plans, FSDP, optimizer and checkpoints see an ordinary
`weight`. It comes before the plans, which then call it with a local shard (parallel/parameters.py)
and sum what it returns: what travels between ranks is never float8.

Backward casts anew what forward was given: a linear keeps for it what an ordinary one keeps.
Proven in tests/precision/test_linear.py, and on a mesh in tests/precision/test_meshes.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lite.config import Config, ConfigError
from torchtitan_lite.device import device_type, float8_recipes
from torchtitan_lite.precision.float8 import (
    ALIGNMENT,
    E4M3,
    RECIPES,
    Recipe,
    cast,
    cast_both_ways,
    multiply,
)

logger = logging.getLogger(__name__)


class Float8Linear(nn.Linear):
    """An nn.Linear with float8 products; apply_float8 makes one of a linear."""

    recipe: Recipe

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:  # no token has come here, and nothing has no largest number
            return super().forward(x)
        out = _Product.apply(x.flatten(0, -2), self.weight, self.recipe)
        out = out.unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """x (tokens, in), weight (out, in) -> x weight^T (tokens, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        pow2 = recipe.powers_of_two
        return multiply(
            cast(x, E4M3, recipe.block, powers_of_two=pow2),
            cast(weight, E4M3, recipe.weight_block, powers_of_two=pow2),
            dtype=x.dtype,
            emulate=recipe.emulate,
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), recipe = ctx.saved_tensors, ctx.recipe
        pow2, emulate = recipe.powers_of_two, recipe.emulate
        g, g_t = cast_both_ways(grad, recipe.gradient, recipe.block, powers_of_two=pow2)
        w_t = cast(weight.t(), E4M3, recipe.weight_block, powers_of_two=pow2)
        x_t = cast(x.t(), E4M3, recipe.block, powers_of_two=pow2)
        dx = multiply(g, w_t, dtype=x.dtype, emulate=emulate)
        return dx, multiply(g_t, x_t, dtype=weight.dtype, emulate=emulate), None


def apply_float8(model: nn.Module, config: Config) -> None:
    """Swap those linears of `model`, a stage or all of it, that `config` asks for."""
    if not config.quantize.linear.float8.recipe_name:
        return
    recipe = recipe_of(config)
    for _, module, reason in linears(model, config):
        if not reason:
            module.__class__ = Float8Linear
            module.recipe = recipe  # type: ignore[assignment]


def recipe_of(config: Config) -> Recipe:
    """The recipe that `config` names, and whether it is emulated on this machine."""
    float8 = config.quantize.linear.float8
    known = float8_recipes(device_type(), config.training.mixed_precision_param)
    return replace(
        RECIPES[float8.recipe_name],
        powers_of_two=float8.round_scales_to_power_of_2,
        emulate=float8.emulate or float8.recipe_name not in known,
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
    if not swapped:
        raise ConfigError(
            f"quantize.linear.float8.recipe_name = {float8.recipe_name}: there is no linear to "
            f"swap, but {_listed(by_reason)}; remove it, or what filter_fqns names too much"
        )
    by = "emulated" if recipe_of(config).emulate else f"{device_type()} kernels"
    left = f"; left are {_listed(by_reason)}" if by_reason else ""
    logger.info(f"float8 {float8.recipe_name}, {by}: {len(swapped)} of {len(names)} linears{left}")


def _listed(by_reason: dict[str, list[str]]) -> str:
    return ", ".join(f"{len(group)} {why} ({group[0]})" for why, group in by_reason.items())


def linears(model: nn.Module, config: Config) -> Iterator[tuple[str, nn.Linear, str]]:
    """Name, module, and the reason why it stays as it is ("": it does not) of each linear."""
    float8 = config.quantize.linear.float8
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        named = [entry for entry in float8.filter_fqns if entry in name]
        reasons = {
            f"named by {named}": bool(named),
            "outside the layers": not name.startswith("layers."),
            "with a product of their own": type(module) is not nn.Linear,
            f"of sizes that {ALIGNMENT} does not divide": (
                module.in_features % ALIGNMENT > 0 or module.out_features % ALIGNMENT > 0
            ),
        }
        yield name, module, next((reason for reason, holds in reasons.items() if holds), "")

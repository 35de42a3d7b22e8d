"""One optimizer for all model parts of this rank, with few parameter groups.

A group is all parameters with the same weight decay and the same learning-rate multiplier: two or
three groups for a whole model. One group per parameter would give the fused and foreach kernels
lists of one and lose what they are for.

Who is in which group is said by patterns over parameter names, as of file names (`*` matches dots
too), the same on every mesh because the names are:

    no_decay = ["*norm.weight", "*.bias", "embed_tokens.weight"]
    lr_multipliers = { "embed_tokens.weight" = 3.0, "layers.0.*" = 0.5 }   # the first match wins

A pattern that matches no parameter of the model is the user's mistake and is refused with the
nearest names. Under pipeline parallelism a rank holds a part of the model only, so the question is
asked of the names of the whole model.

Proven in tests/optim/test_optimizer.py (groups, patterns, kernels) and
tests/optim/test_optimizer_on_ranks.py (sharded updates against one process).
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchtitan_lite.config import ConfigError
from torchtitan_lite.optim.low_precision import LowPrecisionAdamW

logger = logging.getLogger(__name__)

IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}


def build_optimizer(
    named_parameters: Mapping[str, nn.Parameter],
    *,
    name: str,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    momentum: float,
    implementation: str,
    state_dtype: str,
    seed: int,
    no_decay: Sequence[str],
    lr_multipliers: Mapping[str, float],
    all_names: Collection[str] | None = None,
    strict_patterns: Collection[str] | None = None,
) -> Optimizer:
    """AdamW or SGD over this rank's parameters, which may be none.

    `named_parameters` maps names to DTensors or to plain tensors. Frozen ones are left out; one
    tensor under two names counts under the first. `all_names` are the names of the whole model
    (None: this rank has it whole). `strict_patterns` are those of `no_decay` that must match a
    parameter (None: all of them; pass what the user wrote, since a default need not fit every
    model); every pattern of `lr_multipliers` must.

    Each group holds params, names, weight_decay, lr and lr_multiplier besides torch's own entries.
    AdamW's moments are of the parameters' dtype, or bfloat16 (low_precision.py, which draws from
    `seed`). Where torch has no fused kernel for these parameters (SGD on DTensors), one warning
    says so and foreach takes its place. Raises ConfigError for a pattern without a match.
    """
    check_patterns(
        named_parameters if all_names is None else all_names,
        no_decay=no_decay if strict_patterns is None else strict_patterns,
        lr_multipliers=lr_multipliers,
    )
    groups = _parameter_groups(
        named_parameters,
        lr=lr,
        weight_decay=weight_decay,
        no_decay=no_decay,
        lr_multipliers=lr_multipliers,
    )
    assert name in ("AdamW", "SGD"), f"optimizer.name {name!r}"
    if name == "AdamW" and state_dtype == "bfloat16":
        return LowPrecisionAdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, seed=seed)
    if implementation == "fused" and not _runs_fused(named_parameters.values(), name=name):
        implementation = "foreach"
    kernel = IMPLEMENTATIONS[implementation]
    if name == "AdamW":
        return torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, **kernel)
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, **kernel)


def check_patterns(
    all_names: Collection[str], *, no_decay: Collection[str], lr_multipliers: Collection[str]
) -> None:
    """Raise one ConfigError that names every pattern no name matches."""
    problems = []
    for key, patterns in (("no_decay", no_decay), ("lr_multipliers", lr_multipliers)):
        for pattern in unmatched_patterns(patterns, all_names):
            # Layers differ by their number only: offer each kind of name once, as a pattern.
            kinds = {re.sub(r"\.\d+\.", ".*.", name): None for name in all_names}
            nearest = difflib.get_close_matches(pattern, list(kinds), n=3, cutoff=0.0)
            problems.append(
                f"optimizer.{key}: the pattern {pattern!r} matches no parameter of the model; "
                f"nearest: {', '.join(nearest)}"
            )
    if problems:
        raise ConfigError("\n".join(problems))


def unmatched_patterns(patterns: Collection[str], names: Collection[str]) -> list[str]:
    """Those of `patterns` that match none of `names`, in their order."""
    return [
        pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)
    ]


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Give every group `lr`, the rate of this step, times its own multiplier."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_multiplier"]


def group_table(optimizer: Optimizer) -> str:
    """The groups as a table for the log: one line each, sizes of whole (unsharded) parameters."""
    rows = [("weight decay", "lr multiplier", "tensors", "parameters", "examples")]
    for group in optimizer.param_groups:
        names: list[str] = group["names"]
        examples = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
        num_parameters = sum(parameter.numel() for parameter in group["params"])
        rows.append(
            (
                f"{group['weight_decay']:g}",
                f"{group['lr_multiplier']:g}",
                f"{len(names):,}",
                f"{num_parameters:,}",
                examples or "(none on this rank)",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([cell.rjust(width) for cell, width in zip(row, widths, strict=False)] + [row[4]])
        for row in rows
    )


def _parameter_groups(
    named_parameters: Mapping[str, nn.Parameter],
    *,
    lr: float,
    weight_decay: float,
    no_decay: Sequence[str],
    lr_multipliers: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Groups by (weight decay, multiplier), sorted so that every rank lists them alike."""
    members: dict[tuple[float, float], dict[str, nn.Parameter]] = {}
    seen: set[int] = set()
    for name, parameter in named_parameters.items():
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        decay = 0.0 if any(fnmatchcase(name, pattern) for pattern in no_decay) else weight_decay
        matches = (
            factor for pattern, factor in lr_multipliers.items() if fnmatchcase(name, pattern)
        )
        members.setdefault((decay, next(matches, 1.0)), {})[name] = parameter
    # torch refuses an optimizer without groups, but not a group without parameters.
    members = members or {(weight_decay, 1.0): {}}
    return [
        {
            "params": list(group.values()),
            "names": list(group),
            "weight_decay": decay,
            "lr": lr * multiplier,
            "lr_multiplier": multiplier,
        }
        for (decay, multiplier), group in sorted(members.items(), key=lambda item: item[0])
    ]


def _runs_fused(parameters: Collection[nn.Parameter], *, name: str) -> bool:
    """Whether the fused kernel can be had, by trying AdamW's on zeros like each kind of parameter.

    torch has no public list of what a kernel supports and would tell at the first step only. The
    fused SGD is not used at all: on DTensors it raises, and on plain bf16 tensors of the CPU it
    loses its updates in silence (measured, torch 2.13).
    """
    problem = "it has no sharding strategy and is wrong in bf16 on CPU" if name == "SGD" else ""
    smallest: dict[tuple[torch.device, torch.dtype], nn.Parameter] = {}
    for parameter in sorted(parameters, key=torch.Tensor.numel):
        smallest.setdefault((parameter.device, parameter.dtype), parameter)
    for parameter in smallest.values() if name == "AdamW" else ():
        probe = nn.Parameter(torch.zeros_like(parameter))
        probe.grad = torch.zeros_like(parameter)
        try:
            torch.optim.AdamW([probe], lr=0.0, fused=True).step()
        except RuntimeError as error:
            problem = str(error)
    if problem:
        logger.warning(
            f"optimizer.implementation = fused: not for {name} on these parameters ({problem}); "
            "foreach takes its place"
        )
    return not problem

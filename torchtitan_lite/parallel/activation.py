"""Activation checkpointing: what a layer keeps for its backward, and what it computes again.

    none         keep everything
    full         keep a layer's input, recompute the rest
    selective n  "full" on every n-th layer
    selective op keep fused attention (there is none with dropout of its weights), the reduced
                 outputs, exchanged rows and every second matmul; recompute the rest
    memory_budget the compiler of a layer chooses, by time and bytes (compile.py); nothing here

The layer's `forward` is wrapped in place instead of the module, so no parameter changes its name.
While it is computed again its router counts no tokens: it did so the first time.
Proven in tests/parallel/test_activation.py.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan_lite.models.moe import Router

_MATMULS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_mm.default,
}
_DEAR = {  # outputs that cost much to compute again, or a collective
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}


def apply_activation_checkpointing(model: nn.Module, *, mode: str, selective_option: str) -> None:
    """Wrap the forward of the layers of `model` that `mode` chooses."""
    if mode in ("none", "memory_budget"):
        return
    every_op = mode == "selective" and selective_option == "op"
    stride = 1 if mode == "full" or every_op else int(selective_option)
    for index, layer in model.layers.items():  # type: ignore[operator, union-attr]
        # By the layer's index in the whole model, so that stages do not change the choice.
        if int(index) % stride:
            continue
        # No generator's state need travel: dropout's mask is a function of its keys, an argument.
        layer.forward = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(_contexts_of_one_forward, layer, every_op),
        )


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _contexts_of_one_forward(layer: nn.Module, every_op: bool) -> Contexts:
    """What surrounds the forward of `layer`, and what surrounds its recomputation."""
    forward, again = _selective_contexts() if every_op else (nullcontext(), nullcontext())
    return forward, _ComputedAgain(layer, again)


class _ComputedAgain(AbstractContextManager[None]):
    """`context`, in which the router of `layer` does not count.

    Not a generator, which serves once: a schedule with a split backward computes twice again.
    """

    def __init__(self, layer: nn.Module, context: AbstractContextManager[Any]) -> None:
        self.routers = [module for module in layer.modules() if isinstance(module, Router)]
        self.context = context

    def __enter__(self) -> None:
        self.counting = [router.is_counting for router in self.routers]
        for router in self.routers:
            router.is_counting = False
        self.context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        for router, was_counting in zip(self.routers, self.counting, strict=True):
            router.is_counting = was_counting
        return self.context.__exit__(*error)


def _selective_contexts() -> Contexts:
    """Forward and recomputation count their matmuls apart, each from zero."""
    seen = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _DEAR:
            return CheckpointPolicy.MUST_SAVE
        if op in _MATMULS:
            phase = "recompute" if context.is_recompute else "forward"
            seen[phase] += 1
            if seen[phase] % 2 == 0:  # not the odd ones: nothing reads what the last one gives
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)

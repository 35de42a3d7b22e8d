"""Activation checkpointing: what a layer keeps for its backward, and what it computes again.

    none         keep everything
    full         keep a layer's input, recompute the rest
    selective n  "full" on every n-th layer
    selective op keep fused attention (there is none with dropout of its weights; flex in compiled
                 layers alone), the reduced outputs, exchanged rows and every second matmul;
                 recompute the rest. Attention that comes in pieces, each as large as the whole
                 result (exchange.py), is not kept
    memory_budget the compiler of a layer chooses, by time and bytes (compile.py); nothing here

The layer's `forward` is wrapped in place instead of the module, so no parameter changes its name.
While it is computed again its router counts no tokens: it did so the first time.
Proven in tests/parallel/test_activation.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # its operator, and that of ops.float8
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchtitan_lite.ops.float8  # noqa: F401
from torchtitan_lite.models.moe import Router

_MATMULS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.torchtitan_lite.scaled_matmul.default,
}
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.higher_order.flex_attention,  # in compiled layers; else it is its own graph
}
_COLLECTIVES = {
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}


def apply_activation_checkpointing(
    model: nn.Module, *, mode: str, selective_option: str, attention_in_pieces: bool = False
) -> None:
    """Wrap the forward of the layers of `model` that `mode` chooses."""
    if mode in ("none", "memory_budget"):
        return
    every_op = mode == "selective" and selective_option == "op"
    stride = 1 if mode == "full" or every_op else int(selective_option)
    choose = partial(selective_contexts, keep_attention=not attention_in_pieces)
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
            context_fn=partial(_contexts_of_one_forward, layer, choose if every_op else _nothing),
        )


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _contexts_of_one_forward(layer: nn.Module, choose: Callable[[], Contexts]) -> Contexts:
    """What surrounds the forward of `layer`, and what surrounds its recomputation."""
    forward, again = choose()
    return forward, _ComputedAgain(layer, again)


def _nothing() -> Contexts:
    return nullcontext(), nullcontext()


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


def selective_contexts(*, keep_attention: bool = True) -> Contexts:
    """Forward and recomputation count their matmuls apart, each from zero."""
    dear = _COLLECTIVES | (_ATTENTION if keep_attention else set())
    seen = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in dear:
            return CheckpointPolicy.MUST_SAVE
        if op in _MATMULS:
            phase = "recompute" if context.is_recompute else "forward"
            seen[phase] += 1
            if seen[phase] % 2 == 0:  # not the odd ones: nothing reads what the last one gives
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)

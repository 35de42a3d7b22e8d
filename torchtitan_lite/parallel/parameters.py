"""What a module computes with, without touching what it is.

A plan often wants a module to compute with something made from its parameter: the local shard of a
DTensor, a copy in bf16. The registered parameter must stay what it is, for names, hooks, optimizer
and checkpoints. Python looks into an instance before it asks nn.Module for a parameter, so an
instance attribute of the same name hides the parameter for the time of one call:

    module.forward:   weight -> view(weight) -> the module's own forward -> weight again

Gradients flow back through the view. Several views stack, the one applied last is asked first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def read_parameters_as(module: nn.Module, view: Callable[[Tensor], Tensor | None]) -> None:
    """While `module.forward` runs, each of the module's own parameters p reads as view(p)."""
    forward = module.forward
    names = [name for name, _ in module.named_parameters(recurse=False)]

    def forward_with_views(*args: Any, **kwargs: Any) -> Any:
        instance = module.__dict__
        outer = {name: instance[name] for name in names if name in instance}
        instance.update({name: view(getattr(module, name)) for name in names})
        try:
            return forward(*args, **kwargs)
        finally:
            for name in names:
                del instance[name]
            instance.update(outer)

    module.forward = forward_with_views

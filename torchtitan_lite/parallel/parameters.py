"""What a module computes with, without touching what it is.

A plan often wants a module to compute with something made from its parameter: the local shard of a
DTensor, a copy in bf16. The registered parameter must stay what it is, for names, hooks, optimizer
and checkpoints. Python looks into an instance before it asks nn.Module for a parameter, so an
instance attribute of the same name hides the parameter for the time of one call:

    module.forward:   weight -> view(weight) -> the module's own forward -> weight again

Gradients flow back through the view. Several views stack, the one applied last is asked first.
Proven wherever a plan is: tests/parallel/.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor


def distribute(
    module: nn.Module, mesh: DeviceMesh, placement: Placement, **others: Placement
) -> None:
    """Turn the module's own parameters into DTensors, each rank cutting its own copy.

    All at `placement`, but those that `others` names.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        placements = [others.get(name, placement)]
        cut = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(cut))


def compute_on_local_shards(
    module: nn.Module, *, sees_part: bool = False, gather: bool = False
) -> None:
    """While `module.forward` runs, its parameters read as their local shards.

    The gradient is cut as the parameter is. Of one that is whole on every rank it is whole too,
    or with `sees_part` one term of a sum. `gather` makes every parameter whole first.
    """

    def local(parameter: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        if gather:
            parameter = parameter.redistribute(placements=[Replicate()])
        share = sees_part and parameter.placements[0].is_replicate()
        return parameter.to_local(grad_placements=[Partial()] if share else None)

    read_parameters_as(module, local)


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

"""Tensor and sequence parallelism: a plan over an unmodified decoder.

Weights are DTensors, so FSDP, checkpoints and the gradient norm know how they are cut. The
arithmetic runs on their local shards, so a layer costs its matmuls and these collectives, no more:

                        sequence parallel                     without
    between blocks      (batch, seq / tp, hidden)             (batch, seq, hidden) on every rank
    into a block        all-gather      | reduce-scatter      nothing     | all-reduce
    q k v gate up       weight Shard(0): heads / tp, width / tp
    o down              weight Shard(1): partial sums of the hidden states
    out of a block      reduce-scatter  | all-gather          all-reduce  | nothing
                        (forward | backward)

    embedding           weight Shard(0): a rank looks up its own words, the sum fills the rest
    head and loss       weight Shard(0): logits never leave their rank (ops/cross_entropy.py)

A norm between blocks sees only its part of the sequence, so the gradient of its weight is one
rank's share, `Partial`; FSDP, or `reduce_partial_gradients` without it, adds the shares up before
anything reads them.
Proven in tests/parity/ (numbers) and tests/parallel/test_collective_counts.py (counts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from torchtitan_lite.models.layers import LMHead
from torchtitan_lite.ops.collectives import all_gather, all_reduce, copy_to_ranks, reduce_scatter
from torchtitan_lite.parallel.parameters import read_parameters_as

SEQUENCE_DIM = 1  # of hidden states (batch, seq, hidden)


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool
) -> None:
    """Cut every parameter of `model` over the 1-D `mesh`, and place the collectives."""
    norm = Norm(sequence_parallel)
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": VocabularyEmbedding(sequence_parallel),
        "layers.*.input_layernorm": norm,
        "layers.*.self_attn": GatherInput(sequence_parallel),
        "layers.*.self_attn.q_proj": Colwise(),
        "layers.*.self_attn.k_proj": Colwise(),
        "layers.*.self_attn.v_proj": Colwise(),
        "layers.*.self_attn.o_proj": Rowwise(sequence_parallel),
        "layers.*.post_attention_layernorm": norm,
        "layers.*.mlp": GatherInput(sequence_parallel),
        "layers.*.mlp.gate_proj": Colwise(),
        "layers.*.mlp.up_proj": Colwise(),
        "layers.*.mlp.down_proj": Rowwise(sequence_parallel),
        "norm": norm,
        "lm_head": VocabularyHead(sequence_parallel, loss_parallel),
    }
    present = {name: style for name, style in plan.items() if _is_present(model, name)}
    parallelize_module(model, mesh, present)
    plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    assert not plain, f"the plan leaves {plain} as plain tensors beside DTensors"


def _is_present(model: nn.Module, name: str) -> bool:
    """Whether this stage holds the module (of a wildcard: any layer at all)."""
    return getattr(model, name.split(".")[0]) is not None and (
        "*" not in name or len(model.layers) > 0  # type: ignore[arg-type]
    )


class Colwise(ParallelStyle):
    """A linear that holds some of its output features."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Shard(0))
        _compute_on_local_shards(module)
        return module


class Rowwise(ParallelStyle):
    """A linear that holds some of its input features: its output is summed over the ranks."""

    def __init__(self, sequence_parallel: bool) -> None:
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert getattr(module, "bias", None) is None, "a bias would be added once per rank"
        _distribute(module, device_mesh, Shard(1))
        _compute_on_local_shards(module)
        leave = _exit(device_mesh, self.sequence_parallel)
        module.register_forward_hook(lambda module, args, out: leave(out))
        return module


class GatherInput(ParallelStyle):
    """Into a block: its first argument becomes the whole sequence on every rank."""

    def __init__(self, sequence_parallel: bool) -> None:
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        enter = _entrance(device_mesh, self.sequence_parallel)
        module.register_forward_pre_hook(lambda module, args: (enter(args[0]), *args[1:]))
        return module


class Norm(ParallelStyle):
    """A norm whose weight every rank holds."""

    def __init__(self, sequence_parallel: bool) -> None:
        self.grad_placement = Partial() if sequence_parallel else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())
        _compute_on_local_shards(module, self.grad_placement)
        return module


class VocabularyEmbedding(ParallelStyle):
    """An embedding that holds some of the words; the others' rows come as zeros."""

    def __init__(self, sequence_parallel: bool) -> None:
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        _distribute(module, device_mesh, Shard(0))
        rows = module.num_embeddings // device_mesh.size()
        first_row = rows * device_mesh.get_local_rank()
        leave = _exit(device_mesh, self.sequence_parallel)

        def look_up(tokens: Tensor) -> Tensor:
            row = tokens - first_row
            elsewhere = (row < 0) | (row >= rows)
            out = F.embedding(row.masked_fill(elsewhere, 0), module.weight)
            return leave(out.masked_fill(elsewhere[..., None], 0.0))

        module.forward = look_up  # type: ignore[method-assign, assignment]
        _compute_on_local_shards(module)
        return module


class VocabularyHead(ParallelStyle):
    """A head that holds some of the words, and the loss over their logits.

    Without loss parallelism the head is stored cut, gathered when used, and every rank computes
    the same whole loss.
    """

    def __init__(self, sequence_parallel: bool, loss_parallel: bool) -> None:
        self.sequence_parallel = sequence_parallel
        self.loss_parallel = loss_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, LMHead)
        _distribute(module, device_mesh, Shard(0))
        if not self.loss_parallel:
            _compute_on_local_shards(module, Replicate(), gather=True)
            if self.sequence_parallel:
                group = device_mesh.get_group()
                enter = partial(all_gather, dim=SEQUENCE_DIM, group=group, grad_is_partial=False)
                module.register_forward_pre_hook(lambda module, args: (enter(args[0]), *args[1:]))
            return module
        _compute_on_local_shards(module)
        GatherInput(self.sequence_parallel)._apply(module, device_mesh)
        rows = module.out_features // device_mesh.size()
        group = device_mesh.get_group()
        module.token_loss.extra = {
            "first_row": rows * device_mesh.get_local_rank(),
            "group": group,
        }
        gather_logits = partial(all_gather, dim=-1, group=group, grad_is_partial=False)

        def whole_logits(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            return out if len(args) > 1 and args[1] is not None else gather_logits(out)

        module.register_forward_hook(whole_logits)
        return module


def _entrance(mesh: DeviceMesh, sequence_parallel: bool) -> Callable[[Tensor], Tensor]:
    group = mesh.get_group()
    if sequence_parallel:
        return partial(all_gather, dim=SEQUENCE_DIM, group=group, grad_is_partial=True)
    return partial(copy_to_ranks, group=group)


def _exit(mesh: DeviceMesh, sequence_parallel: bool) -> Callable[[Tensor], Tensor]:
    group = mesh.get_group()
    if sequence_parallel:
        return partial(reduce_scatter, dim=SEQUENCE_DIM, group=group)
    return partial(all_reduce, group=group)


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Turn the module's own parameters into DTensors, each rank cutting its own copy."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        cut = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(cut))


def _compute_on_local_shards(
    module: nn.Module, grad_placement: Placement | None = None, *, gather: bool = False
) -> None:
    """While `module.forward` runs, its parameters read as their local shards.

    `grad_placement` says what the gradient of the local tensor is of the whole one; None: it is
    cut as the weight is. `gather` replicates the weight first.
    """
    grad_placements = None if grad_placement is None else [grad_placement]

    def local(parameter: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        if gather:
            parameter = parameter.redistribute(placements=[Replicate()])
        return parameter.to_local(grad_placements=grad_placements)

    read_parameters_as(module, local)


@torch.no_grad()
def reduce_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Add up the gradients of which each rank still holds a share; FSDP leaves none of those."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
            assert isinstance(parameter.data, DTensor)
            parameter.grad = grad.redistribute(placements=parameter.data.placements)

"""Tensor and sequence parallelism: a plan over an unmodified decoder.

Weights are DTensors, so FSDP, checkpoints and the gradient norm know how they are cut. The
arithmetic runs on their local shards, so a layer costs its matmuls and these collectives, no more:

                        sequence parallel                     without
    between blocks      (batch, seq / tp, hidden)             (batch, seq, hidden) on every rank
    into a block        all-gather      | reduce-scatter      nothing     | all-reduce
    q k v gate up       weight and bias Shard(0): heads / tp, width / tp
    o down              weight Shard(1): partial sums of the hidden states; bias after the sum
    out of a block      reduce-scatter  | all-gather          all-reduce  | nothing
                        (forward | backward)

    embedding           weight Shard(0): a rank looks up its own words, the sum fills the rest
    head and loss       weight Shard(0): logits never leave their rank (ops/cross_entropy.py)

    on every rank, with this gradient of the local copy:
    norms, positions,   Partial                               whole
    bias of o and down
    q_norm k_norm       Partial: a rank has heads / tp        Partial

    dropout's mask      of seq / tp                           of all, the same on every rank
      in attention      of heads / tp                         of heads / tp

What sees only some of the positions, or of the heads, has one rank's share of its gradient,
`Partial`; FSDP, or `reduce_partial_gradients` without it, adds the shares up before anything
reads them.
Proven in tests/parallel/test_tensor*.py and tests/parity/ (numbers), and in
tests/parallel/test_collective_counts.py (counts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
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

from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.layers import LMHead
from torchtitan_lite.ops.collectives import all_gather, all_reduce, copy_to_ranks, reduce_scatter
from torchtitan_lite.ops.dropout import Dropout
from torchtitan_lite.parallel.parameters import read_parameters_as

SEQUENCE_DIM = 1  # of hidden states (batch, seq, hidden)


def apply_tensor_parallel(
    model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool
) -> None:
    """Cut every parameter of `model` over the 1-D `mesh`, and place the collectives."""
    assert model.config.layer_type == "attention", "there is no plan for a state-space layer"
    norm, norm_of_heads = Norm(sequence_parallel), Norm(sees_part=True)
    dropout, dropout_of_heads = CutDropout(sequence_parallel), CutDropout(sees_part=True)
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": VocabularyEmbedding(sequence_parallel),
        "embed_positions": PositionEmbedding(sequence_parallel),
        "embedding_dropout": dropout,
        "layers.*.input_layernorm": norm,
        "layers.*.self_attn": GatherInput(sequence_parallel),
        "layers.*.self_attn.q_proj": Colwise(),
        "layers.*.self_attn.k_proj": Colwise(),
        "layers.*.self_attn.v_proj": Colwise(),
        "layers.*.self_attn.q_norm": norm_of_heads,
        "layers.*.self_attn.k_norm": norm_of_heads,
        "layers.*.self_attn.core_attention.dropout": dropout_of_heads,
        "layers.*.self_attn.o_proj": Rowwise(sequence_parallel),
        "layers.*.attn_dropout": dropout,
        "layers.*.post_attention_layernorm": norm,
        "layers.*.mlp": GatherInput(sequence_parallel),
        "layers.*.mlp.gate_proj": Colwise(),
        "layers.*.mlp.up_proj": Colwise(),
        "layers.*.mlp.down_proj": Rowwise(sequence_parallel),
        "layers.*.mlp_dropout": dropout,
        "norm": norm,
        "lm_head": VocabularyHead(sequence_parallel, loss_parallel),
    }
    present = {name: style for name, style in plan.items() if _is_present(model, name)}
    parallelize_module(model, mesh, present)
    plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    assert not plain, f"the plan leaves {plain} as plain tensors beside DTensors"


def _is_present(model: nn.Module, name: str) -> bool:
    """Whether this stage of this family holds the module (of a wildcard: any such)."""
    return any(fnmatchcase(path, name) for path, _ in model.named_modules())


class Colwise(ParallelStyle):
    """A linear that holds some of its output features."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Shard(0))
        _compute_on_local_shards(module)
        return module


class Rowwise(ParallelStyle):
    """A linear that holds some of its input features: its output is summed over the ranks.

    Its bias is on every rank, and is added to the sum.
    """

    def __init__(self, sequence_parallel: bool) -> None:
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        _distribute(module, device_mesh, Shard(1), bias=Replicate())
        leave = _exit(device_mesh, self.sequence_parallel)
        read_parameters_as(module, lambda parameter: None if parameter.dim() == 1 else parameter)
        product = module.forward  # sees no bias

        def sum_over_ranks(x: Tensor) -> Tensor:
            out = leave(product(x))
            return out if module.bias is None else out + module.bias

        module.forward = sum_over_ranks  # type: ignore[method-assign, assignment]
        _compute_on_local_shards(module, sees_part=self.sequence_parallel)
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
    """A norm whose parameters every rank holds.

    `sees_part`: what a rank normalises are some of the positions, or of the heads.
    """

    def __init__(self, sees_part: bool) -> None:
        self.sees_part = sees_part

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())
        _compute_on_local_shards(module, sees_part=self.sees_part)
        return module


class CutDropout(ParallelStyle):
    """A dropout; `sees_part`: of a rank's slice of dim 1, the sequence or the heads."""

    def __init__(self, sees_part: bool) -> None:
        self.sees_part = sees_part

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Dropout)
        if self.sees_part:
            module.shard = device_mesh.get_local_rank()
        return module


class PositionEmbedding(ParallelStyle):
    """An embedding that every rank holds, looked up for its part of the sequence."""

    def __init__(self, sequence_parallel: bool) -> None:
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())
        _compute_on_local_shards(module, sees_part=self.sequence_parallel)
        if self.sequence_parallel:
            size, rank = device_mesh.size(), device_mesh.get_local_rank()
            # positions (1 or batch, seq) -> (1 or batch, seq / tp)
            module.register_forward_pre_hook(
                lambda module, args: (args[0].chunk(size, SEQUENCE_DIM)[rank],)
            )
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
            _compute_on_local_shards(module, gather=True)
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


def _distribute(
    module: nn.Module, mesh: DeviceMesh, placement: Placement, **others: Placement
) -> None:
    """Turn the module's own parameters into DTensors, each rank cutting its own copy.

    All at `placement`, but those that `others` names.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        placements = [others.get(name, placement)]
        cut = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(cut))


def _compute_on_local_shards(
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


@torch.no_grad()
def reduce_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Add up the gradients of which each rank still holds a share; FSDP leaves none of those."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
            assert isinstance(parameter.data, DTensor)
            parameter.grad = grad.redistribute(placements=parameter.data.placements)

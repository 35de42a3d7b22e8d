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
    q_norm k_norm,      Partial: a rank has heads / tp        Partial
    latents (q_a kv_a)

    dropout's mask      of seq / tp                           of all, the same on every rank
      in attention      of heads / tp                         of heads / tp

What sees only some of the positions, or of the heads, has one rank's share of its gradient,
`Partial`; FSDP, or `reduce_partial_gradients` without it, adds the shares up before anything
reads them.

A mixture of experts is not cut: each token is routed on one of the ranks, so the block works on
(batch, seq / tp, hidden), which is what lies between blocks or, without sequence parallelism, is
cut out and put together again. Router and shared expert are on every rank, their gradients
Partial; what the experts are cut over is not tp (expert.py, data.py).
Proven in tests/parallel/test_tensor*.py and tests/parity/ (numbers), and in
tests/parallel/test_collective_counts.py (counts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import filter as matching
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.layers import LMHead
from torchtitan_lite.models.moe import Router
from torchtitan_lite.ops.collectives import (
    all_gather,
    all_reduce,
    copy_to_ranks,
    keep_slice,
    reduce_scatter,
)
from torchtitan_lite.ops.dropout import Dropout
from torchtitan_lite.parallel.parameters import (
    compute_on_local_shards,
    distribute,
    read_parameters_as,
)
from torchtitan_lite.precision.gather import (
    all_gather_in_float8,
    all_read_float8,
    reduce_scatter_from_float8,
    warn_of_high_gathers,
)
from torchtitan_lite.precision.linear import Float8Linear

SEQUENCE_DIM = 1  # of hidden states (batch, seq, hidden)
# The linears of a block that read what comes into it.
READERS = {"q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj"}


def apply_tensor_parallel(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
    float8_gathers: bool = False,
) -> None:
    """Cut every parameter of `model` over the 1-D `mesh`, and place the collectives.

    `float8_gathers`: with sequence parallelism, what linears in float8 alone read is gathered so.
    """
    assert model.config.layer_type == "attention", "there is no plan for a state-space layer"
    norm, of_part = Replicated(sequence_parallel), Replicated(sees_part=True)
    dropout, dropout_of_heads = CutDropout(sequence_parallel), CutDropout(sees_part=True)
    low = float8_gathers and sequence_parallel
    into_block, out_of_block = GatherInput(sequence_parallel, low), Rowwise(sequence_parallel, low)
    mlp = {True: SliceOfSequence(sequence_parallel), False: into_block}
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": VocabularyEmbedding(sequence_parallel),
        "embed_positions": PositionEmbedding(sequence_parallel),
        "embedding_dropout": dropout,
        "layers.*.input_layernorm": norm,
        "layers.*.self_attn": into_block,
        "layers.*.self_attn.q_proj": Colwise(),
        "layers.*.self_attn.k_proj": Colwise(),
        "layers.*.self_attn.v_proj": Colwise(),
        "layers.*.self_attn.q_norm": of_part,
        "layers.*.self_attn.k_norm": of_part,
        "layers.*.self_attn.q_a_proj": of_part,
        "layers.*.self_attn.q_a_layernorm": of_part,
        "layers.*.self_attn.q_b_proj": Colwise(),
        "layers.*.self_attn.kv_a_proj_with_mqa": of_part,
        "layers.*.self_attn.kv_a_layernorm": of_part,
        "layers.*.self_attn.kv_b_proj": Colwise(),
        "layers.*.self_attn.core_attention.dropout": dropout_of_heads,
        "layers.*.self_attn.o_proj": out_of_block,
        "layers.*.attn_dropout": dropout,
        "layers.*.post_attention_layernorm": norm,
        **{f"layers.{i}.mlp": mlp[model.config.has_experts(int(i))] for i in model.layers},
        "layers.*.mlp.gate_proj": Colwise(),
        "layers.*.mlp.up_proj": Colwise(),
        "layers.*.mlp.down_proj": out_of_block,
        "layers.*.mlp.gate": RouterOfSlice(),
        "layers.*.mlp.shared_expert.*_proj": of_part,
        "layers.*.mlp.shared_expert_gate": of_part,
        "layers.*.mlp_dropout": dropout,
        "norm": norm,
        "lm_head": VocabularyHead(sequence_parallel, loss_parallel),
    }
    paths = [path for path, _ in model.named_modules()]  # what this stage of this family holds
    parallelize_module(
        model, mesh, {path: style for name, style in plan.items() for path in matching(paths, name)}
    )
    high = into_block.high + out_of_block.high
    warn_of_high_gathers([name for name, module in model.named_modules() if module in high])
    left = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    plain = [name for name in left if ".mlp.experts." not in name]
    assert not plain, f"the plan leaves {plain} as plain tensors beside DTensors"


class Colwise(ParallelStyle):
    """A linear that holds some of its output features."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, device_mesh, Shard(0))
        compute_on_local_shards(module)
        return module


class Rowwise(ParallelStyle):
    """A linear that holds some of its input features: its output is summed over the ranks.

    Its bias is on every rank, and is added to the sum. `low`: for a linear in float8 the gradient
    of the sum is gathered so.
    """

    def __init__(self, sequence_parallel: bool, low: bool = False) -> None:
        self.sequence_parallel, self.low = sequence_parallel, low
        self.high: list[nn.Module] = []  # that are in high precision nonetheless

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        distribute(module, device_mesh, Shard(1), bias=Replicate())
        leave = _exit(device_mesh, self.sequence_parallel)
        if self.low and isinstance(module, Float8Linear):
            group, gradient = device_mesh.get_group(), module.recipe.gradient
            leave = partial(
                reduce_scatter_from_float8, dim=SEQUENCE_DIM, group=group, gradient=gradient
            )
        elif self.low:
            self.high.append(module)
        read_parameters_as(module, lambda parameter: None if parameter.dim() == 1 else parameter)
        product = module.forward  # sees no bias

        def sum_over_ranks(x: Tensor) -> Tensor:
            out = leave(product(x))
            return out if module.bias is None else out + module.bias

        module.forward = sum_over_ranks  # type: ignore[method-assign, assignment]
        compute_on_local_shards(module, sees_part=self.sequence_parallel)
        return module


class GatherInput(ParallelStyle):
    """Into a block: its first argument becomes the whole sequence on every rank.

    `low`: gathered in float8 where all its READERS are.
    """

    def __init__(self, sequence_parallel: bool, low: bool = False) -> None:
        self.sequence_parallel, self.low = sequence_parallel, low
        self.high: list[nn.Module] = []  # that gather in high precision nonetheless

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        enter = _entrance(device_mesh, self.sequence_parallel)
        if self.low and all_read_float8(module, READERS):
            group = device_mesh.get_group()
            enter = partial(all_gather_in_float8, dim=SEQUENCE_DIM, group=group)
        elif self.low:
            self.high.append(module)
        module.register_forward_pre_hook(lambda module, args: (enter(args[0]), *args[1:]))
        return module


class SliceOfSequence(ParallelStyle):
    """Into a block that works on each position alone: a rank's slice of the sequence.

    Without sequence parallelism, which cuts it already, the slice is cut out here and the outputs
    are put together again. A sequence may be of any length: the last slices are then short.
    """

    def __init__(self, sequence_parallel: bool) -> None:
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.sequence_parallel:
            return module
        group, compute = device_mesh.get_group(), module.forward
        size, rank = device_mesh.size(), device_mesh.get_local_rank()

        def compute_slice(x: Tensor) -> Tensor:
            seq = x.shape[SEQUENCE_DIM]
            length = -(-seq // size)
            num_own = min(max(seq - rank * length, 0), length)
            # Padded by nothing, a tensor would be copied.
            whole = F.pad(x, (0, 0, 0, length * size - seq)) if seq % size else x
            out = compute(keep_slice(whole, dim=SEQUENCE_DIM, group=group)[:, :num_own])
            if num_own < length:
                out = F.pad(out, (0, 0, 0, length - num_own))  # (batch, length, hidden)
            out = all_gather(out, dim=SEQUENCE_DIM, group=group, grad_is_partial=False)
            return out[:, :seq]

        module.forward = compute_slice
        return module


class Replicated(ParallelStyle):
    """A module whose parameters every rank holds: a norm, a projection to a latent.

    `sees_part`: what a rank computes with it are some of the positions, or what some of the heads
    make of it.
    """

    def __init__(self, sees_part: bool) -> None:
        self.sees_part = sees_part

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, device_mesh, Replicate())
        compute_on_local_shards(module, sees_part=self.sees_part)
        return module


class RouterOfSlice(ParallelStyle):
    """A router that every rank holds, and that sees a rank's slice of each sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Router)
        module.extra["sum_over_sequence"] = partial(all_reduce, group=device_mesh.get_group())
        return Replicated(sees_part=True)._apply(module, device_mesh)


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
        Replicated(sees_part=self.sequence_parallel)._apply(module, device_mesh)
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
        distribute(module, device_mesh, Shard(0))
        rows = module.num_embeddings // device_mesh.size()
        first_row = rows * device_mesh.get_local_rank()
        leave = _exit(device_mesh, self.sequence_parallel)

        def look_up(tokens: Tensor) -> Tensor:
            row = tokens - first_row
            elsewhere = (row < 0) | (row >= rows)
            out = F.embedding(row.masked_fill(elsewhere, 0), module.weight)
            return leave(out.masked_fill(elsewhere[..., None], 0.0))

        module.forward = look_up  # type: ignore[method-assign, assignment]
        compute_on_local_shards(module)
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
        distribute(module, device_mesh, Shard(0))
        if not self.loss_parallel:
            compute_on_local_shards(module, gather=True)
            if self.sequence_parallel:
                group = device_mesh.get_group()
                enter = partial(all_gather, dim=SEQUENCE_DIM, group=group, grad_is_partial=False)
                module.register_forward_pre_hook(lambda module, args: (enter(args[0]), *args[1:]))
            return module
        compute_on_local_shards(module)
        GatherInput(self.sequence_parallel)._apply(module, device_mesh)
        rows = module.out_features // device_mesh.size()
        group = device_mesh.get_group()
        module.token_loss.extra |= {
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


@torch.no_grad()
def reduce_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Add up the gradients of which each rank still holds a share; FSDP leaves none of those."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
            assert isinstance(parameter.data, DTensor)
            parameter.grad = grad.redistribute(placements=parameter.data.placements)

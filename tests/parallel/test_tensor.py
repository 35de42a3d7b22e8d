"""Each tensor-parallel style against the plain module.

Compared are the output, the gradient of the input and the gradient of each parameter, on 2 and on
4 ranks. One world runs all cases. The plan as a whole is in test_tensor_plan.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from tests.parallel.comparison import (
    BATCH,
    CONFIG,
    SEQ,
    SEQUENCE,
    TOLERANCE,
    WORLDS,
    Errors,
    gradient_errors,
    joined,
    local_slice,
    make_keys,
    make_labels,
    make_positions,
    make_tokens,
    make_twins,
    random,
    relative_error,
)
from tests.world import run_ranks
from torchtitan_lite.models.attention import Attention, Context
from torchtitan_lite.models.layers import MLP, LMHead
from torchtitan_lite.models.rope import RotaryEmbedding
from torchtitan_lite.ops.collectives import all_gather
from torchtitan_lite.ops.dropout import Dropout
from torchtitan_lite.parallel.parameters import compute_on_local_shards, distribute
from torchtitan_lite.parallel.tensor import (
    Colwise,
    CutDropout,
    GatherInput,
    PositionEmbedding,
    Replicated,
    Rowwise,
    VocabularyEmbedding,
    VocabularyHead,
    _exit,
)

Plan = ParallelStyle | dict[str, ParallelStyle]


def _compare(
    module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    x: Tensor,
    more: tuple[Any, ...] = (),
    cut_in: int | None = None,
    cut_out: int | None = None,
    partial_grad: bool = False,
) -> Errors:
    """Run plain and parallel forward and backward; return the relative errors.

    `cut_in` and `cut_out` are the dims in which a rank's input and output are slices of the whole;
    `partial_grad` says that the ranks' input gradients are the terms of a sum.
    """
    plain, ours = make_twins(module)
    parallelize_module(ours, mesh, plan)
    whole_x, local_x = x, local_slice(x, cut_in)
    if x.is_floating_point():
        whole_x, local_x = x.clone().requires_grad_(), local_x.requires_grad_()
    expected, out = plain(whole_x, *more), ours(local_x, *more)
    upstream = random(*expected.shape, seed=77)
    expected.backward(upstream)
    out.backward(local_slice(upstream, cut_out))
    errors = {"output": relative_error(joined(out, cut_out), expected.detach())}
    if x.is_floating_point():
        assert local_x.grad is not None and whole_x.grad is not None
        grad = local_x.grad
        if partial_grad:
            dist.all_reduce(grad)
        errors["input gradient"] = relative_error(joined(grad, cut_in), whole_x.grad)
    return errors | gradient_errors(ours, plain)


# --- the styles, one by one -------------------------------------------------------------------


def _hidden(width: int = CONFIG.hidden_size) -> Tensor:
    return random(BATCH, SEQ, width, seed=50)


def _linear() -> nn.Linear:
    return nn.Linear(CONFIG.hidden_size, CONFIG.intermediate_size, bias=False)


def colwise(mesh: DeviceMesh) -> Errors:
    return _compare(_linear(), Colwise(), mesh, x=_hidden(), cut_out=-1, partial_grad=True)


def colwise_with_bias(mesh: DeviceMesh) -> Errors:
    linear = nn.Linear(CONFIG.hidden_size, CONFIG.intermediate_size)
    return _compare(linear, Colwise(), mesh, x=_hidden(), cut_out=-1, partial_grad=True)


def rowwise(
    mesh: DeviceMesh, *, sp: bool, bias: bool = False, style: type[ParallelStyle] = Rowwise
) -> Errors:
    cut_out = SEQUENCE if sp else None
    linear = nn.Linear(CONFIG.hidden_size, CONFIG.intermediate_size, bias=bias)
    return _compare(linear, style(sp), mesh, x=_hidden(), cut_in=-1, cut_out=cut_out)  # type: ignore[call-arg]


def norm(
    mesh: DeviceMesh, *, sp: bool, kind: Any = nn.RMSNorm, style: type[Replicated] = Replicated
) -> Errors:
    cut = SEQUENCE if sp else None
    module = kind(CONFIG.hidden_size, eps=1e-5)
    return _compare(module, style(sp), mesh, x=_hidden(), cut_in=cut, cut_out=cut)


def embedding(mesh: DeviceMesh, *, sp: bool) -> Errors:
    module = nn.Embedding(CONFIG.padded_vocab_size, CONFIG.hidden_size)
    cut_out = SEQUENCE if sp else None
    return _compare(module, VocabularyEmbedding(sp), mesh, x=make_tokens(), cut_out=cut_out)


def positions(mesh: DeviceMesh, *, sp: bool, rows: int) -> Errors:
    module = nn.Embedding(CONFIG.max_position_embeddings, CONFIG.hidden_size)
    x, cut_out = make_positions()[-rows:], SEQUENCE if sp else None
    return _compare(module, PositionEmbedding(sp), mesh, x=x, cut_out=cut_out)


def dropout(mesh: DeviceMesh, *, sp: bool, style: type[CutDropout] = CutDropout) -> Errors:
    cut = SEQUENCE if sp else None
    return _compare(
        Dropout(0.3, ""),
        style(sp),
        mesh,
        x=_hidden(),
        more=(make_keys(),),
        cut_in=cut,
        cut_out=cut,
    )


def mlp(
    mesh: DeviceMesh,
    *,
    sp: bool,
    gated: bool = True,
    entrance: type[GatherInput] = GatherInput,
) -> Errors:
    """Without a gate it has biases."""
    cut = SEQUENCE if sp else None
    plan: dict[str, ParallelStyle] = {
        "": entrance(sp),
        "up_proj": Colwise(),
        "down_proj": Rowwise(sp),
    }
    if gated:
        plan["gate_proj"] = Colwise()
    config = dataclasses.replace(CONFIG, gated_mlp=gated, mlp_bias=not gated, hidden_act="gelu")
    return _compare(MLP(config), plan, mesh, x=_hidden(), cut_in=cut, cut_out=cut)


def attention(mesh: DeviceMesh, *, sp: bool, norm_of_heads: Replicated | None = None) -> Errors:
    """With `norm_of_heads` also a norm of each head, biases and dropout of the weights."""
    cut, more = SEQUENCE if sp else None, norm_of_heads is not None
    plan: dict[str, ParallelStyle] = {"": GatherInput(sp), "o_proj": Rowwise(sp)}
    plan |= {f"{name}_proj": Colwise() for name in "qkv"}
    if norm_of_heads is not None:
        plan |= {"q_norm": norm_of_heads, "k_norm": norm_of_heads}
        plan["core_attention.dropout"] = CutDropout(sees_part=True)
    config = dataclasses.replace(
        CONFIG,
        qk_norm=more,
        attention_bias=more,
        attention_out_bias=more,
        attention_dropout=0.25 if more else 0.0,
    )
    rotary = RotaryEmbedding(config)(torch.arange(SEQ).expand(BATCH, -1))
    cos, sin = (angle.double() for angle in rotary)
    context = Context(cos, sin, None, None, make_keys())
    return _compare(
        Attention(config, 0), plan, mesh, x=_hidden(), more=(context,), cut_in=cut, cut_out=cut
    )


def head_logits(mesh: DeviceMesh, *, sp: bool, loss_parallel: bool) -> Errors:
    """Every rank has all logits of all tokens, and the same gradient of them."""
    style, cut = VocabularyHead(sp, loss_parallel), SEQUENCE if sp else None
    return _compare(LMHead(CONFIG), style, mesh, x=_hidden(), cut_in=cut)


def head_loss(mesh: DeviceMesh, *, sp: bool, loss_parallel: bool) -> Errors:
    """The three sums; z-loss on and four chunks, so that every term counts."""
    head = LMHead(CONFIG)
    head.token_loss.num_chunks, head.token_loss.z_loss_weight = 4, 1e-2
    plain, ours = make_twins(head)
    parallelize_module(ours, mesh, VocabularyHead(sp, loss_parallel))
    cut, scale = SEQUENCE if sp else None, 1 / 7
    whole_x, local_x = _hidden().requires_grad_(), local_slice(_hidden(), cut).requires_grad_()
    expected, sums = plain(whole_x, make_labels()), ours(local_x, make_labels())
    (expected[0] * scale).backward()
    (sums[0] * scale).backward()
    assert local_x.grad is not None and whole_x.grad is not None
    found = {"output": relative_error(sums.detach(), expected.detach())}
    found["input gradient"] = relative_error(joined(local_x.grad, cut), whole_x.grad)
    return found | gradient_errors(ours, plain)


# --- twins ------------------------------------------------------------------------------------


class _ShareOfNorm(Replicated):
    """Takes the gradient from one part of the sequence for the whole one."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__(sees_part=False)


class _UnsummedEntrance(GatherInput):
    """Takes one rank's share of the input's gradient for the whole one."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        enter = partial(
            all_gather, dim=SEQUENCE, group=device_mesh.get_group(), grad_is_partial=False
        )
        module.register_forward_pre_hook(lambda module, args: (enter(args[0]), *args[1:]))
        return module


class _BiasOnEachRank(Rowwise):
    """Takes a rank's product, its bias added, for a term of the sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, device_mesh, Shard(1), bias=Replicate())
        compute_on_local_shards(module, sees_part=self.sequence_parallel)
        leave = _exit(device_mesh, self.sequence_parallel)
        module.register_forward_hook(lambda module, args, out: leave(out))
        return module


class _FirstSlice(CutDropout):
    """Takes every slice for the first."""

    def __init__(self, sees_part: bool) -> None:
        super().__init__(sees_part=False)


SUM_TWINS: dict[str, tuple[Callable[[DeviceMesh], Errors], str]] = {
    "a norm that sums nothing": (partial(norm, sp=True, style=_ShareOfNorm), "weight"),
    "a norm of heads that sums nothing": (
        partial(attention, sp=False, norm_of_heads=Replicated(sees_part=False)),
        "q_norm.weight",
    ),
    "an entrance that sums nothing": (
        partial(mlp, sp=True, entrance=_UnsummedEntrance),
        "input gradient",
    ),
}
OUTPUT_TWINS: dict[str, Callable[[DeviceMesh], Errors]] = {
    "a bias on each rank": partial(rowwise, sp=False, bias=True, style=_BiasOnEachRank),
    "a bias on each rank, with sp": partial(rowwise, sp=True, bias=True, style=_BiasOnEachRank),
    "a dropout that takes every slice for the first": partial(dropout, sp=True, style=_FirstSlice),
}

EITHER: dict[str, Callable[..., Errors]] = {
    "rowwise": rowwise,
    "rowwise with bias": partial(rowwise, bias=True),
    "norm": norm,
    "norm with bias": partial(norm, kind=nn.LayerNorm),
    "embedding": embedding,
    "positions of all rows": partial(positions, rows=1),
    "positions of each row": partial(positions, rows=BATCH),
    "dropout": dropout,
    "mlp": mlp,
    "mlp without gate": partial(mlp, gated=False),
    "attention": attention,
    "attention with norm of heads": partial(attention, norm_of_heads=Replicated(sees_part=True)),
}
CASES: dict[str, Callable[[DeviceMesh], Errors]] = {
    "colwise": colwise,
    "colwise with bias": colwise_with_bias,
    **{
        f"{name}, {'with' if sp else 'without'} sp": partial(case, sp=sp)
        for name, case in EITHER.items()
        for sp in (True, False)
    },
    **{
        f"{case.__name__}, {'with' if sp else 'without'} sp, {'cut' if lp else 'whole'} loss": (
            partial(case, sp=sp, loss_parallel=lp)
        )
        for case in (head_logits, head_loss)
        for sp in (True, False)
        for lp in (True, False)
    },
}


def _all_cases() -> dict[str, Errors]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    cases = CASES | OUTPUT_TWINS | {name: case for name, (case, _) in SUM_TWINS.items()}
    return {name: case(mesh) for name, case in cases.items()}


@cache
def _on_ranks(world_size: int) -> list[dict[str, Errors]]:
    return run_ranks(_all_cases, world_size)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_every_style_computes_what_the_plain_module_computes(case: str, world_size: int) -> None:
    # The loss takes logits to fp32, whatever the weights are: there its rounding is what is left.
    tolerance = 1e-6 if "head_loss" in case else TOLERANCE
    for errors in _on_ranks(world_size):
        wrong = {name: error for name, error in errors[case].items() if not error < tolerance}
        assert not wrong


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("twin", SUM_TWINS)
def test_a_forgotten_sum_would_be_seen(twin: str, world_size: int) -> None:
    quantity = SUM_TWINS[twin][1]
    for errors in _on_ranks(world_size):
        assert errors[twin]["output"] < TOLERANCE, "the forward cannot show it"
        assert errors[twin][quantity] > 1e-2


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("twin", OUTPUT_TWINS)
def test_a_bias_added_twice_or_a_wrong_mask_would_be_seen(twin: str, world_size: int) -> None:
    for errors in _on_ranks(world_size):
        assert errors[twin]["output"] > 1e-2

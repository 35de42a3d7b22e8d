"""A mixture of experts on every kind of mesh against one process that loops over its experts.

Loss, norm, every gradient (experts, router, shared expert, all else), tokens per expert and the
routers' losses, with both losses and the bias of balancing on. One world runs all cases of its
size. A twin breaks what a case proves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard

from tests.fake_world import fake_rank
from tests.parallel.comparison import Errors
from tests.parallel.experts import (
    MIXTURE,
    TOLERANCE,
    compare,
    make_tokens,
    plan,
    with_experts,
)
from tests.world import run_ranks
from torchtitan_lite.mesh import Degrees
from torchtitan_lite.models import attention, moe
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.moe import Experts
from torchtitan_lite.parallel import activation, data, tensor

NO_SP = {"parallelism.enable_sequence_parallel": False}
FULL = {"activation_checkpoint.mode": "full"}
PER_OP = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
STAGE_1, STAGE_2 = {"parallelism.zero_stage": 1}, {"parallelism.zero_stage": 2}
LATENT = with_experts(
    kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=4, v_head_dim=5, num_key_value_heads=1
)
# Softmax, groups of experts, neither bias nor shared expert.
GROUPED = with_experts(
    router_scores="softmax",
    router_bias=False,
    shared_expert_intermediate_size=0,
    shared_expert_gate=False,
    n_group=4,
    topk_group=2,
)
FEW = with_experts(num_experts=4)
ONE = with_experts(num_experts=1, num_experts_per_tok=1)
ALONE = with_experts(num_experts_per_tok=1)
# Widths that tensor parallelism does not cut may be odd.
NO_DENSE = with_experts(first_k_dense_replace=0, intermediate_size=41)

Case = Callable[[], Errors]
WORLD_2: dict[str, Case] = {
    "dp2 ep1": partial(compare, Degrees(dp_shard=2)),
    "ep2": partial(compare, Degrees(dp_shard=2, ep=2)),
    "ep2, groups": partial(compare, Degrees(dp_shard=2, ep=2), model=GROUPED),
    "ep2, rank 1 without tokens": partial(compare, Degrees(dp_shard=2, ep=2), num_chosen=4),
    "ep2, every token to every expert": partial(
        compare, Degrees(dp_shard=2, ep=2), model=with_experts(num_experts_per_tok=8)
    ),
    "ep2, every token to one expert": partial(
        compare, Degrees(dp_shard=2, ep=2), model=ALONE, num_chosen=1, seq=7
    ),
    "ep2 of 2 experts": partial(
        compare, Degrees(dp_shard=2, ep=2), model=with_experts(num_experts=2), num_chosen=2
    ),
    "one expert": partial(compare, Degrees(dp_shard=2), model=ONE, num_chosen=1),
    "tp2 ep2, no dense layer": partial(compare, Degrees(tp=2, ep=2), model=NO_DENSE),
    "ep2, recomputed": partial(compare, Degrees(dp_shard=2, ep=2), options=FULL),
    "ep2, recomputed per op": partial(compare, Degrees(dp_shard=2, ep=2), options=PER_OP),
    "ep2, 4 micro-batches": partial(
        compare, Degrees(dp_shard=2, ep=2), options=STAGE_1, num_micro_batches=4
    ),
    "tp2 ep1": partial(compare, Degrees(tp=2)),
    "tp2 ep1, replicated": partial(compare, Degrees(tp=2, sharded=False)),
    "tp2 ep1, 4 micro-batches": partial(
        compare, Degrees(tp=2), options=STAGE_1, num_micro_batches=4
    ),
    "tp2 ep1 without sp": partial(compare, Degrees(tp=2), options=NO_SP),
    "tp2 ep2": partial(compare, Degrees(tp=2, ep=2)),
    "tp2 ep2 without sp, 5 tokens": partial(compare, Degrees(tp=2, ep=2), options=NO_SP, seq=5),
    "tp2 ep2 without sp, 1 token": partial(compare, Degrees(tp=2, ep=2), options=NO_SP, seq=1),
}
WORLD_4: dict[str, Case] = {
    "dp4 ep2": partial(compare, Degrees(dp_shard=4, ep=2)),
    "dp4 ep2, stage 2": partial(
        compare, Degrees(dp_shard=4, ep=2), options=STAGE_2, num_micro_batches=2
    ),
    "dp4 ep2, replicated": partial(
        compare, Degrees(dp_shard=4, ep=2, sharded=False), num_micro_batches=2
    ),
    "ep4": partial(compare, Degrees(dp_shard=4, ep=4), model=with_experts(num_hidden_layers=3)),
    "ep4, all tokens to one rank": partial(
        compare, Degrees(dp_shard=4, ep=4), num_chosen=2, options=FULL
    ),
    "dp2 tp2 ep1": partial(compare, Degrees(dp_shard=2, tp=2)),
    "dp2 tp2 ep2": partial(compare, Degrees(dp_shard=2, tp=2, ep=2), options=PER_OP),
    "dp2 tp2 ep4": partial(compare, Degrees(dp_shard=2, tp=2, ep=4)),
    "dp2 tp2 ep4 without sp": partial(compare, Degrees(dp_shard=2, tp=2, ep=4), options=NO_SP),
    "dp2 tp2 ep4, latent": partial(
        compare, Degrees(dp_shard=2, tp=2, ep=4), model=LATENT, options=FULL
    ),
    "replicas of ep1": partial(compare, Degrees(dp_replicate=2, dp_shard=2)),
    "replicas of ep2": partial(compare, Degrees(dp_replicate=2, dp_shard=2, ep=2)),
    "replicas of tp2 ep2": partial(compare, Degrees(dp_replicate=2, tp=2, ep=2)),
    "tp4 ep4 without sp, 3 tokens": partial(
        compare, Degrees(tp=4, ep=4), options={**NO_SP, **FULL}, seq=3
    ),
}
WORLD_8: dict[str, Case] = {
    "replicas of dp2 tp2 ep2": partial(compare, Degrees(dp_replicate=2, dp_shard=2, tp=2, ep=2)),
    "ep8": partial(compare, Degrees(dp_shard=8, ep=8)),
    "ep8, one token a rank": partial(compare, Degrees(dp_shard=8, ep=8), seq=1),
    "dp8 ep4 of 4 experts": partial(compare, Degrees(dp_shard=8, ep=4), model=FEW),
    "dp8 ep1 of 4 experts": partial(compare, Degrees(dp_shard=8), model=FEW),
}
WORLDS = {2: WORLD_2, 4: WORLD_4, 8: WORLD_8}


def _run_cases(cases: dict[str, Case]) -> dict[str, Errors]:
    return {name: case() for name, case in cases.items()}


@cache
def _on_ranks(world_size: int) -> list[dict[str, Errors]]:
    return run_ranks(_run_cases, world_size, WORLDS[world_size])


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        pytest.param(size, case, marks=pytest.mark.slow if size == 8 else ())
        for size, cases in WORLDS.items()
        for case in cases
    ],
)
def test_any_mesh_computes_what_one_process_computes(world_size: int, case: str) -> None:
    for errors in _on_ranks(world_size):
        wrong = {name: error for name, error in errors[case].items() if not error < TOLERANCE}
        assert not wrong
        kinds = ("experts.gate_proj", "mlp.gate.weight", "counts", "losses", "norm")
        assert all(any(kind in name for name in errors[case]) for kind in kinds)


# --- twins ------------------------------------------------------------------------------------


def _averaged(model: nn.Module, *args: Any, **options: Any) -> None:
    data.apply_data_parallel(model, *args, **options)  # type: ignore[arg-type]
    for module in model.modules():
        if isinstance(module, Experts) and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(None)  # type: ignore[arg-type]


class _WholeGradient(tensor.Replicated):
    """Takes what a slice of the sequence gives for the whole gradient."""

    def __init__(self, sees_part: bool) -> None:
        super().__init__(sees_part=False)


class _CountsItsSlice(ParallelStyle):
    """A router that knows the load of its slice of a sequence alone."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return tensor.Replicated(sees_part=True)._apply(module, device_mesh)


def _counting_again(layer: nn.Module, context: Any) -> Any:
    return context


DP2, TP2 = Degrees(dp_shard=2), Degrees(tp=2)
GATE, SHARED = "layers.1.mlp.gate.weight", "layers.1.mlp.shared_expert.up_proj.weight"
UP = "layers.1.mlp.experts.up_proj"
# What is replaced, by what; the mesh and the options; what the twin leaves wrong.
TWINS: dict[str, tuple[Any, str, Any, Degrees, dict[str, Any], str]] = {
    "experts averaged": (data, "apply_data_parallel", _averaged, DP2, {}, UP),
    "router unreduced": (tensor, "Replicated", _WholeGradient, TP2, {}, GATE),
    "shared expert unreduced": (tensor, "Replicated", _WholeGradient, TP2, {}, SHARED),
    "load of a slice": (tensor, "RouterOfSlice", _CountsItsSlice, TP2, {}, GATE),
    "counted again": (activation, "_ComputedAgain", _counting_again, DP2, FULL, "counts 0"),
}


def _run_twins() -> dict[str, Errors]:
    from torchtitan_lite.parallel import apply

    found = {}
    for name, (room, replaced, twin, degrees, options, _) in TWINS.items():
        room = apply if room is data else room  # where it is called
        with mock.patch.object(room, replaced, twin):
            found[name] = compare(degrees, options=options)
    return found


@cache
def _twins_on_ranks() -> list[dict[str, Errors]]:
    return run_ranks(_run_twins, 2)


@pytest.mark.parametrize("twin", TWINS)
def test_a_share_taken_for_a_sum_would_be_seen(twin: str) -> None:
    for errors in _twins_on_ranks():
        assert errors[twin]["output"] < TOLERANCE, "the forward cannot show it"
        assert errors[twin][TWINS[twin][-1]] > 1e-2


def test_averaged_experts_are_off_by_the_number_of_ranks() -> None:
    assert _twins_on_ranks()[0]["experts averaged"][UP] == pytest.approx(0.5, rel=1e-6)
    assert _twins_on_ranks()[0]["counted again"]["counts 0"] == pytest.approx(1.0)


# --- who holds what ---------------------------------------------------------------------------

S0, S1, R = Shard(0), Shard(1), Replicate()
# Of gate_proj (experts, 16, 24): degrees, experts -> placements of its mesh, shape of a shard.
PLACEMENTS: list[tuple[Degrees, int, tuple[Placement, ...], tuple[int, ...]]] = [
    (Degrees(dp_shard=8), 8, (S0,), (1, 16, 24)),
    (Degrees(dp_shard=8, ep=8), 8, (S0,), (1, 16, 24)),
    (Degrees(dp_shard=8, ep=2), 8, (_StridedShard(0, split_factor=2), S0), (1, 16, 24)),
    (Degrees(dp_shard=4, tp=2, ep=4), 8, (_StridedShard(0, split_factor=4), S0), (1, 16, 24)),
    # More shards than experts, or not as many to each: within each expert.
    (Degrees(dp_shard=8, ep=4), 4, (S1, S0), (1, 8, 24)),
    (Degrees(dp_shard=8), 4, (S1,), (4, 2, 24)),
    (Degrees(dp_shard=8, ep=2), 6, (S1, S0), (3, 4, 24)),
    (Degrees(dp_replicate=2, dp_shard=4, ep=2), 8, (R, _StridedShard(0, split_factor=2), S0),
     (2, 16, 24)),
    (Degrees(dp_replicate=2, dp_shard=4, ep=4), 8, (R, _StridedShard(0, split_factor=4), S0),
     (2, 16, 24)),
    (Degrees(dp_shard=8, ep=2, sharded=False), 8, (R, _StridedShard(0, split_factor=2), S0),
     (4, 16, 24)),
]  # fmt: skip


@pytest.mark.parametrize(("degrees", "num_experts", "placements", "shape"), PLACEMENTS)
def test_experts_are_cut_evenly_over_the_ranks_that_are_left(
    degrees: Degrees,
    num_experts: int,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
) -> None:
    with fake_rank(5, 8):
        with torch.device("meta"):
            model = Decoder(with_experts(num_experts=num_experts))
        names = [name for name, _ in model.named_parameters()]
        plan(model, degrees, {})
        assert [name for name, _ in model.named_parameters()] == names
        parameters = dict(model.named_parameters())
        assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
        weight = parameters["layers.1.mlp.experts.gate_proj"]
        assert isinstance(weight, DTensor)
        assert weight.shape == (num_experts, 16, 24)
        assert weight.placements == placements
        assert weight.to_local().shape == shape


def test_what_no_cut_divides_is_cut_unevenly_between_experts() -> None:
    with fake_rank(5, 8):
        with torch.device("meta"):
            model = Decoder(with_experts(num_experts=4, moe_intermediate_size=18))
        plan(model, Degrees(dp_shard=8), {})
        experts = dict(model.named_parameters())
        for name, placement in (("gate", S0), ("down", S1)):  # 18 rows, and 24
            weight = experts[f"layers.1.mlp.experts.{name}_proj"]
            assert isinstance(weight, DTensor) and weight.placements == (placement,)


# --- in which precision -----------------------------------------------------------------------


def _precisions(degrees: Degrees) -> dict[str, set[torch.dtype]]:
    """What experts and attention multiply with, and what their gradients are."""
    model = Decoder(MIXTURE)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    precision = {"mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32"}
    plan(model, degrees, {f"training.{key}": name for key, name in precision.items()})
    found: dict[str, set[torch.dtype]] = {"experts": set(), "attention": set()}
    multiply, attend = moe.grouped_linear, attention.attend

    def product(x: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        found["experts"] |= {x.dtype, weight.dtype}
        return multiply(x, weight, *args, **options)

    def attend_and_note(q: Tensor, *args: Any, **options: Any) -> Tensor:
        found["attention"].add(q.dtype)
        return attend(q, *args, **options)

    tokens = make_tokens()
    for module in model.modules():
        if isinstance(module, Experts):
            module.product = product
    with mock.patch.object(attention, "attend", attend_and_note):
        model(tokens, labels=tokens)[0].backward()
    found["gradients"] = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    found["stored"] = {parameter.dtype for parameter in model.parameters()}
    return found


@pytest.mark.parametrize(
    "degrees",
    [DP2, Degrees(dp_shard=2, ep=2), TP2, Degrees(tp=2, ep=2)],
    ids=["both sharded", "experts whole", "all else whole", "both whole"],
)
def test_mixed_precision_acts_whichever_of_the_two_is_sharded(degrees: Degrees) -> None:
    half, single = {torch.bfloat16}, {torch.float32}
    for found in run_ranks(_precisions, 2, degrees):
        assert found["experts"] == found["attention"] == half
        assert found["gradients"] == found["stored"] == single


def _infer() -> list[tuple[int, ...]]:
    model = Decoder(MIXTURE)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    precision = {f"training.mixed_precision_{part}": "float32" for part in ("param", "reduce")}
    plan(model, Degrees(tp=2, ep=2), {**NO_SP, **precision})
    with torch.inference_mode():
        outs = [model(make_tokens(seq)) for seq in (5, 1)]
    dist.barrier()
    return [tuple(out.shape) for out in outs]


def test_a_prompt_and_then_single_tokens_pass_without_gradients() -> None:
    assert run_ranks(_infer, 2) == [[(8, 5, 61), (8, 1, 61)]] * 2

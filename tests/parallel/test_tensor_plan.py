"""The whole tensor-parallel plan against the plain decoder, for the parts that families combine.

`EVERYTHING` has at once what only some families have: LayerNorm, biases, no gate, learned
positions, three dropouts; `HEADS` has what those exclude, and a tied head; `LATENT` has both
latents. Compared are the three sums of the loss, the gradient of every parameter and the logits
without dropout, on 2 and on 4 ranks, with FSDP and recomputation on top on 2 x 2. A twin weakens
one entry of the plan. Mixtures of experts are in test_expert.py.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from tests.fake_world import fake_rank
from tests.parallel.comparison import (
    CONFIG,
    WORLDS,
    Errors,
    gradient_errors,
    make_keys,
    make_labels,
    make_positions,
    make_tokens,
    make_twins,
    relative_error,
)
from tests.world import run_ranks
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.parallel import tensor
from torchtitan_lite.parallel.activation import apply_activation_checkpointing
from torchtitan_lite.parallel.data import apply_data_parallel
from torchtitan_lite.parallel.tensor import (
    CutDropout,
    apply_tensor_parallel,
    reduce_partial_gradients,
)

TOLERANCE = 1e-6  # in fp64; the loss takes its logits to fp32, whose rounding is what is left
DROPOUTS = {"attention_dropout": 0.25, "residual_dropout": 0.2, "embedding_dropout": 0.15}
EVERYTHING = dataclasses.replace(
    CONFIG,
    norm_type="layer",
    attention_bias=True,
    attention_out_bias=True,
    learned_positions=True,
    hidden_act="gelu_tanh",
    gated_mlp=False,
    mlp_bias=True,
    **DROPOUTS,  # type: ignore[arg-type]
)
HEADS = dataclasses.replace(
    CONFIG,
    tie_word_embeddings=True,
    qk_norm=True,
    sliding_window=3,
    no_rope_layer_interval=2,
    **DROPOUTS,  # type: ignore[arg-type]
)
LATENT = dataclasses.replace(
    CONFIG,
    kv_lora_rank=12,
    q_lora_rank=10,
    qk_nope_head_dim=4,
    v_head_dim=5,
    rope_interleave=True,
    attention_bias=True,
    attention_out_bias=True,
    **DROPOUTS,  # type: ignore[arg-type]
)
FAMILIES = {"plain": CONFIG, "everything": EVERYTHING, "heads": HEADS, "latent": LATENT}

Edit = dict[str, Callable[[ParallelStyle], ParallelStyle]]  # of some entries of the plan


def _apply_edited_plan(model: Decoder, mesh: DeviceMesh, *, sp: bool, lp: bool, edit: Edit) -> None:
    """apply_tensor_parallel, its plan edited."""

    def parallelize(model: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
        for name, change in edit.items():
            found = fnmatch.filter(plan, name)
            assert found, name
            plan |= {path: change(plan[path]) for path in found}
        parallelize_module(model, mesh, plan)

    names = [name for name, _ in model.named_parameters()]
    with mock.patch.object(tensor, "parallelize_module", parallelize):
        apply_tensor_parallel(model, mesh, sequence_parallel=sp, loss_parallel=lp)
    model.tie_weights()
    assert [name for name, _ in model.named_parameters()] == names


def decoder(
    mesh: DeviceMesh,
    *,
    family: str,
    sp: bool,
    lp: bool = True,
    documents: bool = False,
    edit: Edit | None = None,
) -> Errors:
    """The plan alone: what FSDP would reduce is reduced by reduce_partial_gradients."""
    plain, ours = make_twins(Decoder(FAMILIES[family]))
    positions = make_positions() if documents else None
    plain.document_mask = ours.document_mask = documents
    _apply_edited_plan(ours, mesh, sp=sp, lp=lp, edit=edit or {})
    batch = {"positions": positions, "labels": make_labels(), "keys": make_keys()}
    expected, sums = plain(make_tokens(), **batch), ours(make_tokens(), **batch)
    expected[0].backward()
    sums[0].backward()
    reduce_partial_gradients(ours.parameters())
    for parameter in ours.parameters():
        assert isinstance(parameter.grad, DTensor) and isinstance(parameter.data, DTensor)
        assert parameter.grad.placements == parameter.data.placements
    logits, expected_logits = ours(make_tokens(), positions), plain(make_tokens(), positions)
    return {
        "output": relative_error(sums.detach(), expected.detach()),
        "logits": relative_error(logits.detach(), expected_logits.detach()),
        **gradient_errors(ours, plain),
    }


def sharded_decoder(mesh: DeviceMesh, *, family: str, sp: bool, mode: str) -> Errors:
    """With recomputation and FSDP, on a mesh (dp, tp): half of the rows on each data rank."""
    plain, ours = make_twins(Decoder(FAMILIES[family]))
    _apply_edited_plan(ours, mesh["tp"], sp=sp, lp=True, edit={})
    apply_activation_checkpointing(ours, mode=mode, selective_option="op")
    apply_data_parallel(
        ours,
        mesh["dp"],
        expert_mesh=mesh["dp"],
        zero_stage=3,
        param_dtype=torch.float64,
        reduce_dtype=torch.float64,
    )

    def rows(x: Tensor) -> Tensor:
        return x.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]

    batch = {"positions": make_positions(), "labels": make_labels(), "keys": make_keys()}
    expected = plain(make_tokens(), **batch)
    sums = ours(rows(make_tokens()), **{name: rows(x) for name, x in batch.items()})
    expected[0].backward()
    sums[0].backward()
    total = sums.detach()
    dist.all_reduce(total, group=mesh["dp"].get_group())
    return {"output": relative_error(total, expected.detach()), **gradient_errors(ours, plain)}


# --- twins ------------------------------------------------------------------------------------


class _Unreduced(ParallelStyle):
    """The style, but that it takes a share of a gradient for the whole one."""

    def __init__(self, style: ParallelStyle) -> None:
        self.style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        compute = tensor.compute_on_local_shards
        with mock.patch.object(
            tensor, "compute_on_local_shards", lambda module, **_: compute(module)
        ):
            return self.style._apply(module, device_mesh)


def _of_first_slice(style: ParallelStyle) -> ParallelStyle:
    return CutDropout(sees_part=False)


UNREDUCED = [  # family, with sp, module
    ("heads", False, "layers.*.self_attn.q_norm"),
    ("heads", True, "layers.*.self_attn.q_norm"),
    ("heads", False, "layers.*.self_attn.k_norm"),
    ("latent", False, "layers.*.self_attn.q_a_proj"),
    ("latent", True, "layers.*.self_attn.q_a_layernorm"),
    ("latent", False, "layers.*.self_attn.kv_a_proj_with_mqa"),
    ("latent", True, "layers.*.self_attn.kv_a_proj_with_mqa"),
    ("latent", False, "layers.*.self_attn.kv_a_layernorm"),
    ("everything", True, "embed_positions"),
    ("everything", True, "layers.*.self_attn.o_proj"),
    ("everything", True, "layers.*.mlp.down_proj"),
    ("everything", True, "layers.*.input_layernorm"),
]
OF_FIRST_SLICE = [
    ("everything", False, "layers.*.self_attn.core_attention.dropout"),
    ("everything", True, "layers.*.self_attn.core_attention.dropout"),
    ("latent", False, "layers.*.self_attn.core_attention.dropout"),
    ("everything", True, "layers.*.attn_dropout"),
    ("everything", True, "layers.*.mlp_dropout"),
    ("everything", True, "embedding_dropout"),
]

Case = Callable[[DeviceMesh], Errors]
CASES: dict[Any, Case] = {
    f"{family}, {'with' if sp else 'without'} sp, {'cut' if lp else 'whole'} loss": (
        partial(decoder, family=family, sp=sp, lp=lp, documents=not lp)
    )
    for family in FAMILIES
    for sp in (True, False)
    for lp in (True, False)
}
TWINS: dict[Any, Case] = {
    (family, sp, name): partial(decoder, family=family, sp=sp, edit={name: twin})
    for twin, cases in ((_Unreduced, UNREDUCED), (_of_first_slice, OF_FIRST_SLICE))
    for family, sp, name in cases
}
SHARDED: dict[Any, Case] = {
    f"{family}, {'with' if sp else 'without'} sp, {mode}": (
        partial(sharded_decoder, family=family, sp=sp, mode=mode)
    )
    for family, sp, mode in (
        ("everything", True, "full"),
        ("everything", False, "selective"),
        ("heads", True, "selective"),
        ("heads", False, "full"),
        ("latent", True, "full"),
        ("latent", False, "selective"),
    )
}


def _run_cases(cases: dict[Any, Case], shape: tuple[int, ...]) -> dict[Any, Errors]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
    return {name: case(mesh) for name, case in cases.items()}


@cache
def _on_ranks(world_size: int) -> list[dict[Any, Errors]]:
    return run_ranks(_run_cases, world_size, CASES, (world_size,))


@cache
def _twins_on_ranks() -> list[dict[Any, Errors]]:
    return run_ranks(_run_cases, 2, TWINS, (2,))


@cache
def _on_data_ranks() -> list[dict[Any, Errors]]:
    return run_ranks(_run_cases, 4, SHARDED, (2, 2))


def _assert_equal(errors: Errors) -> None:
    wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
    assert not wrong


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_the_plan_computes_what_the_plain_decoder_computes(case: str, world_size: int) -> None:
    for errors in _on_ranks(world_size):
        _assert_equal(errors[case])


@pytest.mark.parametrize("case", SHARDED)
def test_it_does_under_fsdp_and_with_layers_computed_again(case: str) -> None:
    """What a layer is told, a named tuple, must pass both; the second forward drops the same."""
    for errors in _on_data_ranks():
        _assert_equal(errors[case])


@pytest.mark.parametrize(("family", "sp", "name"), UNREDUCED)
def test_a_gradient_left_a_share_would_be_seen(family: str, sp: bool, name: str) -> None:
    parameter = "bias" if "proj" in name else "weight"
    for errors in _twins_on_ranks():
        found = errors[family, sp, name]
        assert found["output"] < TOLERANCE, "the forward cannot show it"
        assert found[f"{name.replace('*', '1')}.{parameter}"] > 1e-2


@pytest.mark.parametrize(("family", "sp", "name"), OF_FIRST_SLICE)
def test_a_slice_with_the_mask_of_the_first_would_be_seen(family: str, sp: bool, name: str) -> None:
    for errors in _twins_on_ranks():
        found = errors[family, sp, name]
        assert found["output"] > 1e-4 and max(found.values()) > 1e-2


# --- the plan, without running it -------------------------------------------------------------

CUT_COLUMNS = ("o_proj", "down_proj")
CUT_ROWS = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
CUT_FROM_LATENTS = ("q_b_proj", "kv_b_proj")
LATENTS = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
PLACEMENTS = {  # of a module's parameters; a bias of CUT_COLUMNS is on every rank
    **dict.fromkeys((*CUT_ROWS, *CUT_FROM_LATENTS), Shard(0)),
    **dict.fromkeys(CUT_COLUMNS, Shard(1)),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), Replicate()),
    **dict.fromkeys(("q_norm", "k_norm", "embed_positions", *LATENTS), Replicate()),
}
STAGES = (
    ["embed_tokens", "layers.0"],
    ["layers.1"],
    ["layers.1", "norm", "lm_head"],
    ["norm", "lm_head"],
)


def _plan(
    family: str = "plain", modules: list[str] | None = None, sequence_parallel: bool = True
) -> Decoder:
    """A decoder on the meta device, or a stage of it, planned for rank 1 of 4."""
    with torch.device("meta"):
        part = Decoder(FAMILIES[family], modules)
    with fake_rank(1, 4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        apply_tensor_parallel(part, mesh, sequence_parallel=sequence_parallel, loss_parallel=True)
    return part


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("modules", [None, *STAGES], ids=lambda m: "+".join(m or ["whole"]))
def test_the_plan_cuts_every_parameter_of_any_stage_and_renames_none(
    modules: list[str] | None, family: str, sequence_parallel: bool
) -> None:
    with torch.device("meta"):
        plain = Decoder(FAMILIES[family], modules)
    part = _plan(family, modules, sequence_parallel)
    part.tie_weights()
    planned = dict(part.named_parameters())
    assert list(planned) == [name for name, _ in plain.named_parameters()]
    for name, parameter in plain.named_parameters():
        module, kind = name.split(".")[-2:]
        ours, placement = planned[name], PLACEMENTS[module]
        if module in CUT_COLUMNS and kind == "bias":
            placement = Replicate()
        assert isinstance(ours, DTensor), name
        assert ours.placements == (placement,), name
        assert ours.shape == parameter.shape, name
        cut = 1 if placement.is_replicate() else 4
        assert ours.to_local().numel() * cut == parameter.numel(), name


def test_a_plan_that_names_what_a_family_lacks_is_silent(recwarn: pytest.WarningsRecorder) -> None:
    """torch warns of an entry without a module; only entries with one are handed to it."""
    for family in FAMILIES:
        _plan(family)
    assert not [w for w in recwarn if "could not be resolved" in str(w.message)]


def test_there_is_no_plan_for_a_state_space_layer() -> None:
    """The configuration refuses it before; here it is a mistake of ours."""
    model = mock.Mock(config=dataclasses.replace(CONFIG, layer_type="state_space"))
    with pytest.raises(AssertionError, match="no plan for a state-space layer"):
        apply_tensor_parallel(model, mock.Mock(), sequence_parallel=True, loss_parallel=True)


@pytest.mark.parametrize("forgotten", ["norm", "layers.*.input_layernorm"])
def test_a_plan_that_forgets_a_norm_is_refused_with_its_name(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parallelize(model: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
        left = {path: s for path, s in plan.items() if not fnmatch.fnmatchcase(path, forgotten)}
        parallelize_module(model, mesh, left)

    monkeypatch.setattr(tensor, "parallelize_module", parallelize)
    left = forgotten.replace("*", "0") + ".weight"
    with pytest.raises(AssertionError, match=f"leaves .*'{left}'.* as plain tensors"):
        _plan()

"""Each tensor-parallel style against the plain module, and the plan against the plain decoder.

Compared are the output, the gradient of the input and the gradient of each weight, on 2 and on 4
ranks, in fp64, where only a wrong formula is off by more than 1e-12. One world runs all cases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from tests.fake_world import fake_rank
from tests.world import run_ranks
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.layers import MLP, Attention, LMHead, RotaryEmbedding
from torchtitan_lite.ops.collectives import all_gather, gather
from torchtitan_lite.parallel import tensor
from torchtitan_lite.parallel.tensor import (
    Colwise,
    GatherInput,
    Norm,
    Rowwise,
    VocabularyEmbedding,
    VocabularyHead,
    apply_tensor_parallel,
)

CONFIG = ModelConfig(
    vocab_size=61,  # padded to 128: of four shards two are padding
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=6,
    max_position_embeddings=24,
)
BATCH, SEQ = 3, 8
WORLDS = (2, 4)
SEQUENCE = 1  # the dim of hidden states that sequence parallelism cuts
TOLERANCE = 1e-12

Errors = dict[str, float]
Plan = ParallelStyle | dict[str, ParallelStyle]


def _random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _tokens() -> Tensor:
    return torch.randint(
        CONFIG.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(3)
    )


def _labels() -> Tensor:
    labels = _tokens().roll(-1, 1)
    labels[0, 2:] = -100
    return labels


def _twins(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Two equal modules in fp64, their weights drawn by name."""
    module = module.to(torch.float64)
    with torch.no_grad():
        for seed, (_, parameter) in enumerate(sorted(module.named_parameters())):
            # Small enough that no softmax saturates.
            parameter.copy_(0.2 * _random(*parameter.shape, seed=seed))
    return module, copy.deepcopy(module)


def _cut(x: Tensor, dim: int | None) -> Tensor:
    """This rank's slice of `dim`; all of x for None."""
    if dim is None:
        return x.detach().clone()
    return x.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def _joined(x: Tensor, dim: int | None) -> Tensor:
    return x.detach() if dim is None else gather(x.detach(), dim, _world())


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _error(ours: Tensor, expected: Tensor) -> float:
    assert ours.shape == expected.shape, (ours.shape, expected.shape)
    return float((ours - expected).norm() / expected.norm())


def _gradient_errors(ours: nn.Module, plain: nn.Module) -> Errors:
    """Of each weight; every weight of `ours` must be a DTensor with a gradient."""
    expected = dict(plain.named_parameters())
    found = {}
    for name, parameter in ours.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert isinstance(parameter.grad, DTensor), name
        found[name] = _error(parameter.grad.full_tensor(), expected[name].grad)  # type: ignore[arg-type]
    assert found.keys() == expected.keys()
    return found


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
    plain, ours = _twins(module)
    parallelize_module(ours, mesh, plan)
    whole_x, local_x = x, _cut(x, cut_in)
    if x.is_floating_point():
        whole_x, local_x = x.clone().requires_grad_(), local_x.requires_grad_()
    expected, out = plain(whole_x, *more), ours(local_x, *more)
    upstream = _random(*expected.shape, seed=77)
    expected.backward(upstream)
    out.backward(_cut(upstream, cut_out))
    errors = {"output": _error(_joined(out, cut_out), expected.detach())}
    if x.is_floating_point():
        assert local_x.grad is not None and whole_x.grad is not None
        grad = local_x.grad
        if partial_grad:
            dist.all_reduce(grad)
        errors["input gradient"] = _error(_joined(grad, cut_in), whole_x.grad)
    return errors | _gradient_errors(ours, plain)


# --- the styles, one by one -------------------------------------------------------------------


def _hidden(width: int = CONFIG.hidden_size) -> Tensor:
    return _random(BATCH, SEQ, width, seed=50)


def _linear() -> nn.Linear:
    return nn.Linear(CONFIG.hidden_size, CONFIG.intermediate_size, bias=False)


def colwise(mesh: DeviceMesh) -> Errors:
    return _compare(_linear(), Colwise(), mesh, x=_hidden(), cut_out=-1, partial_grad=True)


def colwise_with_bias(mesh: DeviceMesh) -> Errors:
    linear = nn.Linear(CONFIG.hidden_size, CONFIG.intermediate_size)
    return _compare(linear, Colwise(), mesh, x=_hidden(), cut_out=-1, partial_grad=True)


def rowwise(mesh: DeviceMesh, *, sp: bool) -> Errors:
    cut_out = SEQUENCE if sp else None
    return _compare(_linear(), Rowwise(sp), mesh, x=_hidden(), cut_in=-1, cut_out=cut_out)


def norm(mesh: DeviceMesh, *, sp: bool, style: type[Norm] = Norm) -> Errors:
    cut = SEQUENCE if sp else None
    module = nn.RMSNorm(CONFIG.hidden_size, eps=1e-5)
    return _compare(module, style(sp), mesh, x=_hidden(), cut_in=cut, cut_out=cut)


def embedding(mesh: DeviceMesh, *, sp: bool) -> Errors:
    module = nn.Embedding(CONFIG.padded_vocab_size, CONFIG.hidden_size)
    cut_out = SEQUENCE if sp else None
    return _compare(module, VocabularyEmbedding(sp), mesh, x=_tokens(), cut_out=cut_out)


def mlp(mesh: DeviceMesh, *, sp: bool, entrance: type[GatherInput] = GatherInput) -> Errors:
    cut = SEQUENCE if sp else None
    plan: dict[str, ParallelStyle] = {
        "": entrance(sp),
        "gate_proj": Colwise(),
        "up_proj": Colwise(),
        "down_proj": Rowwise(sp),
    }
    return _compare(MLP(CONFIG), plan, mesh, x=_hidden(), cut_in=cut, cut_out=cut)


def attention(mesh: DeviceMesh, *, sp: bool) -> Errors:
    cut = SEQUENCE if sp else None
    plan: dict[str, ParallelStyle] = {"": GatherInput(sp), "o_proj": Rowwise(sp)}
    plan |= {f"{name}_proj": Colwise() for name in "qkv"}
    rotary = RotaryEmbedding(CONFIG)(torch.arange(SEQ).expand(BATCH, -1))
    angles = tuple(angle.double() for angle in rotary)
    return _compare(
        Attention(CONFIG), plan, mesh, x=_hidden(), more=angles, cut_in=cut, cut_out=cut
    )


def head_logits(mesh: DeviceMesh, *, sp: bool, loss_parallel: bool) -> Errors:
    """Every rank has all logits of all tokens, and the same gradient of them."""
    style, cut = VocabularyHead(sp, loss_parallel), SEQUENCE if sp else None
    return _compare(LMHead(CONFIG), style, mesh, x=_hidden(), cut_in=cut)


def head_loss(mesh: DeviceMesh, *, sp: bool, loss_parallel: bool) -> Errors:
    """The three sums; z-loss on and four chunks, so that every term counts."""
    head = LMHead(CONFIG)
    head.token_loss.num_chunks, head.token_loss.z_loss_weight = 4, 1e-2
    plain, ours = _twins(head)
    parallelize_module(ours, mesh, VocabularyHead(sp, loss_parallel))
    cut, scale = SEQUENCE if sp else None, 1 / 7
    whole_x, local_x = _hidden().requires_grad_(), _cut(_hidden(), cut).requires_grad_()
    expected, sums = plain(whole_x, _labels()), ours(local_x, _labels())
    (expected[0] * scale).backward()
    (sums[0] * scale).backward()
    assert local_x.grad is not None and whole_x.grad is not None
    found = {"output": _error(sums.detach(), expected.detach())}
    found["input gradient"] = _error(_joined(local_x.grad, cut), whole_x.grad)
    return found | _gradient_errors(ours, plain)


def decoder(mesh: DeviceMesh, *, sp: bool, loss_parallel: bool, tied: bool = False) -> Errors:
    """The whole plan: loss, every gradient, and the logits."""
    config = ModelConfig(**{**vars(CONFIG), "tie_word_embeddings": tied})
    plain, ours = _twins(Decoder(config))
    assert isinstance(plain, Decoder) and isinstance(ours, Decoder)
    names = [name for name, _ in plain.named_parameters()]
    apply_tensor_parallel(ours, mesh, sequence_parallel=sp, loss_parallel=loss_parallel)
    ours.tie_weights()
    assert [name for name, _ in ours.named_parameters()] == names
    expected, sums = plain(_tokens(), labels=_labels()), ours(_tokens(), labels=_labels())
    expected[0].backward()
    sums[0].backward()
    found = {"output": _error(sums.detach(), expected.detach())}
    found["logits"] = _error(ours(_tokens()).detach(), plain(_tokens()).detach())
    return found | _gradient_errors(ours, plain)


# --- twins ------------------------------------------------------------------------------------


class _ShareOfNorm(Norm):
    """Takes the gradient from one part of the sequence for the whole one."""

    def __init__(self, sequence_parallel: bool) -> None:
        self.grad_placement = Replicate()


class _UnsummedEntrance(GatherInput):
    """Takes one rank's share of the input's gradient for the whole one."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        enter = partial(
            all_gather, dim=SEQUENCE, group=device_mesh.get_group(), grad_is_partial=False
        )
        module.register_forward_pre_hook(lambda module, args: (enter(args[0]), *args[1:]))
        return module


TWINS: dict[str, tuple[Callable[[DeviceMesh], Errors], str]] = {
    "a norm that sums nothing": (partial(norm, sp=True, style=_ShareOfNorm), "weight"),
    "an entrance that sums nothing": (
        partial(mlp, sp=True, entrance=_UnsummedEntrance),
        "input gradient",
    ),
}

CASES: dict[str, Callable[[DeviceMesh], Errors]] = {
    "colwise": colwise,
    "colwise with bias": colwise_with_bias,
    **{
        f"{case.__name__}, {'with' if sp else 'without'} sp": partial(case, sp=sp)
        for case in (rowwise, norm, embedding, mlp, attention)
        for sp in (True, False)
    },
    **{
        f"{case.__name__}, {'with' if sp else 'without'} sp, {'cut' if lp else 'whole'} loss": (
            partial(case, sp=sp, loss_parallel=lp)
        )
        for case in (head_logits, head_loss, decoder)
        for sp in (True, False)
        for lp in (True, False)
    },
    "decoder, tied": partial(decoder, sp=True, loss_parallel=True, tied=True),
}


def _all_cases() -> dict[str, Errors]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    cases = CASES | {name: case for name, (case, _) in TWINS.items()}
    return {name: case(mesh) for name, case in cases.items()}


@cache
def _on_ranks(world_size: int) -> list[dict[str, Errors]]:
    return run_ranks(_all_cases, world_size)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_every_style_computes_what_the_plain_module_computes(case: str, world_size: int) -> None:
    # The loss takes logits to fp32, whatever the weights are: there its rounding is what is left.
    tolerance = 1e-6 if "head_loss" in case or "decoder" in case else TOLERANCE
    for errors in _on_ranks(world_size):
        wrong = {name: error for name, error in errors[case].items() if not error < tolerance}
        assert not wrong


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("twin", TWINS)
def test_a_forgotten_sum_would_be_seen(twin: str, world_size: int) -> None:
    quantity = TWINS[twin][1]
    for errors in _on_ranks(world_size):
        assert errors[twin]["output"] < TOLERANCE, "the forward cannot show it"
        assert errors[twin][quantity] > 1e-2


# --- the plan, without running it -------------------------------------------------------------

CUT_ROWS = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
PLACEMENTS = {
    **dict.fromkeys(CUT_ROWS, Shard(0)),
    **dict.fromkeys(("o_proj", "down_proj"), Shard(1)),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), Replicate()),
}


def _plan(modules: list[str] | None = None, sequence_parallel: bool = True) -> Decoder:
    """A decoder on the meta device, or a stage of it, planned for rank 1 of 4."""
    with torch.device("meta"):
        part = Decoder(CONFIG, modules)
    with fake_rank(1, 4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        apply_tensor_parallel(part, mesh, sequence_parallel=sequence_parallel, loss_parallel=True)
    return part


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    "modules",
    [
        None,
        ["embed_tokens", "layers.0"],
        ["layers.1"],
        ["layers.1", "norm", "lm_head"],
        ["norm", "lm_head"],
    ],
    ids=lambda modules: "whole" if modules is None else "+".join(modules),
)
def test_the_plan_cuts_every_parameter_of_any_stage_and_renames_none(
    modules: list[str] | None, sequence_parallel: bool
) -> None:
    with torch.device("meta"):
        plain = Decoder(CONFIG, modules)
    planned = dict(_plan(modules, sequence_parallel).named_parameters())
    assert list(planned) == [name for name, _ in plain.named_parameters()]
    for name, parameter in plain.named_parameters():
        ours, placement = planned[name], PLACEMENTS[name.split(".")[-2]]
        assert isinstance(ours, DTensor), name
        assert ours.placements == (placement,), name
        assert ours.shape == parameter.shape, name
        cut = 1 if placement.is_replicate() else 4
        assert ours.to_local().numel() * cut == parameter.numel(), name


@pytest.mark.parametrize("forgotten", ["norm", "layers.*.input_layernorm"])
def test_a_plan_that_forgets_a_norm_is_refused_with_its_name(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_present = tensor._is_present
    monkeypatch.setattr(
        tensor, "_is_present", lambda model, name: name != forgotten and is_present(model, name)
    )
    left = forgotten.replace("*", "0") + ".weight"
    with pytest.raises(AssertionError, match=f"leaves .*'{left}'.* as plain tensors"):
        _plan()


def test_a_rowwise_linear_with_a_bias_is_refused() -> None:
    """Each rank would add it, and the sum would hold it tp times."""
    with fake_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(AssertionError, match="once per rank"):
            parallelize_module(nn.Linear(8, 8), mesh, Rowwise(True))

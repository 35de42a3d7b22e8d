"""The flat state: names without topology, moments of any optimizer, no hyper-parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from tests.checkpoint.worlds import SHAPES, Run, full, mesh_of, same
from tests.world import run_ranks
from torchtitan_lite.checkpoint.state import (
    cast_state,
    materialise_state,
    model_state,
    optimizer_state,
    part_of,
    read_train_state,
    train_state,
)

KINDS = ["fused", "foreach", "loop", "sgd"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return full(tensor.detach()).contiguous().view(torch.int32).clone()


def materialise_keeps_everything(axes: dict[str, int] | None) -> list[list[str]]:
    keys = []
    for kind in KINDS:
        run = Run(axes, optimizer=kind)
        with torch.no_grad():
            run.named_parameters["layers.0.input_layernorm.weight"].mul_(-0.0)  # signed zeros
        weights = {name: bits(tensor) for name, tensor in run.named_parameters.items()}
        groups = [{**group, "params": None} for group in run.optimizer.param_groups]
        materialise_state(run.optimizer)
        assert same({name: bits(t) for name, t in run.named_parameters.items()}, weights), kind
        assert groups == [{**group, "params": None} for group in run.optimizer.param_groups], kind
        assert all(parameter.grad is None for parameter in run.named_parameters.values())
        state = optimizer_state(run.optimizer, run.named_parameters)
        assert all(not full(tensor).any() for tensor in state.values()), kind
        keys.append(sorted(state))
    return keys


@pytest.mark.parametrize(("ranks", "axes"), [(1, None), (4, {"fsdp": 2, "tp": 2})])
def test_materialising_changes_no_bit_of_weights_and_no_hyper_parameter(
    ranks: int, axes: dict[str, int] | None
) -> None:
    for keys in run_ranks(materialise_keeps_everything, ranks, axes):
        adam = sorted(
            f"optimizer.state.{name}.{part}"
            for name in SHAPES
            for part in ("step", "exp_avg", "exp_avg_sq")
        )
        assert keys[:3] == [adam] * 3
        assert keys[3] == sorted(f"optimizer.state.{name}.momentum_buffer" for name in SHAPES)


@pytest.mark.parametrize("kind", ["fused", "foreach", "loop"])
def test_a_step_after_materialising_is_the_first_step(kind: str) -> None:
    plain, materialised = Run(None, optimizer=kind), Run(None, optimizer=kind)
    materialise_state(materialised.optimizer)
    plain.step()
    materialised.step()
    assert same(materialised.full(), plain.full())


def test_materialising_leaves_state_that_exists_and_frozen_weights_alone() -> None:
    run = Run(None)
    run.step()
    before = run.full()
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    unborn = nn.Parameter(torch.ones(2))
    run.optimizer.add_param_group({"params": [frozen, unborn]})
    materialise_state(run.optimizer)
    assert frozen not in run.optimizer.state
    assert run.optimizer.state.pop(unborn)["step"] == 0
    assert same(run.full(), before)


def test_a_learning_rate_tensor_and_an_eps_of_zero_are_harmless() -> None:
    weight = nn.Parameter(torch.randn(3))
    before = weight.detach().clone()
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([weight], lr=rate, eps=0.0, foreach=False, capturable=False)
    materialise_state(optimizer)
    assert torch.equal(weight, before)
    group = optimizer.param_groups[0]
    assert group["lr"] is rate and group["eps"] == 0.0 and rate.item() == 0.5


def unreduced_moment() -> None:
    mesh = mesh_of({"fsdp": 2})
    run = Run({"fsdp": 2}, optimizer="sgd")
    run.step()
    weight = run.named_parameters["layers.0.input_layernorm.weight"]
    run.optimizer.state[weight]["momentum_buffer"] = DTensor.from_local(
        torch.ones(8), mesh, [Partial()]
    )
    with pytest.raises(AssertionError, match="momentum_buffer of layers.0.* an unreduced sum"):
        run.state()


def test_an_unreduced_moment_is_never_saved_as_if_it_were_the_sum() -> None:
    run_ranks(unreduced_moment, 2)


def test_hyper_parameters_are_no_state() -> None:
    run = Run(None)
    run.step()
    assert not [key for key in run.state() if "lr" in key.split(".") or "decay" in key]


def test_training_scalars_come_back_exactly() -> None:
    values = {"step": 3, "tokens_seen": 2**60 + 1, "best": 0.1}
    state = {**train_state(values), **train_state({"consumed_samples": 5}, part="dataloader")}
    assert read_train_state(state) == values
    assert read_train_state(state, part="dataloader") == {"consumed_samples": 5}


def test_casting_touches_floating_point_tensors_alone() -> None:
    state = {"norm.weight": torch.ones(2), "expert_counts": torch.ones(2, dtype=torch.int64)}
    cast = cast_state(state, torch.bfloat16)
    assert cast["norm.weight"].dtype == torch.bfloat16
    assert cast["expert_counts"] is state["expert_counts"]


def test_every_key_belongs_to_one_part() -> None:
    run = Run(None)
    run.step()
    state = {**run.state(), **train_state({"consumed_samples": 5}, part="dataloader")}
    parts = [part_of(key) for key in state]
    assert [parts.count(part) for part in ("model", "optimizer", "train_state", "dataloader")] == [
        len(SHAPES),
        3 * len(SHAPES),
        2,
        1,
    ]


def test_a_weight_may_not_go_by_the_name_of_another_part() -> None:
    with pytest.raises(AssertionError, match="optimizer.weight"):
        model_state({"optimizer.weight": torch.ones(1)})


def test_a_cast_leaves_what_must_stay_exact() -> None:
    state = {"weight": torch.ones(2), "bias": torch.tensor([1.001]), "step": torch.tensor(3)}
    cast = cast_state(state, torch.bfloat16, exact={"bias"})
    assert cast["weight"].dtype == torch.bfloat16 and cast["step"].dtype == torch.int64
    assert cast["bias"].equal(state["bias"])

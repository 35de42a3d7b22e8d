"""Parameter groups, patterns, kernels and the table, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan_lite.config import ConfigError
from torchtitan_lite.optim.optimizer import (
    build_optimizer,
    group_table,
    set_learning_rate,
    unmatched_patterns,
)

NO_DECAY = ["*norm.weight", "*.bias", "embed_tokens.weight"]


def parameters_of_a_model() -> dict[str, nn.Parameter]:
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (32, 8)}
    for layer in range(2):
        shapes |= {
            f"layers.{layer}.input_layernorm.weight": (8,),
            f"layers.{layer}.self_attn.q_proj.weight": (8, 8),
            f"layers.{layer}.mlp.up_proj.weight": (16, 8),
        }
    shapes |= {"norm.weight": (8,), "lm_head.weight": (32, 8)}
    return {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}


def build(
    named_parameters: Mapping[str, nn.Parameter] | None = None, **changes: Any
) -> torch.optim.Optimizer:
    keys: dict[str, Any] = {
        "name": "AdamW",
        "lr": 1e-2,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "momentum": 0.0,
        "implementation": "for-loop",
        "state_dtype": "float32",
        "seed": 0,
        "no_decay": NO_DECAY,
        "lr_multipliers": {},
        "strict_patterns": [],
    }
    parameters = parameters_of_a_model() if named_parameters is None else named_parameters
    return build_optimizer(parameters, **{**keys, **changes})


def settings(optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    """Name -> (weight decay, learning-rate multiplier)."""
    return {
        name: (group["weight_decay"], group["lr_multiplier"])
        for group in optimizer.param_groups
        for name in group["names"]
    }


def test_norms_biases_and_embeddings_take_no_decay_and_the_rest_does() -> None:
    found = settings(build())
    assert set(found) == set(parameters_of_a_model())
    for name, (decay, multiplier) in found.items():
        plain = name.endswith("norm.weight") or name == "embed_tokens.weight"
        assert decay == (0.0 if plain else 0.1), name
        assert multiplier == 1.0


def test_groups_are_as_many_as_settings_and_names_lie_beside_their_parameters() -> None:
    parameters = parameters_of_a_model()
    optimizer = build(parameters)
    assert len(optimizer.param_groups) == 2
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            assert parameters[name] is parameter


def test_no_decay_anywhere_is_one_group() -> None:
    assert len(build(weight_decay=0.0).param_groups) == 1
    assert len(build(no_decay=[]).param_groups) == 1


def test_the_first_matching_multiplier_wins_in_the_given_order() -> None:
    first = settings(build(lr_multipliers={"layers.0.*": 0.5, "*.q_proj.weight": 2.0}))
    assert first["layers.0.self_attn.q_proj.weight"] == (0.1, 0.5)
    assert first["layers.1.self_attn.q_proj.weight"] == (0.1, 2.0)
    assert first["layers.0.input_layernorm.weight"] == (0.0, 0.5)
    swapped = settings(build(lr_multipliers={"*.q_proj.weight": 2.0, "layers.0.*": 0.5}))
    assert swapped["layers.0.self_attn.q_proj.weight"] == (0.1, 2.0)


def test_patterns_match_case_and_the_whole_name() -> None:
    assert unmatched_patterns(["NORM.weight", "norm", "*norm.weight"], ["norm.weight"]) == [
        "NORM.weight",
        "norm",
    ]


def test_the_learning_rate_of_a_group_is_that_of_the_step_times_its_multiplier() -> None:
    optimizer = build(lr_multipliers={"embed_tokens.weight": 3.0})
    by_multiplier = {group["lr_multiplier"]: group["lr"] for group in optimizer.param_groups}
    assert by_multiplier == pytest.approx({1.0: 1e-2, 3.0: 3e-2})
    for _ in range(2):  # A second call starts from the rate again, not from the product.
        set_learning_rate(optimizer, 1e-3)
    by_multiplier = {group["lr_multiplier"]: group["lr"] for group in optimizer.param_groups}
    assert by_multiplier == pytest.approx({1.0: 1e-3, 3.0: 3e-3})


def test_multiplier_and_decay_act_on_the_update() -> None:
    parameters = parameters_of_a_model()
    optimizer = build(
        parameters, name="SGD", lr_multipliers={"norm.weight": 2.0, "lm_head.weight": 0.0}
    )
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # w = 1, g = 1: w - lr * multiplier * (g + decay * w).
    expected = {"norm.weight": 0.98, "lm_head.weight": 1.0, "embed_tokens.weight": 0.99}
    for name, parameter in parameters.items():
        right = expected.get(name, 0.99 if name.endswith("layernorm.weight") else 0.989)
        torch.testing.assert_close(parameter.data, torch.full_like(parameter.data, right))


def test_the_keys_reach_torch() -> None:
    (group, _) = build(beta1=0.8, beta2=0.7, eps=1e-5).param_groups
    assert (group["betas"], group["eps"]) == ((0.8, 0.7), 1e-5)
    (group, _) = build(name="SGD", momentum=0.6).param_groups
    assert group["momentum"] == 0.6
    assert build(implementation="fused").param_groups[0]["fused"] is True
    assert build(implementation="foreach").param_groups[0]["foreach"] is True
    assert not build(implementation="for-loop").param_groups[0]["foreach"]


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_rank_without_parameters_steps_and_prints(name: str, implementation: str) -> None:
    optimizer = build(
        {}, name=name, implementation=implementation, all_names=[*parameters_of_a_model()]
    )
    optimizer.step()
    optimizer.zero_grad()
    set_learning_rate(optimizer, 1.0)
    assert "none on this rank" in group_table(optimizer)


def test_frozen_parameters_are_left_out_and_tied_ones_count_under_their_first_name() -> None:
    parameters = parameters_of_a_model()
    parameters["norm.weight"].requires_grad_(False)
    parameters["lm_head.weight"] = parameters["embed_tokens.weight"]
    found = settings(build(parameters))
    assert set(parameters) - set(found) == {"norm.weight", "lm_head.weight"}
    assert found["embed_tokens.weight"] == (0.0, 1.0)


def test_a_pattern_without_a_match_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError) as refusal:
        build(
            lr_multipliers={"*.q_porj.weight": 2.0},
            no_decay=["norm.wieght"],
            strict_patterns=["norm.wieght"],
        )
    no_decay, multipliers = str(refusal.value).splitlines()
    assert "optimizer.no_decay" in no_decay and "'norm.wieght'" in no_decay
    assert "nearest: norm.weight" in no_decay
    assert "optimizer.lr_multipliers" in multipliers and "'*.q_porj.weight'" in multipliers
    assert "layers.*.self_attn.q_proj.weight" in multipliers


def test_only_the_users_own_decay_patterns_must_match() -> None:
    build(no_decay=["*.bias"], strict_patterns=[])
    with pytest.raises(ConfigError, match=r"optimizer.no_decay.*'\*.bias'"):
        build(no_decay=["*.bias"], strict_patterns=None)


def test_a_pattern_that_matches_on_another_stage_is_fine() -> None:
    whole = parameters_of_a_model()
    stage = {name: whole[name] for name in ("norm.weight", "lm_head.weight")}
    multipliers = {"embed_tokens.weight": 3.0}
    found = settings(build(stage, all_names=[*whole], lr_multipliers=multipliers))
    assert found == {"norm.weight": (0.0, 1.0), "lm_head.weight": (0.1, 1.0)}
    with pytest.raises(ConfigError, match="embed_tokens.weight"):
        build(stage, lr_multipliers=multipliers)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_fused_kernel_that_the_device_lacks_gives_way_with_one_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "torchtitan_lite"):
        build(name=name, implementation="fused")
        assert len(caplog.messages) == (name == "SGD")  # which torch cannot be trusted with
        caplog.clear()
        parameters = {"norm.weight": nn.Parameter(torch.ones(2, device="meta"))}
        optimizer = build(parameters, name=name, implementation="fused")
    (warning,) = caplog.messages
    assert "optimizer.implementation = fused" in warning and "foreach" in warning
    assert optimizer.param_groups[0]["foreach"] and not optimizer.param_groups[0]["fused"]


def test_the_table_shows_each_group_once() -> None:
    table = group_table(build(lr_multipliers={"embed_tokens.weight": 3.0})).splitlines()
    assert [line.split() for line in table] == [
        ["weight", "decay", "lr", "multiplier", "tensors", "parameters", "examples"],
        ["0", "1", "3", "24", "layers.0.input_layernorm.weight,"]
        + ["layers.1.input_layernorm.weight,", "..."],
        ["0", "3", "1", "256", "embed_tokens.weight"],
        ["0.1", "1", "5", "640", "layers.0.self_attn.q_proj.weight,"]
        + ["layers.0.mlp.up_proj.weight,", "..."],
    ]

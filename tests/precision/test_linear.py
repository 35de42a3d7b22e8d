"""Which linears are swapped, that nothing else changes, and what is refused."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from tests.config.cases import Shape, problems, warnings
from torchtitan_lite import device
from torchtitan_lite.config import Config, ConfigError
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.precision.float8 import RECIPES
from torchtitan_lite.precision.linear import Float8Linear, announce_float8, apply_float8

DENSE = ModelConfig(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
MIXTURE = dataclasses.replace(
    DENSE,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=40,
    shared_expert_gate=True,
)
STATE_SPACE = dataclasses.replace(DENSE, layer_type="state_space")
ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def configure(recipe: str = "rowwise", *filters: str) -> Config:
    config = Config()
    config.quantize.linear.float8.recipe_name = recipe  # type: ignore[assignment]
    config.quantize.linear.float8.filter_fqns = list(filters)
    return config


def meta(model: ModelConfig, modules: list[str] | None = None) -> Decoder:
    with torch.device("meta"):
        return Decoder(model, modules)


def swapped(model: Decoder) -> set[str]:
    """Names of the float8 linears, without the layer's index, which makes no difference."""
    names = [name for name, module in model.named_modules() if type(module) is Float8Linear]
    return {name.split(".", 2)[2] for name in names}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (DENSE, {*ATTENTION, *MLP}),
        (MIXTURE, {*ATTENTION}),  # 40 is no multiple of 16; routers and experts are no linears
        (dataclasses.replace(MIXTURE, shared_expert_intermediate_size=48),
         {*ATTENTION, *(name.replace("mlp", "mlp.shared_expert") for name in MLP)}),
        (STATE_SPACE, {"mixer.in_proj", "mixer.x_proj", "mixer.out_proj"}),
    ],
)  # fmt: skip
def test_linears_of_the_layers_are_swapped_where_16_divides_their_sizes(
    model: ModelConfig, expected: set[str]
) -> None:
    part = meta(model)
    apply_float8(part, configure())
    assert swapped(part) == expected


def test_nothing_is_swapped_unless_asked_for() -> None:
    part = meta(DENSE)
    apply_float8(part, Config())
    announce_float8(part, Config())
    assert swapped(part) == set()


def test_a_filter_leaves_what_has_it_in_its_name() -> None:
    part = meta(DENSE)
    apply_float8(part, configure("rowwise", "down", "self_attn.q"))
    assert swapped(part) == {*ATTENTION, *MLP} - {"mlp.down_proj", "self_attn.q_proj"}
    part = meta(DENSE)
    apply_float8(part, configure("rowwise", "layers.0."))
    assert swapped(part) == {*ATTENTION, *MLP}
    assert not any(type(module) is Float8Linear for module in part.layers["0"].modules())


def test_a_swap_changes_no_name_and_no_parameter() -> None:
    part = meta(dataclasses.replace(DENSE, attention_bias=True))
    before = dict(part.named_parameters())
    apply_float8(part, configure())
    after = dict(part.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_is_the_one_that_was_named(name: str) -> None:
    part = meta(DENSE)
    config = configure(name)
    config.quantize.linear.float8.round_scales_to_power_of_2 = False
    for config.quantize.linear.float8.emulate in (True, False):
        apply_float8(part := meta(DENSE), config)
        emulate = config.quantize.linear.float8.emulate or name == "blockwise"
        wanted = dataclasses.replace(RECIPES[name], powers_of_two=False, emulate=emulate)
        assert part.layers["0"].mlp.up_proj.recipe == wanted


# --- what is told and refused --------------------------------------------------------------------


def test_what_is_swapped_and_left_is_told_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torchtitan_lite")
    announce_float8(meta(MIXTURE), configure("blockwise", "q_proj"))
    (record,) = caplog.records
    assert record.message == (
        "float8 blockwise, emulated: 6 of 17 linears; left are "
        "2 named by ['q_proj'] (layers.0.self_attn.q_proj), "
        "8 of sizes that 16 does not divide (layers.0.mlp.shared_expert.gate_proj), "
        "1 outside the layers (lm_head)"
    )


@pytest.mark.skipif(device.device_type() != "cpu", reason="names the kernels of the CPU")
def test_kernels_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torchtitan_lite")
    announce_float8(meta(DENSE), configure("tensorwise"))
    assert caplog.records[0].message.startswith("float8 tensorwise, cpu kernels: 14 of 15 linears;")


def test_a_filter_that_matches_nothing_is_refused_by_name() -> None:
    for entry in ("output", "router.gate", "layers.2."):
        with pytest.raises(ConfigError) as error:
            announce_float8(meta(DENSE), configure("rowwise", "q_proj", entry))
        assert str(error.value) == (
            f"quantize.linear.float8.filter_fqns = {entry}: no linear of the model has it in its "
            "name, such as layers.0.self_attn.q_proj; remove it (lm_head and routers stay as they "
            "are)"
        )
    announce_float8(meta(DENSE), configure("rowwise", "lm_head", "layers.1."))


def test_a_swap_of_nothing_is_refused() -> None:
    for model, filters in ((DENSE, ["layers"]), (dataclasses.replace(DENSE, hidden_size=40), [])):
        with pytest.raises(ConfigError, match="recipe_name = rowwise: there is no linear to swap"):
            announce_float8(meta(model), configure("rowwise", *filters))


KEY = "--quantize.linear.float8.recipe_name="


@pytest.mark.parametrize("name", RECIPES)
def test_a_cpu_takes_every_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_type", lambda: "cpu")
    assert problems([KEY + name]) == []


@pytest.mark.parametrize(
    ("capability", "triton", "recipe", "dtype", "works"),
    [
        ((9, 0), False, "tensorwise", "float32", None),
        ((8, 9), False, "rowwise", "bfloat16", None),
        ((8, 9), True, "blockwise", "bfloat16", None),
        ((9, 0), False, "rowwise", "float32", "use tensorwise, or set"),
        ((9, 0), True, "rowwise", "float32", "use tensorwise or blockwise, or set"),
        ((9, 0), False, "blockwise", "bfloat16", "use tensorwise or rowwise, or set"),
        ((8, 0), True, "tensorwise", "bfloat16", "set"),
    ],
)
def test_an_accelerator_is_not_left_to_emulate_unless_asked_to(
    capability: tuple[int, int],
    triton: bool,
    recipe: str,
    dtype: str,
    works: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    monkeypatch.setattr(device, "HAS_TRITON", triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    argv = [KEY + recipe, f"--training.mixed_precision_param={dtype}"]
    told = [
        f'quantize.linear.float8.recipe_name = "{recipe}" (from {KEY[:-1]}): this cuda device has '
        f"no kernel for it in {dtype}; {works} quantize.linear.float8.emulate to true, which is "
        "slower than high precision"
    ]
    assert problems(argv) == ([] if works is None else told)
    assert problems([*argv, "--quantize.linear.float8.emulate"]) == []


def test_other_keys_without_a_recipe_do_nothing_and_say_so() -> None:
    argv = ["--quantize.linear.float8.emulate"]
    (line,) = warnings(argv, shape=Shape())
    assert line.startswith("quantize.linear.float8.emulate = true") and "has no effect" in line
    assert warnings([*argv, KEY + "rowwise"], shape=Shape()) == []


@pytest.mark.parametrize(
    "name", ["linear.float8.filter_fqns", "linear.float8.include_fqns", "grouped_mm.float8.fqns"]
)
def test_an_empty_entry_which_is_in_every_name_is_refused(name: str) -> None:
    argv = [KEY + "rowwise", f'--quantize.{name}=["", "down_proj"]']
    (line,) = problems(argv)
    assert f"quantize.{name}" in line and "an empty entry is a part of every name" in line


GATHER = "quantize.linear.float8.enable_fsdp_float8_all_gather"


def test_a_gather_in_float8_needs_scales_that_keep_digits_and_weights_on_the_device() -> None:
    argv = [KEY + "tensorwise", f"--{GATHER}", "--parallelism.data_parallel_shard_degree=2"]
    assert problems(argv, world=2) == []
    (line,) = problems([*argv, "--quantize.linear.float8.no_round_scales_to_power_of_2"], world=2)
    assert line == (
        f"{GATHER} = true (from --{GATHER}): weights are cast again where they arrive, which "
        "changes digits unless scales are powers of two; set "
        "quantize.linear.float8.round_scales_to_power_of_2 to true"
    )
    (line,) = problems([*argv, "--training.enable_cpu_offload"], world=2)
    assert line.startswith(f"{GATHER} = true (from --{GATHER}): weights in host memory are sent")


def test_a_gather_in_float8_without_a_gather_does_nothing_and_says_so() -> None:
    argv = [KEY + "tensorwise", f"--{GATHER}"]
    (line,) = warnings(argv)
    assert line.startswith(f"{GATHER} = true") and "has no effect" in line
    argv += ["--parallelism.data_parallel_shard_degree=2", "--parallelism.zero_stage"]
    assert warnings([*argv, "1"], world=2) == []
    (line,) = warnings([*argv, "0"], world=2)
    assert line.startswith(f"{GATHER} = true") and "has no effect" in line

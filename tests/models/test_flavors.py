"""Each flavor has exactly as many parameters as the released model of that name.

Counted on the meta device, without the rows that pad the vocabulary. The published numbers are
those of the safetensors index of each release: its bytes by those of a number. A tied head is
counted once, the bias of a router as a parameter. What a count cannot see is compared with each
release's config.json below, and for one size a family with the whole file in test_hf_config.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.models.hf import named_weights
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import stored_shapes
from torchtitan_lite.models.families import FLAVORS, config_to_hf

PUBLISHED = {
    ("llama3", "1B"): 1_235_814_400,
    ("llama3", "3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("llama2", "7B"): 6_738_415_616,
    ("llama2", "13B"): 13_015_864_320,
    ("llama2", "70B"): 68_976_648_192,
    ("mistral", "7B-v0.1"): 7_241_732_096,
    ("mistral", "7B-v0.3"): 7_248_023_552,
    ("qwen2", "0.5B"): 494_032_768,
    ("qwen2", "1.5B"): 1_543_714_304,
    ("qwen2", "3B"): 3_085_938_688,
    ("qwen2", "7B"): 7_615_616_512,
    ("qwen2", "14B"): 14_770_033_664,
    ("qwen2", "32B"): 32_763_876_352,
    ("qwen2", "72B"): 72_706_203_648,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("smollm3", "3B"): 3_075_098_624,
    ("starcoder2", "3B"): 3_030_371_328,
    ("starcoder2", "7B"): 7_173_923_840,
    ("starcoder2", "15B"): 15_957_889_024,
    ("gpt2", "124M"): 124_439_808,
    ("gpt2", "355M"): 354_823_168,
    ("gpt2", "774M"): 774_030_080,
    ("gpt2", "1558M"): 1_557_611_200,
    ("mamba", "130M"): 129_135_360,
    ("mamba", "370M"): 371_516_416,
    ("mamba", "790M"): 793_204_224,
    ("mamba", "1.4B"): 1_372_178_432,
    ("mamba", "2.8B"): 2_768_345_600,
    ("mixtral", "8x7B"): 46_702_792_704,
    ("mixtral", "8x22B"): 140_620_634_112,
    ("qwen2_moe", "A2.7B"): 14_315_784_192,
    ("qwen2_moe", "57B-A14B"): 57_408_658_944,
    ("qwen3_moe", "30B-A3B"): 30_532_122_624,
    ("qwen3_moe", "235B-A22B"): 235_093_634_560,
    # Its index has 1,728 more: 864 rotary frequencies in fp32, counted by the bytes of bf16.
    ("deepseek_v3", "16B"): 15_960_110_208,
}
SMALLEST = dict(reversed(PUBLISHED))


def num_parameters(config: ModelConfig) -> int:
    """Of the model as published: every parameter once, padded rows not at all."""
    padding = config.padded_vocab_size - config.vocab_size
    tables = 1 if config.tie_word_embeddings else 2
    stored = sum(shape.numel() for shape in stored_shapes(config).values())
    return stored - tables * padding * config.hidden_size


def by_formula(config: ModelConfig) -> int:
    """The same by hand, from the shapes in the Llama papers."""
    hidden, width = config.hidden_size, config.head_dim
    attention = 2 * hidden * width * (config.num_attention_heads + config.num_key_value_heads)
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    tables = 1 if config.tie_word_embeddings else 2
    return config.num_hidden_layers * layer + tables * config.vocab_size * hidden + hidden


def in_transformers(config: ModelConfig) -> int:
    """The same, of the model that transformers builds from the config.json written for it."""
    transformers = pytest.importorskip("transformers")
    content = config_to_hf(config, dtype="float32", bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**content)
        )
    return sum(p.numel() for p in named_weights(model).values())


def test_every_flavor_but_the_laptops_has_a_published_number() -> None:
    ours = {(name, flavor) for name, flavors in FLAVORS.items() for flavor in flavors}
    laptops = {(name, "debugmodel") for name in FLAVORS if name != "llama2"}
    assert ours - set(PUBLISHED) == laptops


@pytest.mark.parametrize(("name", "flavor"), PUBLISHED)
def test_a_flavor_has_the_published_number_of_parameters(name: str, flavor: str) -> None:
    config = FLAVORS[name][flavor]
    assert num_parameters(config) == PUBLISHED[name, flavor]
    if name in ("llama2", "llama3", "mistral"):
        assert by_formula(config) == PUBLISHED[name, flavor]


@pytest.mark.parametrize(("name", "flavor"), SMALLEST.items())
def test_transformers_counts_the_same(name: str, flavor: str) -> None:
    assert in_transformers(FLAVORS[name][flavor]) == PUBLISHED[name, flavor]


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": 14335},
        {"num_key_value_heads": 4},
        {"tie_word_embeddings": True},
        {"vocab_size": 128255},  # padded to the same rows
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_flavor_with_one_number_wrong_would_be_seen(changes: dict[str, int]) -> None:
    config = dataclasses.replace(FLAVORS["llama3"]["8B"], **changes)  # type: ignore[arg-type]
    assert num_parameters(config) != PUBLISHED["llama3", "8B"]


def released(name: str) -> dict[str, ModelConfig]:
    return {flavor: c for flavor, c in FLAVORS[name].items() if flavor != "debugmodel"}


def test_the_rotary_frequencies_are_those_of_each_release() -> None:
    """What a count of parameters cannot see, from each release's config.json."""
    for flavor, config in released("llama3").items():
        assert config.rope_theta == 500_000 and config.max_position_embeddings == 131_072
        assert config.rope_scaling == {
            "rope_type": "llama3",
            "factor": 32.0 if flavor in ("1B", "3B") else 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        assert config.rms_norm_eps == 1e-5
    for config in FLAVORS["llama2"].values():
        assert config.rope_theta == 10_000 and config.rope_scaling is None
        assert config.max_position_embeddings == 4096 and config.rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [
        ("mistral", "sliding_window", [4096, None]),
        ("mistral", "rope_theta", [10_000, 1_000_000]),
        ("mistral", "rms_norm_eps", 1e-5),
        ("qwen2", "rms_norm_eps", [1e-6, 1e-6, 1e-6, 1e-6, 1e-5, 1e-5, 1e-5]),
        ("qwen2", "rope_theta", 1_000_000),
        ("qwen2", "sliding_window", None),
        ("qwen2", "tie_word_embeddings", [True, True, True, False, False, False, False]),
        ("qwen3", "rms_norm_eps", 1e-6),
        ("qwen3", "rope_theta", 1_000_000),
        ("qwen3", "tie_word_embeddings", [True, True, True, False, False, False]),
        ("starcoder2", "rope_theta", [999999.4420358813, 1_000_000, 100_000]),
        ("starcoder2", "sliding_window", 4096),
        ("starcoder2", "rms_norm_eps", 1e-5),
        ("starcoder2", "hidden_act", "gelu_tanh"),
        ("smollm3", "rope_theta", 5_000_000),
        ("smollm3", "no_rope_layer_interval", 4),
        ("gpt2", "rms_norm_eps", 1e-5),
        ("gpt2", "hidden_act", "gelu_tanh"),
        ("gpt2", "residual_dropout", 0.1),
        ("mamba", "rms_norm_eps", 1e-5),
        ("mamba", "residual_in_fp32", True),
        ("mamba", "time_step_rank", [48, 64, 96, 128, 160]),
        ("mixtral", "num_experts_per_tok", 2),
        ("mixtral", "norm_topk_prob", True),
        ("mixtral", "rope_theta", 1_000_000),
        ("mixtral", "max_position_embeddings", [32768, 65536]),
        ("mixtral", "rms_norm_eps", 1e-5),
        ("qwen2_moe", "num_experts_per_tok", [4, 8]),
        ("qwen2_moe", "norm_topk_prob", False),
        ("qwen2_moe", "rope_theta", 1_000_000),
        ("qwen2_moe", "rms_norm_eps", 1e-6),
        ("qwen2_moe", "max_position_embeddings", [8192, 131072]),
        ("qwen3_moe", "num_experts_per_tok", 8),
        ("qwen3_moe", "norm_topk_prob", True),
        ("qwen3_moe", "rope_theta", 1_000_000),
        ("qwen3_moe", "rms_norm_eps", 1e-6),
        ("deepseek_v3", "num_experts_per_tok", 6),
        ("deepseek_v3", "router_scores", "sigmoid"),
        ("deepseek_v3", "norm_topk_prob", True),
        ("deepseek_v3", "routed_scaling_factor", 2.446),
        ("deepseek_v3", "n_group", 1),
        ("deepseek_v3", "rope_theta", 50_000),
        ("deepseek_v3", "rope_interleave", True),
        ("deepseek_v3", "rms_norm_eps", 1e-5),
    ],
)
def test_what_a_count_does_not_see_is_that_of_each_release(
    name: str, field: str, values: Any
) -> None:
    found = [getattr(config, field) for config in released(name).values()]
    assert found == (values if isinstance(values, list) else [values] * len(found))


@pytest.mark.parametrize("name", [name for name in FLAVORS if name != "llama2"])
def test_the_laptops_flavors_are_small_and_drop_nothing(name: str) -> None:
    config = FLAVORS[name]["debugmodel"]
    assert 4.5e6 < num_parameters(config) < (8e6 if config.num_experts else 6.5e6)
    assert config.vocab_size == 2048 and config.max_position_embeddings == 2048
    assert not config.has_dropout


def test_the_laptops_flavors_with_experts_have_eight_and_a_token_goes_to_two() -> None:
    found = [c for c in (f.get("debugmodel") for f in FLAVORS.values()) if c and c.num_experts]
    assert len(found) == 4
    assert {(c.num_experts, c.num_experts_per_tok) for c in found} == {(8, 2)}
    config = FLAVORS["deepseek_v3"]["debugmodel"]
    assert config.first_k_dense_replace == 1 and config.n_group == 1
    assert config.shared_expert_intermediate_size == config.moe_intermediate_size, "one of them"

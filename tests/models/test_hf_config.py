"""Nothing in a config.json that changes the logits is ignored, and none is written that lies.

Each key that transformers has for a family is changed in turn. Either it is refused by its name,
or our model and transformers' are built from the changed file, and their logits are equal. So no
key is harmless because somebody says so.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.hf import FAMILIES, hf_model, ours_from, some_tokens, tiny_hf_config
from torchtitan_lite.config import ConfigError
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.families import (
    FLAVORS,
    config_from_hf,
    config_to_hf,
    family_of,
    model_config,
)
from torchtitan_lite.models.families.config_json import FIXED, HARMLESS

KEY = "--hf_path"
TOLERANCE = 1e-5


def write(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "config.json").write_text(text)
    return folder


def full_content(family: str) -> dict[str, Any]:
    """Every key that transformers has for a model of FAMILIES."""
    return json.loads(tiny_hf_config(family).to_json_string(use_diff=False))


def read(folder: Path, content: Any) -> ModelConfig:
    return config_from_hf(write(folder, content), key=KEY)


def refusal(folder: Path, content: Any) -> list[str]:
    """The lines that tell what is wrong, without the key and the file they begin with."""
    with pytest.raises(ConfigError) as refused:
        read(folder, content)
    start = f"{KEY}: {folder / 'config.json'}: "
    lines = str(refused.value).splitlines()
    assert all(line.startswith(start) for line in lines), lines
    return [line.removeprefix(start) for line in lines]


def transformers_config(folder: Path) -> Any:
    import transformers

    return transformers.AutoConfig.from_pretrained(folder)


# --- every key in turn ------------------------------------------------------------------------

OTHER = {
    "hidden_act": "gelu",
    "activation_function": "gelu",
    "num_key_value_heads": 3,
    "dtype": "bfloat16",
    "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    "no_rope_layers": [1, 1, 0],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "architectures": ["Another"],
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "label2id": {"a": 0, "b": 1, "c": 2},
    "problem_type": "regression",
    "time_step_rank": 4,
    "time_step_init_scheme": "constant",
    "pad_token_id": 3,
    "n_inner": 64,
    "sliding_window": 3,
    "mlp_only_layers": [],
    "decoder_sparse_step": 3,
    "n_group": 2,
    "topk_group": 3,
}
# Keys of which none can change alone.
TOGETHER: dict[tuple[str, str], dict[str, Any]] = {
    ("deepseek_v3", "num_attention_heads"): {"num_key_value_heads": 12},
    ("deepseek_v3", "qk_rope_head_dim"): {"head_dim": 12, "qk_head_dim": 22},
    ("deepseek_v3", "qk_nope_head_dim"): {"qk_head_dim": 26},
}
REFUSED = {
    "llama": {"pretraining_tp"},
    "smollm3": {"use_sliding_window", "layer_types"},
    "gpt2": {
        "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx",
        "reorder_and_upcast_attn",
        "add_cross_attention",
    },
    "mamba": {"hidden_act"},
    "mixtral": {"router_jitter_noise"},
    "qwen2_moe": {"use_sliding_window", "layer_types"},
    "deepseek_v3": {"head_dim", "qk_head_dim", "num_key_value_heads"},
}
ROPE_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def other_value(name: str, value: Any) -> Any:
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return 2 * value or type(value)(1) / 4
    return "something" if value is None else value + "x"


def assert_same_logits(folder: Path, content: dict[str, Any], config: ModelConfig) -> None:
    """Between transformers' model of this config.json, and ours, of `config`."""
    made = transformers_config(write(folder, content))
    if content.get("output_attentions"):
        made._attn_implementation = "eager"  # transformers wants it so
    theirs = hf_model(made)
    ours = ours_from(theirs)
    assert ours.config == config, "as we read it, also when transformers has written it again"
    tokens = some_tokens(1, 16)
    with torch.no_grad():
        difference = ours(tokens) - theirs(tokens).logits
    assert difference.abs().max() < TOLERANCE, content


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_key_is_refused_by_name_or_gives_transformers_logits(
    family: str, tmp_path: Path
) -> None:
    """All those that leave our model as it is are changed together, the others one by one."""
    base = full_content(family)
    values = {name: other_value(name, base[name]) for name in base}
    for name in ("layer_types", "no_rope_layers"):  # made by transformers out of other keys
        base.pop(name, None)
    harmless = {}
    # Of no effect on logits, too, but transformers cannot run with return_dict = False itself.
    for name in values.keys() - {"model_type", "return_dict"}:
        changed = {**base, name: values[name], **TOGETHER.get((family, name), {})}
        if name in REFUSED.get(family, set()) | {"is_encoder_decoder"}:
            (line,) = refusal(tmp_path, changed)
            assert line.startswith(f"{name} = ")
            continue
        config = read(tmp_path, changed)
        if config == read(tmp_path, base):
            harmless[name] = values[name]
        else:
            assert_same_logits(tmp_path, changed, config)
    assert len(harmless) > 10
    assert_same_logits(tmp_path, {**base, **harmless}, read(tmp_path, base))


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_other_versions_that_are_left_alone_are_harmless(
    family: str, tmp_path: Path
) -> None:
    """Those that a published file has, though transformers' own list of keys has not."""
    base = full_content(family)
    known = [*HARMLESS.split(), *family_of(ModelConfig(model_type=family)).harmless.split()]
    added = {name: OTHER.get(name, 3) for name in known if name not in base}
    del added["torch_dtype"]  # the same as dtype
    assert len(added) > 10
    assert_same_logits(tmp_path, {**base, **added}, read(tmp_path, base))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_is_honoured_is_one_of_transformers(family: str) -> None:
    """So that the walk above meets it; some have another spelling since version 5."""
    ours = family_of(ModelConfig(model_type=family))
    respelled = {"rope_theta", "rope_scaling", "head_dim", *ours.aliases.values()}
    assert set(ours.keys) - set(full_content(family)) <= respelled


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_key_has_transformers_default(family: str, tmp_path: Path) -> None:
    sizes = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}
    sizes |= {"num_attention_heads", "n_embd", "n_layer", "n_head", "pad_token_id"}
    content = {name: value for name, value in full_content(family).items() if name in sizes}
    if family != "gpt2":  # a multiple of every default of num_key_value_heads
        content |= {"num_attention_heads": 128, "hidden_size": 256}
    if family == "mamba":
        del content["num_attention_heads"], content["intermediate_size"]
    content["model_type"] = family
    ours = read(tmp_path, content)
    filled = json.loads(transformers_config(tmp_path).to_json_string(use_diff=False))
    assert len(filled) > len(content) + 5
    assert read(tmp_path, filled) == ours


@pytest.mark.parametrize("family", FAMILIES)
def test_every_size_must_be_there(family: str, tmp_path: Path) -> None:
    (*lines,) = refusal(tmp_path, {"model_type": family})
    assert all(line.endswith(" is missing") for line in lines)
    assert "vocab_size is missing" in lines
    assert len(lines) == {"gpt2": 4, "mamba": 3}.get(family, 5)


# --- what is not in transformers' own list of keys ----------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantization_config", {"quant_method": "fp8"}),
        ("auto_map", {"AutoModelForCausalLM": "modeling.Other"}),
        ("attn_logit_softcapping", 50.0),
        ("rms_norm_epsilon", 1e-3),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("use_mrope", True),
    ],
)
def test_an_unknown_key_is_refused_by_name_unless_it_is_null(
    name: str, value: Any, tmp_path: Path
) -> None:
    content = full_content("llama")
    (line,) = refusal(tmp_path, {**content, name: value})
    assert line.startswith(f"{name} = {value!r}: ")
    assert read(tmp_path, {**content, name: None}) == read(tmp_path, content)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "pretraining_tp", 2),
        ("llama", "sliding_window", 4096),
        ("llama", "layer_types", ["full_attention"] * 3),
        ("mistral", "attention_bias", True),
        ("qwen2", "attention_bias", False),
        ("gpt2", "head_dim", 16),
        ("gpt2", "rope_theta", 1e4),
        ("mamba", "rope_parameters", {"rope_theta": 1e4}),
        ("starcoder2", "rms_norm_eps", 1e-3),
    ],
)
def test_a_key_of_another_family_is_refused_by_name(
    family: str, key: str, value: Any, tmp_path: Path
) -> None:
    content = full_content(family)
    (line,) = refusal(tmp_path, {**content, key: value})
    assert line.startswith(f"{key} = ")


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh"])
def test_activations_are_transformers(activation: str, tmp_path: Path) -> None:
    theirs = hf_model(tiny_hf_config("llama", hidden_act=activation))
    tokens = some_tokens()
    with torch.no_grad():
        difference = ours_from(theirs)(tokens) - theirs(tokens).logits
    assert difference.abs().max() < TOLERANCE


@pytest.mark.parametrize("activation", ["relu", "gelu_fast", "quick_gelu", "swish", 3, ["silu"]])
def test_another_activation_is_refused_by_name(activation: Any, tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, {**full_content("llama"), "hidden_act": activation})
    assert "hidden_act" in line and repr(activation) in line


# --- rotary options ---------------------------------------------------------------------------


def rotary(**keys: Any) -> dict[str, Any]:
    content = full_content("llama")
    del content["rope_parameters"]
    return {**content, **keys}


ORIGINAL = {"original_max_position_embeddings": 16}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
MSCALES = {"beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.9}
SCALINGS: dict[str, dict[str, Any]] = {
    "llama3": ROPE_SCALING,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "yarn": YARN,
    "yarn with all": {**YARN, **MSCALES, "attention_factor": 1.1, "truncate": False},
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_both_spellings_of_rotary_options_are_read(scaling: dict[str, Any], tmp_path: Path) -> None:
    old_type = {**scaling, "type": scaling["rope_type"]}
    del old_type["rope_type"]
    spellings = [
        rotary(rope_parameters={**scaling, "rope_theta": 5e5}),
        rotary(rope_parameters={**old_type, "rope_theta": 5e5}),
        rotary(rope_theta=5e5, rope_scaling=scaling),
        rotary(rope_theta=5e5, rope_scaling=old_type),
        rotary(rope_theta=5e5, rope_scaling={**scaling, "type": "default"}),
        rotary(rope_theta=5e5, rope_scaling=scaling, rope_parameters=None),
        rotary(rope_theta=7.0, rope_scaling={**scaling, "rope_theta": 5e5}),
    ]
    for content in spellings:
        config = read(tmp_path, content)
        assert config.rope_scaling == scaling and config.rope_theta == 5e5
        theirs = transformers_config(tmp_path).rope_parameters
        assert theirs.items() >= {**scaling, "rope_theta": 5e5}.items()


def test_rotary_options_without_scaling_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, rotary(rope_theta=5e5, rope_scaling=None)).rope_theta == 5e5
    default = read(tmp_path, rotary(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    assert default.rope_scaling is None and default.rope_theta == 5e5


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_an_original_context_that_is_not_stated_is_that_of_the_model(
    kind: str, tmp_path: Path
) -> None:
    scaling = dict(SCALINGS[kind])
    del scaling["original_max_position_embeddings"]
    config = read(tmp_path, rotary(rope_scaling=scaling))
    assert config.rope_scaling == {**scaling, "original_max_position_embeddings": 256}
    theirs = transformers_config(tmp_path).rope_parameters
    assert theirs["original_max_position_embeddings"] == 256


NULLS: dict[str, Any] = {"attention_factor": None, "beta_fast": None, "mscale": None}


@pytest.mark.parametrize("scaling", [{**YARN, **NULLS}, {**YARN, "mscale_all_dim": 0}], ids=str)
def test_entries_that_say_nothing_give_transformers_logits(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    content = rotary(rope_scaling=scaling)
    config = read(tmp_path, content)
    assert config.rope_scaling == {k: v for k, v in scaling.items() if v is not None}
    assert_same_logits(tmp_path, content, config)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, "rope_type is 'su'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "lacks factor"),
        ({"rope_scaling": {**YARN, "factor": None}}, "lacks factor"),
        ({"rope_parameters": {"rope_type": ["llama3"]}}, "rope_type is ['llama3']"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_scaling": {"type": "default", "mrope_section": [16, 24]}}, "mrope_section"),
        ({"rope_scaling": {"type": "default", "factor": 4.0}}, "rope_type 'default' with factor"),
        ({"rope_scaling": {**ROPE_SCALING, "attention_factor": 2.0}}, "attention_factor is 2.0"),
        ({"rope_scaling": {**YARN, "finetuned": True}}, "rope_scaling.finetuned is True"),
        ({"rope_scaling": {**YARN, "truncate": None}}, "rope_scaling.truncate is None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"rope_scaling": {**ROPE_SCALING, "factor": -1}}, "rope_scaling.factor is -1"),
        ({"rope_scaling": ROPE_SCALING, "rope_parameters": ROPE_SCALING}, "one of the two"),
        ({"rope_parameters": [1]}, "rope_scaling = [1]"),
        ({"rope_theta": "10000"}, "rope_theta = '10000'"),
        ({"rope_theta": 0}, "rope_theta is 0"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_rotary_options_that_are_not_computed_are_refused_by_name(
    keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (line,) = refusal(tmp_path, rotary(**keys))
    assert named in line


# --- patterns of layers -----------------------------------------------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("family", "keys", "named"),
    [
        ("qwen2", {"layer_types": [SLIDING, FULL, FULL]}, "layer_types"),
        ("qwen2", {"layer_types": [FULL, SLIDING]}, "layer_types"),
        ("qwen2", {"layer_types": [FULL, FULL, "linear_attention"]}, "layer_types"),
        (
            "qwen3",
            {"use_sliding_window": False, "layer_types": [FULL, FULL, SLIDING]},
            "layer_types",
        ),
        ("smollm3", {"no_rope_layers": [0, 1, 1]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("smollm3", {"layer_types": [FULL, SLIDING, FULL]}, "layer_types"),
    ],
)
def test_a_pattern_that_cannot_be_said_is_refused(
    family: str, keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (line,) = refusal(tmp_path, {**full_content(family), **keys})
    assert line.startswith(f"{named} = ")


def test_a_list_of_layers_goes_before_the_number_it_is_made_of(tmp_path: Path) -> None:
    content = {**full_content("smollm3"), "no_rope_layers": [1, 1, 0], "no_rope_layer_interval": 2}
    assert read(tmp_path, content).no_rope_layer_interval == 3
    content = {**full_content("qwen2"), "layer_types": [FULL] * 2 + [SLIDING]}
    assert content["max_window_layers"] == 1
    assert read(tmp_path, content).max_window_layers == 2


# --- bad files --------------------------------------------------------------------------------


def test_no_file_is_one_line_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from_hf(tmp_path / "nowhere", key=KEY)
    file = tmp_path / "nowhere" / "config.json"
    assert str(refused.value) == f"{KEY}: {file}: No such file or directory"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "Expecting value"),
        ('{"model_type": "llama"', "line 1"),
        ("[1, 2]", "model_type None"),
        ("{}", "model_type None is unknown"),
        ({"model_type": "qwen2_vl"}, "did you mean 'qwen2'?"),
        ({"model_type": ["llama"]}, "is unknown"),
        ({"model_type": "bert"}, "choose from llama, mistral, qwen2, qwen3, smollm3, starcoder2"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_file_of_no_model_is_one_line(content: Any, named: str, tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, content)
    assert named in line


def test_a_file_that_is_not_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="config.json: 'utf-8' codec"):
        config_from_hf(tmp_path, key=KEY)


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    content = full_content("llama")
    del content["num_hidden_layers"]
    content |= {"hidden_size": "48", "mlp_bias": 1, "pretraining_tp": 4, "sandwich_norm": True}
    lines = refusal(tmp_path, content)
    wrong = {"num_hidden_layers", "hidden_size", "mlp_bias", "pretraining_tp", "sandwich_norm"}
    assert len(lines) == 5 and {line.split(" ")[0] for line in lines} == wrong


@pytest.mark.parametrize(
    ("family", "keys", "named"),
    [
        ("llama", {"vocab_size": 0}, "vocab_size is 0"),
        ("llama", {"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple"),
        ("llama", {"num_attention_heads": 5}, "hidden_size 48 is not a multiple of 5"),
        ("llama", {"head_dim": 7}, "head_dim is 7"),
        ("llama", {"head_dim": None, "num_attention_heads": 0}, "0 attention heads"),
        ("llama", {"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("gpt2", {"n_head": 5}, "hidden_size 48 is not a multiple of 5"),
        ("gpt2", {"n_layer": True}, "n_layer = True: it must be int"),
        ("gpt2", {"resid_pdrop": 1.0}, "residual_dropout is 1.0"),
        ("mamba", {"intermediate_size": None, "expand": 0}, "intermediate_size is 0"),
        ("mamba", {"expand": 2.5}, "expand = 2.5: it must be int"),
    ],
    ids=lambda value: str(value),
)
def test_a_bad_value_is_one_line(
    family: str, keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (line,) = refusal(tmp_path, {**full_content(family), **keys})
    assert named in line


# --- config.json files as they were published -----------------------------------------------------

PUBLISHED: dict[tuple[str, str], dict[str, Any]] = {
    ("mistral", "7B-v0.1"): {
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    ("qwen2", "0.5B"): {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    ("qwen3", "8B"): {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    ("starcoder2", "3B"): {
        "architectures": ["Starcoder2ForCausalLM"],
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "embedding_dropout": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 3072,
        "initializer_range": 0.018042,
        "intermediate_size": 12288,
        "max_position_embeddings": 16384,
        "mlp_type": "default",
        "model_type": "starcoder2",
        "norm_epsilon": 1e-05,
        "norm_type": "layer_norm",
        "num_attention_heads": 24,
        "num_hidden_layers": 30,
        "num_key_value_heads": 2,
        "rope_theta": 999999.4420358813,
        "sliding_window": 4096,
        "transformers_version": "4.37.0.dev0",
        "use_bias": True,
        "use_cache": True,
        "vocab_size": 49152,
    },
    ("smollm3", "3B"): {
        "architectures": ["SmolLM3ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 65536,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    ("gpt2", "124M"): {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    ("mamba", "130M"): {
        "architectures": ["MambaForCausalLM"],
        "bos_token_id": 0,
        "conv_kernel": 4,
        "d_inner": 1536,
        "d_model": 768,
        "eos_token_id": 0,
        "expand": 2,
        "fused_add_norm": True,
        "hidden_act": "silu",
        "hidden_size": 768,
        "initializer_range": 0.1,
        "intermediate_size": 1536,
        "layer_norm_epsilon": 1e-05,
        "model_type": "mamba",
        "n_layer": 24,
        "num_hidden_layers": 24,
        "pad_token_id": 0,
        "pad_vocab_size_multiple": 8,
        "rescale_prenorm_residual": False,
        "residual_in_fp32": True,
        "rms_norm": True,
        "ssm_cfg": {},
        "state_size": 16,
        "time_step_floor": 0.0001,
        "time_step_init_scheme": "random",
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "time_step_rank": 48,
        "time_step_scale": 1.0,
        "torch_dtype": "float32",
        "transformers_version": "4.39.0.dev0",
        "use_bias": False,
        "use_cache": True,
        "use_conv_bias": True,
        "vocab_size": 50280,
    },
    ("mixtral", "8x7B"): {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    ("qwen2_moe", "57B-A14B"): {
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 2560,
        "norm_topk_prob": False,
        "num_attention_heads": 28,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 20480,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    ("qwen3_moe", "30B-A3B"): {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    ("deepseek_v3", "16B"): {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "aux_loss_alpha": 0.001,
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 11264,
        "kv_lora_rank": 512,
        "max_position_embeddings": 8192,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.46.3",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
}


@pytest.mark.parametrize(("name", "flavor"), PUBLISHED)
def test_a_published_config_json_is_read_as_the_flavor_of_its_name(
    name: str, flavor: str, tmp_path: Path
) -> None:
    content = PUBLISHED[name, flavor]
    assert read(tmp_path, content) == FLAVORS[name][flavor]
    assert model_config("auto", "debugmodel", {}, str(tmp_path)) == FLAVORS[name][flavor]


def test_overrides_apply_on_top_of_a_config_json(tmp_path: Path) -> None:
    write(tmp_path, full_content("qwen2"))
    config = model_config("auto", "debugmodel", {"num_hidden_layers": 1}, str(tmp_path))
    assert config == dataclasses.replace(config_from_hf(tmp_path, key=KEY), num_hidden_layers=1)


def test_all_mistakes_of_an_automatic_model_are_told_at_once(tmp_path: Path) -> None:
    write(tmp_path, {**full_content("qwen2"), "sandwich_norm": True, "hidden_act": 3})
    with pytest.raises(ConfigError) as refused:
        model_config("auto", "debugmodel", {"qk_norms": True, "vocab_size": 1.5}, str(tmp_path))
    lines = str(refused.value).splitlines()
    start = f"model.hf_assets_path = '{tmp_path}': {tmp_path / 'config.json'}: "
    assert [line.startswith(start) for line in lines] == [True, True, False, False]
    assert "hidden_act" in lines[0] and "sandwich_norm" in lines[1]
    assert lines[2].startswith("model.overrides.qk_norms") and "vocab_size" in lines[3]


def test_an_unknown_name_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'auto'"):
        model_config("autp", "debugmodel", {}, str(tmp_path))
    with pytest.raises(ConfigError, match="model.flavor = '7B-v0.2': unknown; did you mean '7B"):
        model_config("mistral", "7B-v0.2", {}, str(tmp_path))


@pytest.mark.parametrize(
    ("field", "value"), [("sliding_window", 4), ("rope_scaling", ROPE_SCALING), ("rope_theta", 7)]
)
def test_an_override_of_each_type_is_taken(field: str, value: Any) -> None:
    assert getattr(model_config("llama3", "debugmodel", {field: value}, ""), field) == value


# --- written ----------------------------------------------------------------------------------


def written(config: ModelConfig) -> dict[str, Any]:
    return config_to_hf(config, dtype="bfloat16", bos_token_id=1, eos_token_id=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_builds_the_same_model_from_what_is_written(
    family: str, tmp_path: Path
) -> None:
    import transformers

    theirs = hf_model(tiny_hf_config(family))
    ours = ours_from(theirs).config
    write(tmp_path, written(ours))
    assert config_from_hf(tmp_path, key=KEY) == ours
    config = transformers_config(tmp_path)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, None)
    assert config.dtype == torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert type(model) is type(theirs) and [type(model).__name__] == config.architectures
    model.load_state_dict(theirs.state_dict())
    tokens = some_tokens()
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, theirs(tokens).logits)
    config.save_pretrained(tmp_path)
    assert config_from_hf(tmp_path, key=KEY) == ours


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_a_rescaled_model_is_written_so_that_transformers_computes_the_same(
    scaling: dict[str, Any], family: str, tmp_path: Path
) -> None:
    theta = {"rope_theta": 5e5}
    changes = {"max_position_embeddings": 12, "rope_parameters": {**scaling, **theta}}
    config = ours_from(hf_model(tiny_hf_config(family, **changes))).config
    assert config.rope_scaling == scaling
    content = written(config)
    assert read(tmp_path, content) == config
    assert transformers_config(tmp_path).rope_parameters.items() >= {**scaling, **theta}.items()
    assert_same_logits(tmp_path, content, config)


def test_the_weights_are_loaded_in_the_precision_that_is_written(tmp_path: Path) -> None:
    import transformers

    theirs = hf_model(tiny_hf_config("llama"))
    theirs.bfloat16().save_pretrained(tmp_path)
    write(tmp_path, written(ours_from(theirs).config))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16


def test_every_flavor_can_be_written(tmp_path: Path) -> None:
    for config in (config for flavors in FLAVORS.values() for config in flavors.values()):
        assert read(tmp_path, written(config)) == config


def test_biases_on_some_projections_of_attention_are_refused_by_name() -> None:
    """Llama has them on all four or on none."""
    config = dataclasses.replace(FLAVORS["llama3"]["debugmodel"], attention_bias=True)
    with pytest.raises(ConfigError, match="attention_out_bias = False: .* only True"):
        written(config)


def test_what_is_written_is_no_part_of_the_model(tmp_path: Path) -> None:
    """transformers adds rope_theta to the table of rotary options that it is given."""
    config = FLAVORS["llama3"]["8B"]
    written(config)["rope_scaling"]["rope_theta"] = 5.0
    assert config.rope_scaling is not None and "rope_theta" not in config.rope_scaling


def test_what_acts_in_training_only_may_be_lost() -> None:
    config = dataclasses.replace(
        FLAVORS["llama3"]["debugmodel"], residual_dropout=0.1, embedding_dropout=0.1
    )
    assert "residual_dropout" not in written(config)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama3", {"qk_norm": True}),
        ("llama3", {"sliding_window": 64}),
        ("llama3", {"norm_type": "layer", "learned_positions": True}),
        ("mistral", {"max_window_layers": 2}),
        ("qwen2", {"attention_out_bias": True}),
        ("qwen3", {"no_rope_layer_interval": 4}),
        ("starcoder2", {"mlp_bias": False}),
        ("smollm3", {"sliding_window": 64}),
        ("gpt2", {"num_key_value_heads": 4}),
        ("gpt2", {"head_dim": 16}),
        ("gpt2", {"rope_theta": 5e5}),
        ("mamba", {"hidden_act": "gelu"}),
    ],
    ids=lambda value: str(value),
)
def test_what_the_family_cannot_say_is_refused_by_name(name: str, changes: dict[str, Any]) -> None:
    config = dataclasses.replace(FLAVORS[name]["debugmodel"], **changes)
    with pytest.raises(ConfigError) as refused:
        written(config)
    lines = str(refused.value).splitlines()
    assert {line.split(" ")[0] for line in lines} == set(changes)


def test_a_model_of_no_family_and_one_that_transformers_refuses_are_refused() -> None:
    with pytest.raises(ConfigError, match="model_type = '': .* choose from llama, mistral"):
        written(ModelConfig())
    with pytest.raises(ConfigError, match="hidden_size 256 is not a multiple of 6"):
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
        written(dataclasses.replace(FLAVORS["llama3"]["debugmodel"], **heads))  # type: ignore[arg-type]


@pytest.mark.parametrize(("layers", "interval"), [(2, 4), (3, 0), (3, 1), (8, 4), (3, 3)])
def test_every_interval_of_layers_that_do_not_rotate_comes_back(
    layers: int, interval: int, tmp_path: Path
) -> None:
    config = dataclasses.replace(
        FLAVORS["smollm3"]["debugmodel"], num_hidden_layers=layers, no_rope_layer_interval=interval
    )
    content = written(config)
    rotates = [interval == 0 or (i + 1) % interval != 0 for i in range(layers)]
    assert content["no_rope_layers"] == rotates
    assert read(tmp_path, content) == config
    assert transformers_config(tmp_path).no_rope_layers == rotates


def test_a_key_is_of_one_kind() -> None:
    for family in map(family_of, (ModelConfig(model_type=name) for name in FAMILIES)):
        kinds = [*family.keys, *family.fixed, *family.harmless.split(), *FIXED, *HARMLESS.split()]
        assert len(kinds) == len(set(kinds)), family.model_type

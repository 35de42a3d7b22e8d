"""Each flavor has exactly as many parameters as the released model of that name.

Counted on the meta device, without the rows that pad the vocabulary. The published numbers are
those of the safetensors index of each release: total_size / 2 bytes. A tied head is counted once.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.families import FLAVORS

PUBLISHED = {
    ("llama3", "1B"): 1_235_814_400,
    ("llama3", "3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("llama2", "7B"): 6_738_415_616,
    ("llama2", "13B"): 13_015_864_320,
    ("llama2", "70B"): 68_976_648_192,
}


def num_parameters(config: ModelConfig) -> int:
    """Of the model as published: every parameter once, padded rows not at all."""
    with torch.device("meta"):
        model = Decoder(config)
    padding = config.padded_vocab_size - config.vocab_size
    tables = 1 if config.tie_word_embeddings else 2
    return sum(p.numel() for p in model.parameters()) - tables * padding * config.hidden_size


def by_formula(config: ModelConfig) -> int:
    """The same by hand, from the shapes in the Llama papers."""
    hidden, width = config.hidden_size, config.head_dim
    attention = 2 * hidden * width * (config.num_attention_heads + config.num_key_value_heads)
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    tables = 1 if config.tie_word_embeddings else 2
    return config.num_hidden_layers * layer + tables * config.vocab_size * hidden + hidden


def test_every_flavor_but_the_laptops_has_a_published_number() -> None:
    ours = {(name, flavor) for name, flavors in FLAVORS.items() for flavor in flavors}
    assert ours - set(PUBLISHED) == {("llama3", "debugmodel")}


@pytest.mark.parametrize(("name", "flavor"), PUBLISHED)
def test_a_flavor_has_the_published_number_of_parameters(name: str, flavor: str) -> None:
    config = FLAVORS[name][flavor]
    assert num_parameters(config) == PUBLISHED[name, flavor] == by_formula(config)


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


def test_the_rotary_frequencies_are_those_of_each_release() -> None:
    """What a count of parameters cannot see, from each release's config.json."""
    for flavor, config in FLAVORS["llama3"].items():
        if flavor == "debugmodel":
            continue
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


def test_the_laptops_flavor_has_about_six_million() -> None:
    assert 5.5e6 < num_parameters(FLAVORS["llama3"]["debugmodel"]) < 6.5e6

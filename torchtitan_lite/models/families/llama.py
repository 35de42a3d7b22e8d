"""Llama 2, 3 and 3.1 to 3.3: the sizes published by Meta, and one for a laptop.

From the config.json of each release. Llama 3.1 stretched the context of Llama 3 by rescaling the
slow rotary frequencies; the 1B and 3B of 3.2 tie head and embedding. A 3.3 70B has the shape of
the 3.1 70B.
"""

from __future__ import annotations

from typing import Any

from torchtitan_lite.models.config import ModelConfig


def _llama3(*, rope_factor: float, **fields: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        **fields,
    )


def _llama2(**fields: Any) -> ModelConfig:
    return ModelConfig(vocab_size=32000, max_position_embeddings=4096, head_dim=128, **fields)


FLAVORS: dict[str, dict[str, ModelConfig]] = {
    "llama3": {
        # 5.8 million parameters, for the text and the tokenizer that ship with the repository.
        "debugmodel": ModelConfig(rope_theta=500000.0),
        "1B": _llama3(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            tie_word_embeddings=True,
            rope_factor=32.0,
        ),
        "3B": _llama3(
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=28,
            num_attention_heads=24,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
            rope_factor=32.0,
        ),
        "8B": _llama3(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            rope_factor=8.0,
        ),
        "70B": _llama3(
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            rope_factor=8.0,
        ),
        "405B": _llama3(
            hidden_size=16384,
            intermediate_size=53248,
            num_hidden_layers=126,
            num_attention_heads=128,
            num_key_value_heads=8,
            head_dim=128,
            rope_factor=8.0,
        ),
    },
    "llama2": {
        "7B": _llama2(
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
        ),
        "13B": _llama2(
            hidden_size=5120,
            intermediate_size=13824,
            num_hidden_layers=40,
            num_attention_heads=40,
            num_key_value_heads=40,
        ),
        "70B": _llama2(
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
        ),
    },
}

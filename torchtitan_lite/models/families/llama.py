"""Llama 2, 3 and 3.1 to 3.3: the sizes published by Meta, and one for a laptop.

From the config.json of each release. Llama 3.1 stretched the context of Llama 3 by rescaling the
slow rotary frequencies; the 1B and 3B of 3.2 tie head and embedding. A 3.3 70B has the shape of
the 3.1 70B.
"""

from torchtitan_lite.models.families.family import (
    DEBUG,
    Family,
    Key,
    Values,
    attention_keys,
    head_dim,
)

# Attention has biases on all four projections, or on none.
BIASES = {"attention_bias": Key("attention_bias attention_out_bias", False), "mlp_bias": False}


def _read(known: Values) -> Values:
    head_dim(known)  # transformers wants there to be one, even where the key head_dim goes first
    return {}


def _rope(factor: float) -> Values:
    turns = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    table = {"rope_type": "llama3", "factor": factor, **turns}
    return {"rope_scaling": {**table, "original_max_position_embeddings": 8192}}


_LLAMA2 = {"vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_LLAMA3 = {"vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
_LLAMA3 |= {"rope_theta": 500000.0, **_rope(8.0)}
_TIED = {**_rope(32.0), "tie_word_embeddings": True}
_SIZES3 = {  # layers, hidden, intermediate, heads, key/value heads
    "debugmodel": (*DEBUG, {"rope_scaling": None}),
    "1B": (16, 2048, 8192, 32, 8, _TIED),
    "3B": (28, 3072, 8192, 24, 8, _TIED),
    "8B": (32, 4096, 14336, 32, 8),
    "70B": (80, 8192, 28672, 64, 8),
    "405B": (126, 16384, 53248, 128, 8),
}
_SIZES2 = {
    "7B": (32, 4096, 11008, 32, 32),
    "13B": (40, 5120, 13824, 40, 40),
    "70B": (80, 8192, 28672, 64, 8),
}
LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    attention_keys({"max_position_embeddings": 2048, **BIASES}),
    fixed={"pretraining_tp": 1},
    read=_read,
    sizes={"llama3": (_LLAMA3, _SIZES3), "llama2": (_LLAMA2, _SIZES2)},
)

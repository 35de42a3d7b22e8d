"""Qwen2, with biases on q, k and v, and Qwen3, with a norm of each head of q and k instead.

The sizes of qwen2 are those of the Qwen2.5 base models (arXiv:2412.15115), of qwen3 those of
arXiv:2505.09388. Both can have a sliding window on the layers from `max_window_layers` on, which
no published size uses.
"""

from dataclasses import replace

from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.families.family import DEBUG, Family, Values, attention_keys, number_of
from torchtitan_lite.models.families.llama import BIASES


def _read(known: Values) -> Values:
    """The window acts with use_sliding_window only; layer_types goes before max_window_layers."""
    window = known["sliding_window"] if known["use_sliding_window"] else None

    def layer_types(first: int) -> list[str]:
        is_full = [window is None or i < first for i in range(known["num_hidden_layers"])]
        return ["full_attention" if full else "sliding_attention" for full in is_full]

    first = number_of(layer_types, known, "layer_types", known["max_window_layers"])
    return {"sliding_window": window, "max_window_layers": 0 if window is None else first}


def _write(config: ModelConfig) -> Values:
    return {"use_sliding_window": config.sliding_window is not None}


_KEYS: Values = {"max_position_embeddings": 32768, "max_window_layers": 28, "layer_types": None}
_KEYS |= {"sliding_window": 4096, "use_sliding_window": False}
_KEYS3 = {**_KEYS, "head_dim": 128, "attention_bias": BIASES["attention_bias"]}
_COMMON = {"vocab_size": 151936, "rope_theta": 1e6}
_TIED = {"tie_word_embeddings": True}
_LONG = {"max_position_embeddings": 131072}
_LARGE = {"vocab_size": 152064, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
_SIZES2 = {  # layers, hidden, intermediate, heads, key/value heads
    "debugmodel": DEBUG,
    "0.5B": (24, 896, 4864, 14, 2, _TIED),
    "1.5B": (28, 1536, 8960, 12, 2, _TIED, _LONG),
    "3B": (36, 2048, 11008, 16, 2, _TIED),
    "7B": (28, 3584, 18944, 28, 4, _LARGE, {"rms_norm_eps": 1e-6}),
    "14B": (48, 5120, 13824, 40, 8, _LARGE),
    "32B": (64, 5120, 27648, 40, 8, _LARGE),
    "72B": (80, 8192, 29568, 64, 8, _LARGE),
}
_SIZES3 = {
    "debugmodel": (*DEBUG, {"head_dim": 32}),
    "0.6B": (28, 1024, 3072, 16, 8, _TIED),
    "1.7B": (28, 2048, 6144, 16, 8, _TIED),
    "4B": (36, 2560, 9728, 32, 8, _TIED),
    "8B": (36, 4096, 12288, 32, 8),
    "14B": (40, 5120, 17408, 40, 8),
    "32B": (64, 5120, 25600, 64, 8),
}
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    attention_keys(_KEYS, kv_heads=32),
    {"attention_bias": True},
    read=_read,
    write=_write,
    sizes={"qwen2": (_COMMON, _SIZES2)},
)
QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=attention_keys(_KEYS3, kv_heads=32),
    sets={"qk_norm": True},
    sizes={"qwen3": ({**_COMMON, "max_position_embeddings": 40960}, _SIZES3)},
)

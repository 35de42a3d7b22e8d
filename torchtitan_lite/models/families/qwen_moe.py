"""Qwen2-MoE, with a shared expert behind a gate, and Qwen3-MoE (arXiv:2505.09388), without one.

The sizes of qwen2_moe are Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B. Which layers are dense can be said
in two ways at once, a step and a list; here the first layers can be. A sliding window of Qwen2-MoE
is refused: transformers gives it to every other layer, and no published model uses it.
"""

from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.families.family import (
    DEBUG,
    Family,
    Key,
    Values,
    attention_keys,
    number_of,
)
from torchtitan_lite.models.families.llama import BIASES


def _num_dense(known: Values) -> Values:
    step, only = known["decoder_sparse_step"], known["mlp_only_layers"] or []
    layers = range(known["num_hidden_layers"])
    dense = [i for i in layers if i in only or step < 1 or (i + 1) % step]
    if dense != list(layers[: len(dense)]):
        raise ValueError(
            f"decoder_sparse_step = {step} with mlp_only_layers = {only}: only the first layers "
            "can have one MLP"
        )
    return {"first_k_dense_replace": len(dense)}


def _read2(known: Values) -> Values:
    layers = known["num_hidden_layers"]
    number_of(lambda _: ["full_attention"] * layers, known, "layer_types", 0)
    return _num_dense(known)


def _read3(known: Values) -> Values:
    window = known["sliding_window"] if known["use_sliding_window"] else None
    return {"sliding_window": window, **_num_dense(known)}


def _write(config: ModelConfig) -> Values:
    return {"mlp_only_layers": list(range(config.first_k_dense_replace))}


def _write3(config: ModelConfig) -> Values:
    return {"use_sliding_window": config.sliding_window is not None, **_write(config)}


_KEYS: Values = {"max_position_embeddings": 32768, "norm_topk_prob": False}
_KEYS |= {"decoder_sparse_step": 1, "mlp_only_layers": None}
_KEYS2 = {**_KEYS, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
_KEYS2 |= {"shared_expert_intermediate_size": 5632, "qkv_bias": Key("attention_bias", True)}
_KEYS2 |= {"layer_types": None}
_KEYS3 = {**_KEYS, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_KEYS3 |= {"sliding_window": 4096, "use_sliding_window": False}
_KEYS3 |= {"attention_bias": BIASES["attention_bias"]}
_HARMLESS = "output_router_logits router_aux_loss_coef max_window_layers"
_COMMON = {"vocab_size": 151936, "rope_theta": 1e6}
_SMALL = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_57B = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560}
_57B |= {"shared_expert_intermediate_size": 20480, "max_position_embeddings": 131072}
_235B = {"moe_intermediate_size": 1536}
_SIZES2 = {  # layers, hidden, intermediate, heads, key/value heads
    "debugmodel": (*DEBUG, _SMALL, {"shared_expert_intermediate_size": 128}),
    "A2.7B": (24, 2048, 5632, 16, 16, {"max_position_embeddings": 8192}),
    "57B-A14B": (28, 3584, 18944, 28, 4, _57B),
}
_SIZES3 = {
    "debugmodel": (*DEBUG, _SMALL, {"head_dim": 32}),
    "30B-A3B": (48, 2048, 6144, 32, 4),
    "235B-A22B": (94, 4096, 12288, 64, 4, _235B),
}
_COMMON3 = {**_COMMON, "max_position_embeddings": 40960, "head_dim": 128, "norm_topk_prob": True}
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    attention_keys(_KEYS2, kv_heads=16),
    {"shared_expert_gate": True},
    {"use_sliding_window": False},
    harmless=f"{_HARMLESS} sliding_window",
    read=_read2,
    write=_write,
    sizes={"qwen2_moe": (_COMMON, _SIZES2)},
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    attention_keys(_KEYS3, kv_heads=4),
    {"qk_norm": True},
    aliases={"num_local_experts": "num_experts"},
    harmless=_HARMLESS,
    read=_read3,
    write=_write3,
    sizes={"qwen3_moe": (_COMMON3, _SIZES3)},
)

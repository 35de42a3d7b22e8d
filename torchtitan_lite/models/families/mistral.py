"""Mistral 7B (arXiv:2310.06825): Llama, and in v0.1 a query sees 4,096 keys."""

from torchtitan_lite.models.families.family import DEBUG, Family, attention_keys

_COMMON = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
_V3 = {"vocab_size": 32768, "rope_theta": 1e6, "sliding_window": None}
_SIZES = {  # layers, hidden, intermediate, heads, key/value heads
    "debugmodel": (*DEBUG, {"sliding_window": 256}),
    "7B-v0.1": (32, 4096, 14336, 32, 8, {"vocab_size": 32000}),
    "7B-v0.3": (32, 4096, 14336, 32, 8, _V3),
}
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    attention_keys({"max_position_embeddings": 131072, "sliding_window": 4096}, kv_heads=8),
    sizes={"mistral": (_COMMON, _SIZES)},
)

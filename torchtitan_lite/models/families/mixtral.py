"""Mixtral (arXiv:2401.04088): Mistral whose MLP is eight experts of the full width, two a token."""

from torchtitan_lite.models.families.family import DEBUG, Family, Key, Values, attention_keys

_KEYS: Values = {"max_position_embeddings": 131072, "sliding_window": None, "rope_theta": 1e6}
_KEYS |= {"intermediate_size": Key("intermediate_size moe_intermediate_size")}
_KEYS |= {"num_local_experts": Key("num_experts", 8), "num_experts_per_tok": 2}
_KEYS |= {"rms_norm_eps": 1e-5}
_SIZES = {  # layers, hidden, intermediate, heads, key/value heads
    "debugmodel": (*DEBUG, {"intermediate_size": 128}),
    "8x7B": (32, 4096, 14336, 32, 8),
    "8x22B": (56, 6144, 16384, 48, 8, {"max_position_embeddings": 65536}),
}
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    attention_keys(_KEYS, kv_heads=8),
    {"norm_topk_prob": True},
    {"router_jitter_noise": 0.0},
    aliases={"num_experts": "num_local_experts"},
    harmless="output_router_logits router_aux_loss_coef",
    modules="layers.*.mlp.gate=layers.*.block_sparse_moe.gate "
    "layers.*.mlp.experts.#.gate_proj=layers.*.block_sparse_moe.experts.#.w1 "
    "layers.*.mlp.experts.#.down_proj=layers.*.block_sparse_moe.experts.#.w2 "
    "layers.*.mlp.experts.#.up_proj=layers.*.block_sparse_moe.experts.#.w3",
    sizes={"mixtral": ({"vocab_size": 32000, "max_position_embeddings": 32768}, _SIZES)},
)

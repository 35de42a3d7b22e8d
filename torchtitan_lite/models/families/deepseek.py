"""DeepSeek-V3 (arXiv:2412.19437): latent attention, sigmoid routing that a bias balances.

16B is Moonlight-16B-A3B (arXiv:2502.16982). The released 671B is no flavor: its weights are float8.

`auto_map` names the authors' own code, older than that of transformers. A layer past the last
predicts a second token in training; the logits do not need it.
"""

from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.families.family import DEBUG, Family, Key, Values, attention_keys
from torchtitan_lite.models.families.llama import BIASES


def _read(known: Values) -> Values:
    rope, heads = known["qk_rope_head_dim"], known["num_attention_heads"]
    wanted = {"head_dim": rope, "qk_head_dim": known["qk_nope_head_dim"] + rope}
    for name, value in {**wanted, "num_key_value_heads": heads}.items():
        if known[name] not in (None, value):
            raise ValueError(f"{name} = {known[name]}: it must be {value}, as other keys say")
    if known["n_shared_experts"] < 1:
        raise ValueError(f"n_shared_experts = {known['n_shared_experts']}: it must be 1 or more")
    width = known["n_shared_experts"] * known["moe_intermediate_size"]
    return {"shared_expert_intermediate_size": width}


def _write(config: ModelConfig) -> Values:
    shared = config.shared_expert_intermediate_size // config.moe_intermediate_size
    return {"n_shared_experts": shared, "qk_rope_head_dim": config.head_dim}


def _rope_width(known: Values) -> int:
    return known["qk_rope_head_dim"]


_KEYS: Values = {"max_position_embeddings": 4096, "attention_bias": BIASES["attention_bias"]}
_KEYS |= {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128}
_KEYS |= {"head_dim": Key("head_dim", None, _rope_width), "qk_rope_head_dim": 64}
_KEYS |= {"qk_head_dim": Key(default=None, kind="int | None"), "rope_interleave": True}
_KEYS |= {"n_routed_experts": Key("num_experts", 256), "num_experts_per_tok": 8}
_KEYS |= {"n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3}
_KEYS |= {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
_FIXED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
_AUTO_MAP = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
_UNGROUPED: Values = {
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
}
_SMALL: Values = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_SMALL |= {"q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
_SMALL |= {"v_head_dim": 32, "num_key_value_heads": 8, "routed_scaling_factor": 1.0}
_16B: Values = {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2}
_16B |= {"moe_intermediate_size": 1408, "routed_scaling_factor": 2.446, "q_lora_rank": None}
_16B |= {"vocab_size": 163840, "max_position_embeddings": 8192, "rope_theta": 50000.0}
_SIZES = {  # layers, hidden, intermediate, heads, key/value heads
    "debugmodel": (*DEBUG, _SMALL),
    "16B": (27, 2048, 11264, 16, 16, _16B),
}
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    attention_keys(_KEYS, kv_heads=128),
    {"router_scores": "sigmoid", "router_bias": True},
    {**_FIXED, "auto_map": _AUTO_MAP},
    aliases={"num_local_experts": "n_routed_experts"},
    harmless="output_router_logits pretraining_tp aux_loss_alpha seq_aux ep_size "
    "num_nextn_predict_layers num_mtp_layers",
    read=_read,
    write=_write,
    modules="layers.*.mlp.shared_expert.gate_proj=layers.*.mlp.shared_experts.gate_proj "
    "layers.*.mlp.shared_expert.up_proj=layers.*.mlp.shared_experts.up_proj "
    "layers.*.mlp.shared_expert.down_proj=layers.*.mlp.shared_experts.down_proj",
    ignorable=("*rotary_emb.inv_freq", "lm_head.weight", "model.layers.{layers}.*"),
    sizes={"deepseek_v3": (_UNGROUPED, _SIZES)},
)

"""Starcoder2 (arXiv:2402.19173): LayerNorm, biases everywhere, no gate, 4,096 keys a query."""

from torchtitan_lite.models.families.family import DEBUG, Family, Key, Values, attention_keys

_BIASES = Key("attention_bias attention_out_bias mlp_bias", True)
_KEYS: Values = {"max_position_embeddings": 4096, "sliding_window": None}
_KEYS |= {"norm_epsilon": Key("rms_norm_eps", 1e-5), "use_bias": _BIASES}
_KEYS |= {"hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.018042}
_KEYS |= {"residual_dropout": 0.0, "embedding_dropout": 0.0, "tie_word_embeddings": True}
_COMMON = {"vocab_size": 49152, "max_position_embeddings": 16384, "sliding_window": 4096}
_DROPS = {"attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1}
_15B = {"rope_theta": 1e5, "initializer_range": 0.01275, "tie_word_embeddings": False}
_SIZES = {  # layers, hidden, intermediate, heads, key/value heads
    "debugmodel": (*DEBUG, {"intermediate_size": 1024, "sliding_window": 256}),
    "3B": (30, 3072, 12288, 24, 2, _DROPS, {"rope_theta": 999999.4420358813}),
    "7B": (32, 4608, 18432, 36, 4, _DROPS, {"rope_theta": 1e6}),
    "15B": (40, 6144, 24576, 48, 4, _DROPS, _15B),
}
STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    attention_keys(_KEYS, kv_heads=2, epsilon="norm_epsilon"),
    {"norm_type": "layer", "gated_mlp": False},
    # Of the code that the published models were trained with.
    harmless="activation_function attention_softmax_in_fp32 layer_norm_epsilon mlp_type norm_type "
    "scale_attention_softmax_in_fp32 scale_attn_weights",
    modules="layers.*.mlp.up_proj=layers.*.mlp.c_fc layers.*.mlp.down_proj=layers.*.mlp.c_proj",
    sizes={"starcoder2": (_COMMON, _SIZES)},
)

"""GPT-2: learned positions, LayerNorm, biases everywhere, no gate, head tied.

Its linears are Conv1D: weights lie as (in, out), transposed to ours, and c_attn holds q, k and v
side by side:

                    q        k        v         out -->
    c_attn.weight  [0 : d  | d : 2d | 2d : 3d]   in: d rows
"""

from collections.abc import Sequence

from torchtitan_lite.models.families.family import Box, Family, Key, Values, head_dim, table


def _place(name: str, shape: Sequence[int]) -> tuple[Box, bool]:
    parts = ("q_proj", "k_proj", "v_proj")
    first = sum(number * shape[0] for number, part in enumerate(parts) if part in name)
    rows, columns = slice(first, first + shape[0]), [slice(0, size) for size in shape[1:]]
    if name.endswith("_proj.weight"):
        return (*columns, rows), True
    return (rows, *columns), False


_KEYS: Values = {
    "n_embd": Key("hidden_size"),
    "n_layer": Key("num_hidden_layers"),
    "n_head": Key("num_attention_heads num_key_value_heads"),
    "n_inner": Key("intermediate_size", None, lambda known: 4 * known["n_embd"]),
    "n_positions": Key("max_position_embeddings", 1024),
    "activation_function": Key("hidden_act", "gelu_new"),
    "layer_norm_epsilon": Key("rms_norm_eps", 1e-5),
    "attn_pdrop": Key("attention_dropout", 0.1),
    "resid_pdrop": Key("residual_dropout", 0.1),
    "embd_pdrop": Key("embedding_dropout", 0.1),
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
_BIASES = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}
_FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
_DEBUG = {"vocab_size": 2048, "n_positions": 2048}
_SIZES = {  # layers, hidden, heads
    "debugmodel": (6, 256, 8, _DEBUG, {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "124M": (12, 768, 12),
    "355M": (24, 1024, 16),
    "774M": (36, 1280, 20),
    "1558M": (48, 1600, 25),
}
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    table("vocab_size", _KEYS),
    {"norm_type": "layer", "learned_positions": True, "gated_mlp": False, **_BIASES},
    {**_FIXED, "reorder_and_upcast_attn": False, "add_cross_attention": False},
    harmless="n_ctx n_special predict_special_tokens output_past summary_activation "
    "summary_first_dropout summary_proj_to_labels summary_type summary_use_proj",
    read=lambda known: {"head_dim": head_dim(known)},
    prefix="transformer.",
    modules="embed_tokens=wte embed_positions=wpe norm=ln_f "
    "layers.*.input_layernorm=h.*.ln_1 layers.*.post_attention_layernorm=h.*.ln_2 "
    "layers.*.self_attn.q_proj=h.*.attn.c_attn layers.*.self_attn.k_proj=h.*.attn.c_attn "
    "layers.*.self_attn.v_proj=h.*.attn.c_attn layers.*.self_attn.o_proj=h.*.attn.c_proj "
    "layers.*.mlp.up_proj=h.*.mlp.c_fc layers.*.mlp.down_proj=h.*.mlp.c_proj",
    place=_place,
    ignorable=("*.attn.bias", "*.attn.masked_bias", "lm_head.weight"),  # masks, of old versions
    columns="n_layer n_embd n_head",
    sizes={"gpt2": ({"vocab_size": 50257}, _SIZES)},
)

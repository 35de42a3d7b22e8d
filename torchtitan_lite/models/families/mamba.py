"""Mamba (arXiv:2312.00752): a state-space mixer in every layer, no attention, no MLP, head tied."""

from torchtitan_lite.models.families.family import Family, Key, Values, table


def _width(known: Values) -> int:
    return known["expand"] * known["hidden_size"]


def _rank(known: Values) -> int:
    return -(-known["hidden_size"] // 16)


_KEYS: Values = {"expand": 2, "intermediate_size": Key("intermediate_size", None, _width)}
_KEYS |= {"time_step_rank": Key("time_step_rank", "auto", _rank), "state_size": 16}
_KEYS |= {"use_bias": Key("state_space_bias", False), "use_conv_bias": Key("conv_bias", True)}
_KEYS |= {"layer_norm_epsilon": Key("rms_norm_eps", 1e-5), "residual_in_fp32": True}
_KEYS |= {"conv_kernel": 4, "initializer_range": 0.1, "tie_word_embeddings": True}
_SIZES = {  # layers, hidden
    "debugmodel": (12, 256, {"vocab_size": 2048, "initializer_range": 0.02}),
    "130M": (24, 768),
    "370M": (48, 1024),
    "790M": (48, 1536),
    "1.4B": (48, 2048),
    "2.8B": (64, 2560),
}
MAMBA = Family(
    "mamba",
    "MambaForCausalLM",
    table("vocab_size hidden_size num_hidden_layers", _KEYS),
    {"layer_type": "state_space"},
    {"hidden_act": "silu"},
    # How fresh weights are drawn, which kernel runs, and names of the authors' own code.
    harmless="time_step_scale time_step_min time_step_max time_step_init_scheme time_step_floor "
    "rescale_prenorm_residual use_mambapy use_associative_scan d_model d_inner n_layer "
    "numb_hidden_layers ssm_cfg rms_norm fused_add_norm pad_vocab_size_multiple",
    prefix="backbone.",
    modules="embed_tokens=embeddings norm=norm_f",
    columns="num_hidden_layers hidden_size",
    sizes={"mamba": ({"vocab_size": 50280}, _SIZES)},
)

"""What a decoder is made of: one dataclass, with Hugging Face's names.

The defaults are those of the plainest decoder (RMSNorm, rotary positions, gated MLP, no bias). A
family is a choice of values here; what cannot be said here is not built.

Nothing here imports torch: the configuration is checked against the model (heads against tp,
layers against stages) before anything heavy is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

# The vocabulary is padded to a multiple of this, whatever the mesh: the first cut of the
# embedding, over tp, is then even for every power of two up to 128, and a checkpoint written on
# one mesh has the shape that every other expects. Padded rows are zero and never predicted.
VOCABULARY_MULTIPLE = 128

# rope_type -> the entries that rope_scaling must have beside it; "yarn" may have more.
ROPE_TYPES = {
    "linear": "factor",
    "dynamic": "factor",
    "llama3": "factor original_max_position_embeddings low_freq_factor high_freq_factor",
    "yarn": "factor original_max_position_embeddings",
}
YARN_DEFAULTS: dict[str, Any] = {"beta_slow": 1, "beta_fast": 32, "truncate": True}
YARN_OPTIONS = (*YARN_DEFAULTS, "attention_factor", "mscale", "mscale_all_dim")

CHOICES = {
    "layer_type": ("attention", "state_space"),
    "norm_type": ("rms", "layer"),
    "hidden_act": ("silu", "gelu", "gelu_tanh"),
    "router_scores": ("softmax", "sigmoid"),
}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only model, in the names of a Hugging Face config.json."""

    model_type: str = ""
    """Hugging Face's name of the family; empty for a model of no family."""
    vocab_size: int = 2048
    """Number of token ids the model knows."""
    hidden_size: int = 256
    """Width of the residual stream."""
    intermediate_size: int = 768
    """Width of the MLP, or of a state-space mixer, between its projections."""
    num_hidden_layers: int = 6
    """Number of decoder layers."""
    max_position_embeddings: int = 2048
    """Longest sequence the model is meant for, in tokens."""
    tie_word_embeddings: bool = False
    """Whether lm_head and embed_tokens are one weight."""
    initializer_range: float = 0.02
    """Standard deviation of fresh weights."""
    layer_type: str = "attention"
    """What mixes tokens in a layer: "attention" (and an MLP), or "state_space"."""
    norm_type: str = "rms"
    """Norm before each block: "rms", or "layer" (LayerNorm with bias)."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square, or to the variance, before its root is taken."""

    # Attention
    num_attention_heads: int = 8
    """Number of query heads."""
    num_key_value_heads: int = 4
    """Number of key/value heads; query heads share them in equal groups."""
    head_dim: int = 32
    """Width of a head; not necessarily hidden_size / num_attention_heads."""
    attention_bias: bool = False
    """Whether q_proj, k_proj and v_proj have a bias."""
    attention_out_bias: bool = False
    """Whether o_proj has a bias."""
    qk_norm: bool = False
    """RMSNorm of each head of q and k before it is rotated."""
    sliding_window: int | None = None
    """Keys that a query sees, itself included; None: all before it."""
    max_window_layers: int = 0
    """The first so many layers see all keys whatever sliding_window says."""

    # Positions
    learned_positions: bool = False
    """Add an embedding of the position to the token's, instead of rotating heads."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """Rescaling of the rotary frequencies (models/rope.py): None, or a table with a rope_type,
    "linear", "dynamic", "llama3" or "yarn", and the numbers that it needs."""
    no_rope_layer_interval: int = 0
    """Every n-th layer, the n-th first, rotates nothing (NoPE); 0: all layers rotate."""

    # MLP
    hidden_act: str = "silu"
    """Activation: "silu", "gelu" or "gelu_tanh"."""
    gated_mlp: bool = True
    """down(act(gate(x)) * up(x)); otherwise down(act(up(x)))."""
    mlp_bias: bool = False
    """Whether the projections of the MLP have a bias."""

    # Multi-head latent attention (arXiv:2405.04434, section 2.1); head_dim is the rotated part
    kv_lora_rank: int | None = None
    """Width of the latent that keys and values are made from; None: ordinary attention."""
    q_lora_rank: int | None = None
    """Width of the latent that queries are made from; None: straight from the hidden states."""
    qk_nope_head_dim: int = 0
    """Width of the part of a query and a key that is not rotated."""
    v_head_dim: int = 0
    """Width of a value."""
    rope_interleave: bool = False
    """Whether neighbouring channels make a pair to rotate, instead of halves of a head."""

    # Mixture of experts
    num_experts: int = 0
    """Routed experts of a layer; 0: every layer has one MLP."""
    num_experts_per_tok: int = 2
    """Experts that a token goes to."""
    moe_intermediate_size: int = 256
    """Width of a routed expert."""
    first_k_dense_replace: int = 0
    """The first so many layers have one MLP."""
    shared_expert_intermediate_size: int = 0
    """Width of the expert that sees all tokens; 0: there is none."""
    shared_expert_gate: bool = False
    """Scale the shared expert by the sigmoid of a projection."""
    router_scores: str = "softmax"
    """What makes scores of logits: "softmax" or "sigmoid"."""
    norm_topk_prob: bool = False
    """Divide the weights of a token's experts by their sum."""
    routed_scaling_factor: float = 1.0
    """Factor on the weights of the routed experts."""
    router_bias: bool = False
    """Choose by scores plus a bias, which balancing moves and no gradient."""
    n_group: int = 1
    """Groups of experts; a token goes to experts of its best topk_group of them."""
    topk_group: int = 1
    """Groups that a token may go to."""

    # Dropout
    attention_dropout: float = 0.0
    """Share of the attention weights that training drops."""
    residual_dropout: float = 0.0
    """Share of what attention and MLP add to the residual stream that training drops."""
    embedding_dropout: float = 0.0
    """Share of the embedding's output that training drops."""

    # State space (arXiv:2312.00752)
    state_size: int = 16
    """Numbers in the state of a channel (N)."""
    conv_kernel: int = 4
    """Tokens that the convolution before the scan sees."""
    time_step_rank: int = 16
    """Rank of the projection to the step sizes."""
    state_space_bias: bool = False
    """Whether in_proj and out_proj have a bias."""
    conv_bias: bool = True
    """Whether the convolution has a bias."""
    residual_in_fp32: bool = False
    """Keep the residual stream in fp32 when the layers compute in less."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type != "int":
                continue
            value, least = getattr(self, field.name), 0 if field.default == 0 else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                what = "a positive integer" if least else "0 or more"  # 0: there is none of it
                raise ValueError(f"{field.name} is {value!r}; it must be {what}")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a number above 0")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                choice = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose from {choice}")
        for name in ("attention_dropout", "residual_dropout", "embedding_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more, below 1")
        if self.layer_type == "state_space":
            for name in ("attention_dropout", "residual_dropout", "num_experts", "kv_lora_rank"):
                if getattr(self, name):
                    raise ValueError(f"a state-space layer has no {name}; remove it")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}; it must be 1 or more")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        if self.num_experts:
            self._check_experts()
        if self.kv_lora_rank is not None:
            self._check_latent()
        self._check_rope_scaling()

    def _check_latent(self) -> None:
        for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; latent attention needs a positive one")
        for name in ("qk_norm", "no_rope_layer_interval", "learned_positions"):
            if getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)}; latent attention has no such")

    def _check_experts(self) -> None:
        if self.mlp_bias or not self.gated_mlp:
            raise ValueError("experts are gated and have no bias: mlp_bias False, gated_mlp True")
        if self.shared_expert_gate and not self.shared_expert_intermediate_size:
            raise ValueError(
                "shared_expert_gate is True, and shared_expert_intermediate_size is 0: there is "
                "no shared expert; set its width"
            )
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, and there are "
                f"{self.num_experts} experts; set it to at most {self.num_experts}"
            )
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            raise ValueError(
                f"n_group {self.n_group} must divide num_experts {self.num_experts}, and "
                f"topk_group {self.topk_group} be at most n_group"
            )
        if self.num_experts // self.n_group * self.topk_group < self.num_experts_per_tok:
            raise ValueError(
                f"topk_group {self.topk_group} of n_group {self.n_group} groups have fewer experts "
                f"than num_experts_per_tok {self.num_experts_per_tok}; raise topk_group"
            )
        if self.n_group > 1 and self.num_experts == self.n_group:
            raise ValueError(f"n_group {self.n_group} leaves one expert a group; it needs two")

    def _check_rope_scaling(self) -> None:
        if self.rope_scaling is None:
            return
        scaling = dict(self.rope_scaling)
        if self.learned_positions or self.layer_type == "state_space":
            raise ValueError(f"rope_scaling is {scaling}, and the model rotates nothing; remove it")
        kind = scaling.pop("rope_type", None)
        if kind not in list(ROPE_TYPES):
            choice = ", ".join(map(repr, ROPE_TYPES))
            raise ValueError(f"rope_scaling.rope_type is {kind!r}; choose from {choice}")
        needed = ROPE_TYPES[kind].split()
        if missing := [name for name in needed if name not in scaling]:
            raise ValueError(
                f"rope_scaling lacks {', '.join(missing)}; rope_type {kind!r} needs a number there"
            )
        for name, value in scaling.items():
            if name not in needed and (kind != "yarn" or name not in YARN_OPTIONS):
                raise ValueError(
                    f"rope_scaling.{name} is {value!r}; rope_type {kind!r} has no such, remove it"
                )
            if fault := _rope_fault(name, value):
                raise ValueError(f"rope_scaling.{name} is {value!r}; it must be {fault}")
        numbers = YARN_DEFAULTS | scaling
        order = "low_freq_factor high_freq_factor" if kind == "llama3" else "beta_slow beta_fast"
        low, high = order.split()
        if numbers[low] >= numbers[high]:
            raise ValueError(
                f"rope_scaling.{low} is {numbers[low]}; it must be below {high}, {numbers[high]}"
            )
        if kind == "dynamic" and self.head_dim < 4:
            raise ValueError(f"head_dim is {self.head_dim}; rope_type 'dynamic' needs 4 or more")
        if kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta is {self.rope_theta}; rope_type 'yarn' needs one above 1")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head: vocab_size rounded up to a multiple of 128."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def rope_follows_length(self) -> bool:
        """Whether the rotary frequencies of a row depend on its longest position."""
        return self.rope_scaling is not None and self.rope_scaling["rope_type"] == "dynamic"

    @property
    def has_dropout(self) -> bool:
        """Whether a training step drops anything."""
        return max(self.attention_dropout, self.residual_dropout, self.embedding_dropout) > 0

    def has_experts(self, index: int) -> bool:
        """Whether layer `index` has routed experts in the place of one MLP."""
        return self.num_experts > 0 and index >= self.first_k_dense_replace


def _rope_fault(name: str, value: Any) -> str:
    """What the value of an entry of rope_scaling must be; empty if it is."""
    if name == "truncate":
        return "" if isinstance(value, bool) else "true or false"
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if name == "factor":
        return "" if 1 <= number < math.inf else "a number of 1 or more"
    if name in ("mscale", "mscale_all_dim"):
        return "" if 0 <= number < math.inf else "a number of 0 or more"
    return "" if 0 < number < math.inf else "a number above 0"

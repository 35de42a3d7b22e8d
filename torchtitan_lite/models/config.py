"""What a decoder is made of: one dataclass, with Hugging Face's names.

Nothing here imports torch: the configuration is checked against the model (heads against tp,
layers against stages) before anything heavy is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# The vocabulary is padded to a multiple of this, whatever the mesh: the first cut of the
# embedding, over tp, is then even for every power of two up to 128, and a checkpoint written on
# one mesh has the shape that every other expects. Padded rows are zero and never predicted.
VOCABULARY_MULTIPLE = 128

LLAMA3_ROPE_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer, in the names of a Hugging Face config.json."""

    vocab_size: int = 2048
    """Number of token ids the model knows."""
    hidden_size: int = 256
    """Width of the residual stream."""
    intermediate_size: int = 768
    """Width of the MLP between its gate/up and down projections."""
    num_hidden_layers: int = 6
    """Number of decoder layers."""
    num_attention_heads: int = 8
    """Number of query heads."""
    num_key_value_heads: int = 4
    """Number of key/value heads; query heads share them in equal groups."""
    head_dim: int = 32
    """Width of a head; not necessarily hidden_size / num_attention_heads."""
    max_position_embeddings: int = 2048
    """Longest sequence the model is meant for, in tokens."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square before its root is taken."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """Rescaling of the rotary frequencies: None, or a table with rope_type = "llama3"."""
    tie_word_embeddings: bool = False
    """Whether lm_head and embed_tokens are one weight."""
    initializer_range: float = 0.02
    """Standard deviation of fresh weights."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a positive integer")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a number above 0")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        self._check_rope_scaling()

    def _check_rope_scaling(self) -> None:
        if self.rope_scaling is None:
            return
        kind = self.rope_scaling.get("rope_type")
        if kind != "llama3":
            raise ValueError(f"rope_scaling has rope_type {kind!r}; 'llama3' is the one there is")
        missing = [key for key in LLAMA3_ROPE_KEYS if key not in self.rope_scaling]
        if missing:
            raise ValueError(f"rope_scaling lacks {', '.join(missing)}")
        for key in LLAMA3_ROPE_KEYS:
            value = self.rope_scaling[key]
            if not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"rope_scaling.{key} is {value!r}; it must be a number above 0")
        if self.rope_scaling["low_freq_factor"] >= self.rope_scaling["high_freq_factor"]:
            raise ValueError("rope_scaling: low_freq_factor must be below high_freq_factor")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head: vocab_size rounded up to a multiple of 128."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

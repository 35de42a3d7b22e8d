"""The decoder: embed -> layers -> norm -> lm_head.

A pipeline stage is the same class with parts missing: `layers` is keyed by the layer's index in
the whole model and the ends may be None. So a parameter has the same name on every mesh, and a
checkpoint needs no map.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.layers import DecoderLayer, LMHead, RotaryEmbedding


class Decoder(nn.Module):
    """A decoder-only transformer, whole or one stage of it.

    `modules` names what this stage holds: "embed_tokens", "layers.3", "norm", "lm_head"; None is
    everything.
    """

    def __init__(self, config: ModelConfig, modules: Iterable[str] | None = None) -> None:
        super().__init__()
        held = set(module_names(config) if modules is None else modules)
        self.config = config
        self.embed_tokens = (
            nn.Embedding(config.padded_vocab_size, config.hidden_size)
            if "embed_tokens" in held
            else None
        )
        self.rotary = RotaryEmbedding(config)
        self.layers = nn.ModuleDict(
            {
                str(index): DecoderLayer(config)
                for index in range(config.num_hidden_layers)
                if f"layers.{index}" in held
            }
        )
        self.norm = (
            nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if "norm" in held else None
        )
        self.lm_head = LMHead(config) if "lm_head" in held else None
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make head and embedding one Parameter, where this stage holds both and they are tied."""
        if self.embed_tokens is not None and self.lm_head is not None and self.is_tied:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def is_tied(self) -> bool:
        """Whether this stage holds head and embedding as one Parameter."""
        ends = self.embed_tokens is not None and self.lm_head is not None
        return ends and self.config.tie_word_embeddings

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """Token ids (batch, seq), or the previous stage's output (batch, seq, hidden).

        `positions` (batch, seq) default to 0, 1, 2, ... and must be given to a stage without the
        embedding, whose input may be a part of the sequence. Returns logits (batch, seq,
        vocab_size); with `labels` (batch, seq), the three sums of TokenLoss; without a head,
        hidden states.
        """
        if positions is None:
            assert self.embed_tokens is not None, "a later stage needs explicit positions"
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        cos, sin = self.rotary(positions)
        x = self.embed_tokens(tokens) if self.embed_tokens is not None else tokens
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        if self.norm is not None:
            x = self.norm(x)
        if self.lm_head is None:
            return x
        if labels is not None:
            return self.lm_head(x, labels)
        return self.lm_head(x)[..., : self.config.vocab_size]


def module_names(config: ModelConfig) -> list[str]:
    """The modules that pipeline stages are cut from, in the order of the forward pass."""
    layers = [f"layers.{index}" for index in range(config.num_hidden_layers)]
    return ["embed_tokens", *layers, "norm", "lm_head"]


def parameter_names(config: ModelConfig) -> list[str]:
    """The names of all parameters of the whole model, a tied head left out."""
    with torch.device("meta"):
        return [name for name, _ in Decoder(config).named_parameters()]

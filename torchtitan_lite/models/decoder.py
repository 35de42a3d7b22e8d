"""The decoder: embed -> layers -> norm -> lm_head.

A pipeline stage is the same class with parts missing: `layers` is keyed by the layer's index in
the whole model and the ends may be None. So a parameter has the same name on every mesh, and a
checkpoint needs no map.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Size, Tensor, nn

from torchtitan_lite.models.attention import Attention, Context, RowMask
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.latent import LatentAttention
from torchtitan_lite.models.layers import MLP, LMHead, build_norm
from torchtitan_lite.models.mamba import MambaLayer
from torchtitan_lite.models.moe import MoE
from torchtitan_lite.models.rope import RotaryEmbedding
from torchtitan_lite.ops.dropout import Dropout


class DecoderLayer(nn.Module):
    """Attention, and an MLP or experts, each behind a norm and beside the residual stream."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        attention = Attention if config.kv_lora_rank is None else LatentAttention
        self.input_layernorm = build_norm(config)
        self.self_attn = attention(config, index)
        self.post_attention_layernorm = build_norm(config)
        self.mlp = MoE(config) if config.has_experts(index) else MLP(config)
        self.attn_dropout = Dropout(config.residual_dropout, f"layers.{index}.self_attn")
        self.mlp_dropout = Dropout(config.residual_dropout, f"layers.{index}.mlp")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        out = self.self_attn(self.input_layernorm(x), context)
        x = x + self.attn_dropout(out, context.keys)
        out = self.mlp(self.post_attention_layernorm(x))
        return x + self.mlp_dropout(out, context.keys)


LAYERS = {"attention": DecoderLayer, "state_space": MambaLayer}


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
        self.embed_positions = (
            nn.Embedding(config.max_position_embeddings, config.hidden_size)
            if "embed_tokens" in held and config.learned_positions
            else None
        )
        self.embedding_dropout = Dropout(config.embedding_dropout, "embed_tokens")
        rotates = config.layer_type == "attention" and not config.learned_positions
        self.rotary = RotaryEmbedding(config) if rotates else None
        self.document_mask = False  # whether a position 0 begins a document that sees no other
        layer_kind = LAYERS[config.layer_type]
        self.layers = nn.ModuleDict(
            {
                str(index): layer_kind(config, index)
                for index in range(config.num_hidden_layers)
                if f"layers.{index}" in held
            }
        )
        self.norm = build_norm(config) if "norm" in held else None
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
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        labels: Tensor | None = None,
        keys: Tensor | None = None,
        row_mask: RowMask | None = None,
    ) -> Tensor:
        """Token ids (batch, seq), or the previous stage's output (batch, seq, hidden).

        `positions` (batch, seq) default to 0, 1, 2, ... and must be given to a stage without the
        embedding, whose input may be a part of the sequence. `keys` (batch,) are the randomness
        of dropout (ops/dropout.py); without them nothing is dropped. `row_mask` is that of
        whole rows, where `positions` are of a part. Returns logits (batch, seq, vocab_size); with
        `labels` (batch, seq), the three sums of TokenLoss; without a head, hidden states.
        """
        if positions is None:
            assert self.embed_tokens is not None, "a later stage needs explicit positions"
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        context = self._context(positions, keys, row_mask)
        x = tokens if self.embed_tokens is None else self._embed(tokens, positions, keys)
        for layer in self.layers.values():
            x = layer(x, context)
        if self.norm is not None:
            x = self.norm(x)
        if self.lm_head is None:
            return x
        if labels is not None:
            return self.lm_head(x, labels)
        return self.lm_head(x)[..., : self.config.vocab_size]

    def _context(self, positions: Tensor, keys: Tensor | None, mask: RowMask | None) -> Context:
        cos, sin = self.rotary(positions) if self.rotary is not None else (None, None)
        if mask is None:
            mask = RowMask.of(positions, documents=self.document_mask)
        return Context(cos, sin, positions if self.document_mask else None, mask, keys)

    def _embed(self, tokens: Tensor, positions: Tensor, keys: Tensor | None) -> Tensor:
        assert self.embed_tokens is not None
        x = self.embed_tokens(tokens)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        if self.config.residual_in_fp32:
            x = x.float()
        return self.embedding_dropout(x, keys)


def module_names(config: ModelConfig) -> list[str]:
    """The modules that pipeline stages are cut from, in the order of the forward pass."""
    layers = [f"layers.{index}" for index in range(config.num_hidden_layers)]
    return ["embed_tokens", *layers, "norm", "lm_head"]


def parameter_shapes(config: ModelConfig, modules: Iterable[str] | None = None) -> dict[str, Size]:
    """Name -> shape of the parameters of `modules` (None: all); a tied head is left out."""
    with torch.device("meta"):
        return {name: p.shape for name, p in Decoder(config, modules).named_parameters()}


def stored_shapes(config: ModelConfig) -> dict[str, Size]:
    """Name -> shape of what the weights of the whole model are on disk: a bias of balancing too."""
    with torch.device("meta"):
        model = Decoder(config)
    stored = {**dict(model.named_parameters()), **stored_buffers(model)}
    return {name: tensor.shape for name, tensor in stored.items()}


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the weights: not sums and counts of a step."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def exact_names(config: ModelConfig) -> set[str]:
    """Weights that stay in fp32 on disk: biases of balancing, whose steps half precision loses."""
    return stored_shapes(config).keys() - parameter_shapes(config).keys()


def matmul_parameters(config: ModelConfig) -> int:
    """Weights of a layer, of the last kind there is, that each token is multiplied with."""
    shapes = parameter_shapes(config, [f"layers.{config.num_hidden_layers - 1}"])
    dense = sum(s.numel() for name, s in shapes.items() if name.endswith("weight") and len(s) == 2)
    experts = sum(s[1:].numel() for name, s in shapes.items() if ".experts." in name)
    return dense + config.num_experts_per_tok * experts

"""Attention: which tokens see which, the softmax between them, and the projections around it.

What a token may see is told once for all layers, by a RowMask: itself and what stands before it in
its own document, and in some layers no further back than a window. The kernels want that in forms
of their own (models/backends.py), so each form is made when the first layer asks for it, and kept
for the others.

    documents    1 1 1 2 2        a query (row) sees the keys (columns) with an x
                 x                of token 0
                 x x
                 x x x
                       x          document 2 begins, and sees nothing of document 1
                       x x

softmax(q k^T) v is a submodule without parameters, `core_attention`, to which a plan can attach:
a cache (generate.py), or the exchange of tokens between ranks (parallel/context.py).
Proven in tests/models/: logits equal transformers' to 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_lite.models.backends import attend
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.layers import RMSNorm
from torchtitan_lite.models.rope import rotate
from torchtitan_lite.ops.dropout import Dropout


def document_numbers(positions: Tensor) -> Tensor:
    """(batch, seq) positions that restart at each document -> its number, rising along a row."""
    return (positions == 0).cumsum(1)


class RowMask:
    """Which keys each query sees: those up to itself, in its own document.

    documents: (batch or 1, keys), as of document_numbers; None: a row is one document. The queries
    are the last `num_queries` of the `num_keys` keys (None: all).
    """

    def __init__(
        self,
        documents: Tensor | None,
        *,
        num_keys: int,
        num_queries: int | None = None,
        device: torch.device,
    ) -> None:
        self.documents = documents
        self.num_keys, self.num_queries = num_keys, num_queries or num_keys
        self.device = device
        self._forms: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, positions: Tensor, *, documents: bool, num_queries: int | None = None) -> RowMask:
        """That of keys at (batch or 1, keys) positions; `documents`: a 0 begins one."""
        return cls(
            document_numbers(positions) if documents else None,
            num_keys=positions.shape[1],
            num_queries=num_queries,
            device=positions.device,
        )

    def form(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returned when `name` was first asked for."""
        if name not in self._forms:
            self._forms[name] = make()
        return self._forms[name]

    def dense(self, window: int | None) -> Tensor | None:
        """(batch or 1, 1, queries, keys) bool, or None: all keys up to the query itself.

        With a `window` a query sees at most so many keys, itself included.
        """
        if self.documents is None and (window is None or self.num_keys <= window):
            return None
        queries = slice(self.num_keys - self.num_queries, None)
        return self.form(("dense", window), lambda: self.between(queries, slice(None), window))

    def between(self, queries: slice, keys: slice, window: int | None) -> Tensor:
        """Which keys queries see, both by their places: (batch or 1, 1, queries, keys) bool."""
        places = torch.arange(self.num_keys, device=self.device)
        query, key = places[queries, None], places[keys]
        mask = (key <= query)[None]  # (1, queries, keys)
        if window is not None:
            mask = mask & (query - key < window)
        if self.documents is not None:
            mask = mask & (self.documents[:, queries, None] == self.documents[:, None, keys])
        return mask[:, None]


class Context(NamedTuple):
    """What every layer is told of the tokens, beside their hidden states."""

    cos: Tensor | None  # (batch, seq, 1, head_dim) fp32; None: nothing is rotated
    sin: Tensor | None
    positions: Tensor | None  # (batch, seq), restarting where documents are kept apart; else None
    mask: RowMask | None  # None: all up to itself
    keys: Tensor | None  # (batch,) int64, the randomness of each row; None: nothing is dropped


def window_of_layer(config: ModelConfig, index: int) -> int | None:
    """Keys that a query of layer `index` sees, itself included; None: all before it."""
    return config.sliding_window if index >= config.max_window_layers else None


class CoreAttention(nn.Module):
    """softmax(q k^T * scale) v; query heads share KV heads."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.window = window_of_layer(config, index)
        self.scale: float | None = None  # None: 1 / sqrt(head_dim)
        self.backend = "sdpa"  # of models/backends.py
        self.dropout = Dropout(config.attention_dropout, f"layers.{index}.attention")

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        row_mask: RowMask | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """q: (batch, heads, queries, head_dim), k and v: (batch, kv_heads, keys, head_dim).

        Without a mask it is causal; a single query then sees all keys. `keys` as in Context.
        """
        if keys is None or self.dropout.p == 0.0:
            rule: dict[str, Any] = {"window": self.window, "scale": self.scale}
            return attend(q, k, v, row_mask, **rule, backend=self.backend)
        # No fused kernel takes a mask that we draw.
        mask = None if row_mask is None else row_mask.dense(self.window)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scale = 1 / math.sqrt(q.shape[3]) if self.scale is None else self.scale
        scores = (q @ k.transpose(2, 3)).float() * scale
        if mask is None and q.shape[2] > 1:
            mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return self.dropout(scores.softmax(-1).type_as(v), keys) @ v


class Attention(nn.Module):
    """Causal self-attention with grouped KV heads."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        interval = config.no_rope_layer_interval
        self.rotates = not (interval and (index + 1) % interval == 0)
        hidden = config.hidden_size
        q_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, q_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_width, hidden, bias=config.attention_out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.core_attention = CoreAttention(config, index)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))  # (batch, seq, heads, head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates and context.cos is not None and context.sin is not None:
            q, k = (rotate(t, context.cos, context.sin) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, seq, head_dim)
        out = self.core_attention(q, k, v, context.mask, context.keys)
        return self.o_proj(out.transpose(1, 2).flatten(2))

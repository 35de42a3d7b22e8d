"""Kernels of attention, each with the form of the mask that it wants.

    model.attention_backend
    sdpa      torch's fused kernels: a dense mask, or none where rows are one document
    flex      flex_attention: which blocks of the scores are empty, full, or need the rule itself
    varlen    flash attention of documents that lie one behind the other: where each begins

A dense mask is seq x seq numbers, and the kernel computes what it hides; the other two pass over
it, so packed rows cost what their documents cost. All layers of a forward share one form.

On CPU the backward of sdpa in bf16 takes four to seven times what it takes in fp32
(docs/performance.md), so there what trains in bf16 goes through it in fp32.

These take whole rows. The few queries that follow a cache of keys always go through sdpa, which
runs everywhere. What flex and varlen cannot do is refused in config/model_checks.py.
Proven in tests/models/test_backends.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torchtitan_lite.ops.attention import per_head, sdpa_shares_heads

if TYPE_CHECKING:
    from torchtitan_lite.models.attention import RowMask

WIDTH_MULTIPLE = 8  # channels of a head, as varlen's kernel wants them


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_mask: RowMask | None,
    *,
    window: int | None,
    scale: float | None,
    backend: str = "sdpa",
) -> Tensor:
    """softmax(q k^T * scale) v through a backend.

    q: (batch, heads, queries, head_dim), k: (batch, kv_heads, keys, head_dim), v: (batch, kv_heads,
    keys, value_dim). A scale of None: 1 / sqrt(head_dim).
    """
    if backend == "sdpa" or row_mask is None or row_mask.num_queries != row_mask.num_keys:
        mask = None if row_mask is None else row_mask.dense(window)
        causal, grouped = mask is None and q.shape[2] > 1, q.shape[1] != k.shape[1]
        dtype = q.dtype
        # Not for fake tensors: what is counted with those is an accelerator's.
        on_cpu = q.device.type == "cpu" and not isinstance(q, FakeTensor)
        if on_cpu and dtype == torch.bfloat16 and q.requires_grad:
            q, k, v = q.float(), k.float(), v.float()
        width, masked = max(q.shape[3], v.shape[3]), mask is not None
        if grouped and not sdpa_shares_heads(q.device, q.dtype, width, masked=masked):
            k, v, grouped = per_head(k, q), per_head(v, q), False
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped, scale=scale
        ).to(dtype)
    return {"flex": _flex, "varlen": _varlen}[backend](q, k, v, row_mask, window, scale)


# --- blocks -----------------------------------------------------------------------------------


def _flex(
    q: Tensor, k: Tensor, v: Tensor, row_mask: RowMask, window: int | None, scale: float | None
) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    blocks = row_mask.form(("blocks", window), lambda: block_mask(row_mask, window, len(q)))
    grouped = q.shape[1] != k.shape[1]
    kernel = _fused(flex_attention, q.device)
    return kernel(q, k, v, block_mask=blocks, scale=scale, enable_gqa=grouped)


def block_mask(row_mask: RowMask, window: int | None, batch: int) -> Any:
    """The BlockMask of `batch` rows, for all heads."""
    from torch.nn.attention.flex_attention import create_block_mask

    documents = row_mask.documents
    if documents is not None:
        documents = documents.expand(batch, -1)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query
        if window is not None:
            seen = seen & (query - key < window)
        if documents is not None:
            seen = seen & (documents[row, query] == documents[row, key])
        return seen

    rows = None if documents is None else batch
    lengths = (row_mask.num_queries, row_mask.num_keys)
    device = row_mask.device
    return _fused(create_block_mask, device)(sees, rows, None, *lengths, device=device)


def _fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`function`, compiled where that is what makes a kernel of it; on CPU it serves as oracle."""
    return function if device.type == "cpu" else _compiled(function)


_compiled = cache(torch.compile)


# --- documents --------------------------------------------------------------------------------


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, row_mask: RowMask, window: int | None, scale: float | None
) -> Tensor:
    batch, value_dim = len(q), v.shape[3]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    width = -(-max(q.shape[3], value_dim) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    q, k, v = (_tokens(t, width) for t in (q, k, v))
    borders = row_mask.form("borders", lambda: document_borders(row_mask, batch))
    before = -1 if window is None else window - 1
    out = varlen_kernel(q, k, v, borders, longest=row_mask.num_keys, before=before, scale=scale)
    return out.unflatten(0, (batch, -1)).transpose(1, 2)[..., :value_dim]


def _tokens(t: Tensor, width: int) -> Tensor:
    """(batch, heads, seq, head_dim) -> (batch * seq, heads, width), with zeros behind the head."""
    t = t if t.shape[3] == width else F.pad(t, (0, width - t.shape[3]))
    return t.transpose(1, 2).flatten(0, 1)


def varlen_kernel(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, *, longest: int, before: int, scale: float
) -> Tensor:
    """Causal attention within documents; a query sees itself and `before` tokens (-1: all).

    q: (tokens, heads, width), k and v: (tokens, kv_heads, width); `borders` as of
    document_borders; no document has more than `longest` tokens.
    """
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": (before, 0)}
    if "enable_gqa" in signature(varlen_attn).parameters:  # torch 2.11 need not be told
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, borders, borders, longest, longest, **options)
    assert isinstance(out, Tensor)
    return out


def document_borders(row_mask: RowMask, batch: int) -> Tensor:
    """(documents + 1,) int32: where each begins among all tokens of `batch` rows, and the end.

    How many documents there are is a shape: with documents, this waits for the device once.
    """
    length, documents = row_mask.num_keys, row_mask.documents
    if documents is None:
        ends = (batch + 1) * length
        return torch.arange(0, ends, length, dtype=torch.int32, device=row_mask.device)
    begins = F.pad(documents.diff() != 0, (1, 0), value=True).expand(batch, -1)
    starts = begins.flatten().nonzero()[:, 0]
    return F.pad(starts, (0, 1), value=batch * length).to(torch.int32)

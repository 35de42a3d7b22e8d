"""Attention of a block of queries to a block of keys, in parts that add up to the whole.

A softmax over all keys can be had from softmaxes over some of them, if each comes with the
logarithm of its denominator, the log-sum-exp (Milakov, Gimelshein: Online normalizer calculation
for softmax, 2018):

    lse = log(exp(lse_1) + exp(lse_2))       out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

`attend` gives a block's (out, lse), `merge` adds a block to those before it. Backward needs no
order: given the merged out and lse, `attend_backward` makes of each pair of blocks its share of
the gradients, and these are summed (Dao: FlashAttention-2, 2023, section 3.1).

A query may see no key of a block. Kernels disagree about what comes out then (0 or NaN, and any
log-sum-exp), so `attend` writes over it.

Nothing here is recorded by autograd: whoever exchanges blocks between ranks is an
autograd.Function. Proven in tests/ops/test_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]

WIDTH_MULTIPLE = 8  # of the channels: 16 bytes in half precision
MAX_FLASH_WIDTH = 256
BIAS_MULTIPLE, LSE_MULTIPLE = 16, 32  # of the last dim, in the memory that "efficient" reads


class Rule(NamedTuple):
    """Which keys a query sees, as kernels want it said."""

    bias: Tensor | None  # (batch or 1, 1, queries, keys) in q's dtype, added to the scores
    causal: bool
    scale: float


def best_kernel(device: torch.device, dtype: torch.dtype, width: int, *, masked: bool) -> str:
    """The fastest kernel there is for heads of `width` channels.

    "cpu"         on CPU
    "flash"       on CUDA from compute capability 8.0: half precision without a mask
    "efficient"   on CUDA: also fp32 and masks; wants a KV head for each head
    "reference"   plain torch: anything else
    """
    if device.type == "cpu":
        return "cpu"
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type != "cuda" or not (half or dtype == torch.float32):
        return "reference"
    if masked or not half or width > MAX_FLASH_WIDTH:
        return "efficient"
    return "flash" if torch.cuda.get_device_capability(device) >= (8, 0) else "efficient"


def sdpa_shares_heads(
    device: torch.device, dtype: torch.dtype, width: int, *, masked: bool
) -> bool:
    """Whether torch's sdpa has a fused kernel for fewer KV heads than heads of queries.

    On CUDA flash attention is one. Some devices have cuDNN's, too, where a copy is the price of not
    counting on it; where there is none, sdpa computes all scores.
    """
    return device.type != "cuda" or best_kernel(device, dtype, width, masked=masked) == "flash"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kernel: str | None = None,
) -> Pair:
    """Attention of a block, and the log-sum-exp of its scaled scores.

    q: (batch, heads, queries, dim), k: (batch, kv_heads, keys, dim), v: (batch, kv_heads, keys,
    value_dim). mask: (batch or 1, 1, queries, keys) bool, True where a query sees a key; `causal`
    goes without one, with as many queries as keys. kernel: None for the best.

    Returns out (batch, heads, queries, value_dim) in q's dtype and lse (batch, heads, queries) in
    fp32 (fp64 of fp64). A query that sees nothing: out 0, lse -inf.
    """
    assert not causal or (mask is None and q.shape[2] == k.shape[2]), "causal is of a whole square"
    width, value_dim, masked = max(q.shape[3], v.shape[3]), v.shape[3], mask is not None
    bias = None if mask is None else _bias(mask, q.dtype)
    forward, _ = _KERNELS[kernel or best_kernel(q.device, q.dtype, width, masked=masked)]
    q, k, v = (_widen(t, width) for t in (q, k, v))
    out, lse = forward(q, k, v, Rule(bias, causal, scale))
    out = out[..., :value_dim]
    if mask is not None:
        dead = ~mask.any(-1, keepdim=True)  # (batch or 1, 1, queries, 1)
        out, lse = out.masked_fill(dead, 0.0), lse.masked_fill(dead[..., 0], -torch.inf)
    return out, lse.contiguous()


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kernel: str | None = None,
) -> Triple:
    """This block's share of the gradients of q, k and v, in their shapes and dtypes.

    grad: of the merged `out`, whose log-sum-exp is `lse`; the others as in `attend`.
    """
    width, widths, masked = max(q.shape[3], v.shape[3]), (q.shape[3], v.shape[3]), mask is not None
    # A key's share is exp(score - lse). Where a query sees none, scores and lse are all -inf.
    lse = lse.masked_fill(lse == -torch.inf, 0.0).contiguous()
    bias = None if mask is None else _bias(mask, q.dtype)
    _, backward = _KERNELS[kernel or best_kernel(q.device, q.dtype, width, masked=masked)]
    grad, q, k, v, out = (_widen(t.to(q.dtype), width) for t in (grad, q, k, v, out))
    dq, dk, dv = backward(grad, q, k, v, out, lse, Rule(bias, causal, scale))
    return dq[..., : widths[0]], dk[..., : widths[0]], dv[..., : widths[1]]


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> Pair:
    """(out, lse) of the keys of two blocks together, in fp32."""
    total = torch.logaddexp(lse, more_lse)
    finite = total.masked_fill(total == -torch.inf, 0.0)  # a query that saw nothing of either
    weight, more_weight = ((part - finite).exp()[..., None] for part in (lse, more_lse))
    return out * weight + more_out * more_weight, total


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def _widen(t: Tensor, width: int) -> Tensor:
    """With zeros behind the channels, which change no score, and the channels side by side.

    A kernel that reads them as neighbours where they are not is silently wrong.
    """
    missing = -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE - t.shape[3]
    t = F.pad(t, (0, missing)) if missing else t
    return t if t.stride(3) == 1 else t.contiguous()


# --- kernels ----------------------------------------------------------------------------------


def _cpu(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Pair:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return op(q, k, v, 0.0, rule.causal, attn_mask=rule.bias, scale=rule.scale)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> Triple:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    tail = {"attn_mask": rule.bias, "scale": rule.scale}
    return op(grad, q, k, v, out, lse, 0.0, rule.causal, **tail)


def _flash(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Pair:
    op = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = op(q, k, v, 0.0, rule.causal, scale=rule.scale)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> Triple:
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that is none
    lengths = (None, None, q.shape[2], k.shape[2])  # rows of one length have no table of them
    tail = (0.0, rule.causal, seed, seed)
    return op(grad, q, k, v, out, lse, *lengths, *tail, scale=rule.scale)


def _efficient(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Pair:
    k, v, bias = per_head(k, q), per_head(v, q), _aligned(rule.bias, q, k)
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, _, _ = op(q, k, v, bias, True, 0.0, rule.causal, scale=rule.scale)
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> Triple:
    kv_heads, bias = k.shape[1], _aligned(rule.bias, q, k)
    # The kernel takes the strides of out for those of (batch, queries, heads, width), unasked.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    if torch.version.hip is None:
        lse = F.pad(lse, (0, -lse.shape[2] % LSE_MULTIPLE), value=torch.inf)
    op = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that is none
    tail = (0.0, (True, True, True, False), rule.causal)
    k, v = per_head(k, q), per_head(v, q)
    dq, dk, dv, _ = op(grad, q, k, v, bias, out, lse, seed, seed, *tail, scale=rule.scale)
    dk, dv = (t.unflatten(1, (kv_heads, -1)).sum(2) for t in (dk, dv))
    return dq, dk, dv


def per_head(t: Tensor, q: Tensor) -> Tensor:
    """(batch, kv_heads, keys, width) -> (batch, heads, keys, width)."""
    return t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """(batch, heads, queries, keys), rows that begin at multiples of BIAS_MULTIPLE elements."""
    if bias is None:
        return None
    if missing := -k.shape[2] % BIAS_MULTIPLE:
        bias = F.pad(bias, (0, missing))[..., : k.shape[2]]
    return bias.expand(q.shape[0], q.shape[1], -1, -1)


def _reference(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Pair:
    scores, _, _, wide_v = _scores(q, k, v, rule)
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse).exp() @ wide_v
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)[..., 0]


def _reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> Triple:
    scores, wide_q, wide_k, wide_v = _scores(q, k, v, rule)
    grad, out = (t.to(scores.dtype).unflatten(1, scores.shape[1:3]) for t in (grad, out))
    shares = (scores - lse.unflatten(1, scores.shape[1:3])[..., None]).exp()
    slope = grad @ wide_v.mT - (grad * out).sum(-1, keepdim=True)
    of_scores = shares * slope * rule.scale
    dq = (of_scores @ wide_k).flatten(1, 2)
    dk, dv = (of_scores.mT @ wide_q).sum(2), (shares.mT @ grad).sum(2)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _scores(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores (batch, kv_heads, heads of each, queries, keys); q, k and v with five such dims."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q = q.to(dtype).unflatten(1, (k.shape[1], -1))
    k, v = (t.to(dtype)[:, :, None] for t in (k, v))
    scores = q @ k.mT * rule.scale
    if rule.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores if rule.bias is None else scores + rule.bias[:, :, None], q, k, v


_KERNELS: dict[str, tuple[Callable[..., Pair], Callable[..., Triple]]] = {
    "cpu": (_cpu, _cpu_backward),
    "flash": (_flash, _flash_backward),
    "efficient": (_efficient, _efficient_backward),
    "reference": (_reference, _reference_backward),
}

attend_reference = partial(attend, kernel="reference")
attend_backward_reference = partial(attend_backward, kernel="reference")

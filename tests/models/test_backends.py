"""Every backend of attention sees what a dense mask shows.

The oracle is the plain formula in fp64 over a mask that is spelled out token by token. On CPU
flex_attention has a forward alone, which runs uncompiled; the kernel of varlen has nothing, so a
loop over documents stands for the one call of it, and what is proven is all around that call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite.models import backends
from torchtitan_lite.models.attention import CoreAttention, RowMask, document_numbers
from torchtitan_lite.models.backends import varlen_kernel
from torchtitan_lite.models.config import ModelConfig

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

BATCH, HEADS, SEQ = 2, 4, 150  # more than a block of flex_attention, and no multiple of one
BACKENDS = ("sdpa", "flex", "varlen")
TOLERANCE = 2e-6  # fp32, relative to the largest number
# Lengths of the documents of each row: many, one token, a whole row.
DOCUMENTS = {"none": None, "packed": [[1, 70, 1, 78], [150]], "shared": [[60, 90]]}
WIDTHS = {"plain": (4, 8, 8), "grouped": (2, 8, 8), "narrow values": (4, 12, 6), "odd": (1, 5, 7)}


def positions_of(lengths: list[list[int]]) -> Tensor:
    rows = [[place for length in row for place in range(length)] for row in lengths]
    return torch.tensor(rows)


def row_mask(documents: str) -> RowMask:
    lengths = DOCUMENTS[documents]
    numbers = None if lengths is None else document_numbers(positions_of(lengths))
    return RowMask(numbers, num_keys=SEQ, device=torch.device("cpu"))


def seen(documents: str, window: int | None) -> Tensor:
    """(BATCH, SEQ, SEQ) bool, one query and key at a time."""
    lengths = DOCUMENTS[documents] or [[SEQ]]
    mask = torch.zeros(BATCH, SEQ, SEQ, dtype=torch.bool)
    for row in range(BATCH):
        first = 0
        for length in lengths[row % len(lengths)]:
            for query in range(first, first + length):
                begin = first if window is None else max(first, query - window + 1)
                mask[row, query, begin : query + 1] = True
            first += length
    return mask


def inputs(kv_heads: int, dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, dim), (kv_heads, dim), (kv_heads, value_dim)]
    q, k, v = (torch.randn(BATCH, SEQ, *shape, generator=generator) for shape in shapes)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def expected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    k, v = (t.repeat_interleave(HEADS // t.shape[1], 1).double() for t in (k, v))
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    scores = (q.double() @ k.transpose(2, 3) * scale).masked_fill(~mask[:, None], -torch.inf)
    return scores.softmax(-1) @ v


def loop(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, *, longest: int, before: int, scale: float
) -> Tensor:
    """varlen_kernel, one document at a time, and as strict about types as the real one."""
    assert borders.dtype == torch.int32 and q.shape[2] == k.shape[2] == v.shape[2]
    assert q.shape[2] % backends.WIDTH_MULTIPLE == 0 and q.stride(2) == 1
    ends, parts = borders.tolist(), []
    assert ends[0] == 0 and ends[-1] == len(q)
    k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (k, v))
    for first, end in zip(ends[:-1], ends[1:], strict=True):
        assert 0 < end - first <= longest
        own_q, own_k, own_v = (t[first:end].transpose(0, 1) for t in (q, k, v))
        places = torch.arange(end - first)
        distance = places[:, None] - places
        hidden = (distance < 0) | (distance > (before if before >= 0 else longest))
        scores = (own_q @ own_k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
        parts.append((scores.softmax(2) @ own_v).transpose(0, 1))
    return torch.cat(parts)


def core(backend: str, window: int | None, scale: float | None = None) -> CoreAttention:
    attention = CoreAttention(ModelConfig(sliding_window=window), 0)
    attention.backend, attention.scale = backend, scale
    return attention


def error(out: Tensor, truth: Tensor) -> float:
    assert out.shape == truth.shape
    return ((out - truth).abs().max() / truth.abs().max()).item()


@pytest.fixture(autouse=True)
def _kernels_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backends, "varlen_kernel", loop)
    with torch.compiler.set_stance("force_eager"):  # flex_attention traces itself for each mask
        yield


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_sees_its_own_document_and_window(
    backend: str, documents: str, window: int | None
) -> None:
    q, k, v = inputs(2, 8, 8)
    out = core(backend, window)(q, k, v, row_mask(documents))
    assert error(out, expected(q, k, v, seen(documents, window), None)) < TOLERANCE
    if documents == "packed":
        wrong = expected(q, k, v, seen("none", window), None)
        assert window == 1 or error(out, wrong) > 0.1, "documents that are not kept apart are seen"


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_may_share_keys_and_values_may_have_a_width_of_their_own(
    backend: str, widths: str
) -> None:
    q, k, v = inputs(*WIDTHS[widths])
    for scale in (None, 0.3):
        out = core(backend, None, scale)(q, k, v, row_mask("none"))
        assert error(out, expected(q, k, v, seen("none", None), scale)) < TOLERANCE


@pytest.mark.parametrize("documents", ["none", "packed"])
def test_where_no_kernel_shares_heads_each_head_has_its_own(
    documents: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise sdpa would compute all scores at once, heads x seq x seq numbers."""
    given: list[tuple[Tensor, dict[str, Any]]] = []
    sdpa = F.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        given.append((k, options))
        return sdpa(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    found = []
    for shares in (True, False):
        monkeypatch.setattr(backends, "sdpa_shares_heads", lambda *_, masked, s=shares: s)
        q, k, v = (t.requires_grad_() for t in inputs(*WIDTHS["grouped"]))
        out = core("sdpa", None, None)(q, k, v, row_mask(documents))
        out.square().sum().backward()
        found.append((out, q.grad, k.grad, v.grad))
    assert [(k.shape[1], options["enable_gqa"]) for k, options in given] == [(2, True), (4, False)]
    for ours, other in zip(*found, strict=True):
        assert ours is not None and other is not None and error(ours, other) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_layers_of_a_forward_share_a_form(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for name in ("block_mask", "document_borders"):
        make = getattr(backends, name)
        monkeypatch.setattr(backends, name, lambda *a, make=make: made.append(a) or make(*a))
    mask, (q, k, v) = row_mask("packed"), inputs(2, 8, 8)
    for window in (None, 40, None, 40):
        core(backend, window)(q, k, v, mask)
    # Where documents begin is the same for any window.
    assert len(made) == {"sdpa": 0, "flex": 2, "varlen": 1}[backend]


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_after_a_cache_go_through_sdpa(backend: str) -> None:
    q, k, v = inputs(2, 8, 8)
    numbers = row_mask("packed").documents
    mask = RowMask(numbers, num_keys=SEQ, num_queries=3, device=torch.device("cpu"))
    out = core(backend, 40)(q[:, :, -3:], k, v, mask)
    truth = expected(q, k, v, seen("packed", 40), None)[:, :, -3:]
    assert error(out, truth) < TOLERANCE


def test_varlen_has_the_gradients_of_sdpa() -> None:
    """What stands around the kernel is differentiable, padding and all."""
    leaves = [t.requires_grad_() for t in inputs(1, 5, 7)]
    grads = []
    for backend in ("sdpa", "varlen"):
        out = core(backend, 40)(*leaves, row_mask("packed"))
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    assert max(error(*pair) for pair in zip(*grads, strict=True)) < 10 * TOLERANCE


class _Arguments(TorchDispatchMode):
    """What the varlen operator is called with."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "_varlen_attn" in str(func):
            self.seen = args
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("before", [-1, 39])
def test_the_real_kernel_is_told_to_be_causal(before: int) -> None:
    """On tensors without storage: torch calls (-1, 0) causal, and (39, 0) a window that is."""
    q, k, v = (torch.empty(SEQ, heads, 8, device="meta").bfloat16() for heads in (4, 2, 2))
    borders = torch.empty(3, dtype=torch.int32, device="meta")
    with _Arguments() as arguments:
        out = varlen_kernel(q, k, v, borders, longest=SEQ, before=before, scale=0.3)
    assert out.shape == q.shape
    assert arguments.seen[3:10] == (borders, borders, SEQ, SEQ, before < 0, 0.3, [before, 0])


@pytest.mark.parametrize("documents", ["none", "packed", "shared"])
def test_borders_are_of_the_batch_as_one_row(documents: str) -> None:
    borders = backends.document_borders(row_mask(documents), BATCH)
    rows = DOCUMENTS[documents] or [[SEQ]]
    lengths = [length for row in range(BATCH) for length in rows[row % len(rows)]]
    assert borders.diff().tolist() == lengths


def test_flex_passes_over_blocks_that_no_query_sees() -> None:
    """Of the four blocks of 128 x 128 the upper right is empty; a document's border empties one."""
    assert backends.block_mask(row_mask("none"), None, BATCH).kv_num_blocks.tolist() == [[[1, 2]]]
    numbers = document_numbers(positions_of([[128, 22]]))
    apart = RowMask(numbers, num_keys=SEQ, device=torch.device("cpu"))
    assert backends.block_mask(apart, None, 1).kv_num_blocks.tolist() == [[[1, 1]]]


@pytest.mark.parametrize("documents", ["none", "packed"])
def test_what_trains_in_bf16_on_cpu_is_computed_in_fp32_and_rounded_once(documents: str) -> None:
    mask, options = row_mask(documents), {"window": None, "scale": None}
    low = [t.bfloat16().requires_grad_() for t in inputs(2, 8, 8)]
    high = [t.detach().float().requires_grad_() for t in low]
    grad = torch.randn(BATCH, HEADS, SEQ, 8).bfloat16()
    outs = [backends.attend(*ts, mask, **options) for ts in (low, high)]
    for out in outs:
        out.backward(grad.to(out.dtype))
    assert outs[0].dtype == torch.bfloat16 and torch.equal(outs[0], outs[1].bfloat16())
    for own, other in zip(low, high, strict=True):
        assert own.grad is not None and other.grad is not None
        assert torch.equal(own.grad, other.grad.bfloat16())

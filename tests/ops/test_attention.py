"""Attention cut in blocks and merged is the attention of the whole, forward and backward.

The oracle is autograd in fp64 through the plain formula, over the whole. A case cuts it into 2
chunks of queries x 4 of keys, of uneven lengths, as ranks would hold them.

CUDA's kernels cannot run on CPU: that they are called with what their schemas ask, and what shapes
come out, is checked with meta tensors. No number of theirs is proven here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite.ops.attention import (
    attend,
    attend_backward,
    attend_backward_reference,
    attend_reference,
    best_kernel,
    merge,
    sdpa_shares_heads,
)

BATCH, DIM = 2, 6
FORWARD: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "cpu": attend,
    "reference": attend_reference,
}
BACKWARD: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "cpu": attend_backward,
    "reference": attend_backward_reference,
}
# Relative to the largest number of a result; bf16: rounding of the inputs of a product, and of
# the shares that it sums.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}


def make(
    heads: int, kv_heads: int, queries: int, keys: int, dim: int = DIM, value_dim: int = DIM
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of out, in fp64 of numbers that bf16 has."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim)]
    q, k, v, grad = (
        torch.randn(BATCH, *shape, generator=generator).bfloat16().double()
        for shape in [*shapes, (heads, queries, value_dim)]
    )
    return q, k, v, grad


def plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    weights = (q @ k.transpose(2, 3) * scale).exp() * seen
    return weights @ v / weights.sum(-1, keepdim=True).clamp_min(1e-300)


def oracle(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, seen: Tensor, scale: float
) -> list[Tensor]:
    inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = plain(*inputs, seen, scale)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    seen: Tensor,
    scale: float,
    *,
    kernel: str = "cpu",
    merging: Callable[..., tuple[Tensor, Tensor]] = merge,
) -> list[Tensor]:
    """out, dq, dk and dv of the whole, from 2 x 4 blocks; squares on the diagonal go as causal."""
    query_chunks = torch.arange(q.shape[2]).tensor_split(2)
    key_chunks = torch.arange(k.shape[2]).tensor_split(4)
    accumulate = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=accumulate)
    dq, dk, dv = (torch.zeros(t.shape, dtype=accumulate) for t in (q, k, v))
    for rows in query_chunks:
        blocks = []
        for columns in key_chunks:
            mask = seen[:, :, rows][..., columns]
            square = len(rows) == len(columns)
            causal = square and torch.equal(mask, torch.ones_like(mask).tril())
            rule = {"mask": None if causal or mask.all() else mask, "causal": causal}
            blocks.append((columns, {**rule, "scale": scale}))
        whole, lse = None, None
        for columns, rule in blocks:
            more = FORWARD[kernel](q[:, :, rows], k[:, :, columns], v[:, :, columns], **rule)
            assert more[0].dtype == q.dtype and more[1].dtype == accumulate
            assert more[1].is_contiguous()
            if whole is None or lse is None:
                whole, lse = more
            else:
                whole, lse = merging(whole, lse, *more)
        assert whole is not None and whole.dtype == accumulate
        out[:, :, rows] = whole
        for columns, rule in blocks:
            parts = (q[:, :, rows], k[:, :, columns], v[:, :, columns], whole, lse)
            grads = BACKWARD[kernel](grad[:, :, rows], *parts, **rule)
            assert all(g.dtype == q.dtype for g in grads)
            dq[:, :, rows] += grads[0]
            dk[:, :, columns] += grads[1]
            dv[:, :, columns] += grads[2]
    return [out, dq, dk, dv]


def error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference relative to the largest number of its tensor; NaN is inf."""
    assert [t.shape for t in actual] == [t.shape for t in expected]
    errors = [
        ((one.double() - other).abs().max() / other.abs().max().clamp_min(1e-300)).item()
        for one, other in zip(actual, expected, strict=True)
    ]
    return math.inf if any(math.isnan(e) for e in errors) else max(errors)


def causal(queries: int, keys: int) -> Tensor:
    return torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)


def documents(queries: int, keys: int) -> Tensor:
    """Causal within documents of 3 tokens, another cut in each row of the batch."""
    places = torch.arange(keys)
    number = torch.stack([(places + row) // 3 for row in range(BATCH)])
    same = number[:, -queries:, None] == number[:, None]
    return causal(queries, keys) & same[:, None]


def with_dead_rows(queries: int, keys: int) -> Tensor:
    """Some queries see nothing of all keys; more of them see nothing of a block."""
    mask = documents(queries, keys).clone()
    mask[:, :, ::4] = False
    return mask


MASKS = {
    "all": lambda queries, keys: torch.ones(1, 1, queries, keys, dtype=torch.bool),
    "causal": causal,
    "documents": documents,
    "dead rows": with_dead_rows,
}
SHAPES = {  # heads, kv_heads, queries, keys, dim, value_dim
    "even": (4, 4, 8, 8, 8, 8),
    "grouped heads, odd sizes": (4, 2, 13, 13, 6, 6),
    "one KV head, fewer queries": (3, 1, 5, 19, 5, 5),
    "narrow values": (2, 2, 9, 9, 12, 8),
    "wide values": (4, 2, 9, 9, 4, 10),
    "a query and a key a block": (2, 1, 2, 4, 3, 3),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", FORWARD)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_add_up_to_the_whole(shape: str, mask: str, kernel: str, dtype: torch.dtype) -> None:
    heads, kv_heads, queries, keys, dim, value_dim = SHAPES[shape]
    inputs = make(heads, kv_heads, queries, keys, dim, value_dim)
    seen, scale = MASKS[mask](queries, keys), 0.7 / math.sqrt(dim)
    expected = oracle(*inputs, seen, scale)
    actual = in_blocks(*(t.to(dtype) for t in inputs), seen, scale, kernel=kernel)
    assert error(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("kernel", FORWARD)
def test_a_causal_square_is_its_mask(kernel: str) -> None:
    q, k, v, grad = (t.float() for t in make(4, 2, 7, 7))
    for mask, is_causal in ((None, True), (causal(7, 7), False)):
        rule = {"mask": mask, "causal": is_causal, "scale": 0.4}
        out, lse = FORWARD[kernel](q, k, v, **rule)
        grads = BACKWARD[kernel](grad, q, k, v, out, lse, **rule)
        expected = oracle(q.double(), k.double(), v.double(), grad.double(), causal(7, 7), 0.4)
        assert error([out, *grads], expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kernel", FORWARD)
def test_the_log_sum_exp_is_of_the_scaled_scores(kernel: str) -> None:
    q, k, v, _ = make(2, 2, 3, 5)
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    mask[:, :, 1], mask[:, :, 2, 2:] = False, False
    scores = (q @ k.transpose(2, 3) * 0.4).masked_fill(~mask, -torch.inf)
    rule = {"mask": mask, "causal": False, "scale": 0.4}
    out, lse = FORWARD[kernel](q.float(), k.float(), v.float(), **rule)
    torch.testing.assert_close(lse, scores.logsumexp(-1).float(), rtol=1e-6, atol=1e-6)
    assert (lse[:, :, 1] == -torch.inf).all() and (out[:, :, 1] == 0).all()


@pytest.mark.parametrize("kernel", FORWARD)
@pytest.mark.parametrize("dim", [6, 8])
def test_an_input_in_any_memory_order(kernel: str, dim: int) -> None:
    """Heads before the sequence, channels not side by side, a gradient of one number."""
    q, k, v, _ = (t.float() for t in make(2, 2, 6, 6, dim, dim))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    k = k.transpose(2, 3).contiguous().transpose(2, 3)
    grad = torch.ones(()).expand_as(q)
    rule = {"mask": None, "causal": True, "scale": 0.4}
    out, lse = FORWARD[kernel](q, k, v, **rule)
    grads = BACKWARD[kernel](grad, q, k, v, out, lse, **rule)
    expected = oracle(*(t.double() for t in (q, k, v, grad)), causal(6, 6), 0.4)
    assert error([out, *grads], expected) < TOLERANCE[torch.float32]


def test_two_blocks_that_show_nothing_merge_to_nothing() -> None:
    out, lse = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -torch.inf)
    some = torch.ones(1, 1, 2, 3), torch.zeros(1, 1, 2)
    merged = merge(out, lse, out, lse)
    assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    for pair in ((*some, out, lse), (out, lse, *some)):
        assert all(map(torch.equal, merge(*pair), some))


# --- twins ------------------------------------------------------------------------------------


def _forgetting_lse(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> tuple:
    return (out + more_out) / 2, lse


def _largest_only(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> tuple:
    larger = (more_lse > lse)[..., None]
    return torch.where(larger, more_out, out).float(), torch.maximum(lse, more_lse)


@pytest.mark.parametrize("merging", [_forgetting_lse, _largest_only])
def test_merging_without_the_log_sum_exp_is_seen(merging: Callable) -> None:
    inputs = make(4, 2, 13, 13)
    seen = causal(13, 13)
    actual = in_blocks(*(t.float() for t in inputs), seen, 0.4, merging=merging)
    assert error(actual, oracle(*inputs, seen, 0.4)) > 0.05


# --- tensors without storage --------------------------------------------------------------------

KERNELS = [("meta", None), ("cpu", "cpu"), ("cpu", "reference")]
KERNELS += [("meta", kernel) for kernel in ("flash", "efficient", "reference")]
CASES = [(*case, masked) for case in KERNELS for masked in (False, True)]
CASES.remove(("meta", "flash", True))  # which takes no mask


@pytest.mark.parametrize("device, kernel, masked", CASES)
def test_shapes_are_known_without_numbers(device: str, kernel: str | None, masked: bool) -> None:
    fake = contextlib.nullcontext() if device == "meta" else FakeTensorMode()
    with fake:
        new = partial(torch.empty, device=device, dtype=torch.bfloat16)
        q, k, v = new(2, 4, 5, 12), new(2, 2, 7, 12), new(2, 2, 7, 6)
        mask = torch.ones(2, 1, 5, 7, dtype=torch.bool, device=device) if masked else None
        rule = {"mask": mask, "causal": False, "scale": 0.4, "kernel": kernel}
        out, lse = attend(q, k, v, **rule)
        merged, lse = merge(out, lse, out, lse)
        grads = attend_backward(new(2, 4, 5, 6), q, k, v, merged, lse, **rule)
    assert out.shape == merged.shape == (2, 4, 5, 6) and lse.shape == (2, 4, 5)
    assert out.dtype == torch.bfloat16 and merged.dtype == lse.dtype == torch.float32
    assert [g.shape for g in grads] == [t.shape for t in (q, k, v)]
    assert all(g.dtype == torch.bfloat16 and g.device.type == device for g in grads)


class _Calls(TorchDispatchMode):
    """The arguments of each operator, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen[func._schema.name.removeprefix("aten::")] = args
        return func(*args, **kwargs or {})


def test_the_efficient_kernel_is_given_the_memory_it_reads() -> None:
    """A KV head a head; padded rows of bias and log-sum-exp; out in the order of its strides."""
    new = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    q, k, v, mask = new(2, 4, 5, 12), new(2, 2, 7, 12), new(2, 2, 7, 6), new(1, 1, 5, 7).bool()
    rule = {"mask": mask, "causal": False, "scale": 0.4, "kernel": "efficient"}
    with _Calls() as calls:
        out, lse = attend(q, k, v, **rule)
        attend_backward(out, q, k, v, out.contiguous(), lse, **rule)
    forward = calls.seen["_scaled_dot_product_efficient_attention"]
    backward = calls.seen["_scaled_dot_product_efficient_attention_backward"]
    for *tensors, bias in (forward[:4], backward[:5]):
        assert all(t.shape[1] == 4 and t.shape[3] == 16 for t in tensors)
        assert bias.shape == (2, 4, 5, 7) and bias.stride(2) == 16
    assert backward[5].transpose(1, 2).is_contiguous()
    assert backward[6].shape == (2, 4, 32)


def test_each_device_has_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda, half, single = torch.device("cuda"), torch.bfloat16, torch.float32
    assert best_kernel(torch.device("cpu"), half, 64, masked=True) == "cpu"
    assert best_kernel(torch.device("meta"), half, 64, masked=False) == "reference"
    assert best_kernel(cuda, half, 256, masked=False) == "flash"
    assert best_kernel(cuda, torch.float64, 64, masked=False) == "reference"
    for dtype, width, masked in ((half, 64, True), (half, 264, False), (single, 64, False)):
        assert best_kernel(cuda, dtype, width, masked=masked) == "efficient"
    capability = (7, 5)
    assert best_kernel(cuda, half, 64, masked=False) == "efficient"


def test_on_cuda_heads_share_keys_where_flash_attention_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of half precision, without a mask, not too wide, on devices that have it."""
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    half, single = torch.bfloat16, torch.float32
    cases = [(dtype, width, masked) for dtype in (half, single) for width in (128, 264)
             for masked in (False, True)]  # fmt: skip
    shared = [case for case in cases if sdpa_shares_heads(cuda, *case[:2], masked=case[2])]
    assert shared == [(half, 128, False)]
    assert all(sdpa_shares_heads(cpu, *case[:2], masked=case[2]) for case in cases)
    capability = (7, 5)
    assert not sdpa_shares_heads(cuda, half, 128, masked=False)

"""Dropout's mask: how much it drops, that nothing but its name decides, and that nothing shows.

Masks are fixed by their seeds, so a statistical bound of five standard deviations is no source of
chance failures: it holds or it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchtitan_lite.ops import dropout
from torchtitan_lite.ops.dropout import Dropout, sample_keys

CPU = torch.device("cpu")
ROWS, SEQ, HIDDEN = 4, 256, 256
NUM_ELEMENTS = ROWS * SEQ * HIDDEN
SIGMAS = 5  # of a mean of NUM_ELEMENTS, or of a correlation of as many pairs


def keys_of(seed: int = 3, first: int = 0, rows: int = ROWS) -> Tensor:
    return sample_keys(seed, first, rows, CPU)


def kept(keys: Tensor, p: float = 0.5, site: str = "layers.0.mlp") -> Tensor:
    """(ROWS, SEQ, HIDDEN) bool."""
    return Dropout(p, site)(torch.ones(len(keys), SEQ, HIDDEN), keys) != 0


def random_input(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# --- how much ---------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_the_share_p_is_dropped_and_the_mean_stays(p: float) -> None:
    out = Dropout(p, "")(torch.ones(ROWS, SEQ, HIDDEN, dtype=torch.float64), keys_of())
    assert out.unique().tolist() == [0.0, 1 / (1 - p)]
    deviation = math.sqrt(p * (1 - p) / NUM_ELEMENTS)
    assert abs((out == 0).double().mean().item() - p) < SIGMAS * deviation
    assert abs(out.mean().item() - 1) < SIGMAS * deviation / (1 - p)


@pytest.mark.parametrize("dim", [1, 2])
def test_every_position_and_every_channel_loses_its_share(dim: int) -> None:
    """Of each slice about half is dropped: the variance of those counts is the binomial one."""
    counts = kept(keys_of()).double().sum((0, 3 - dim))
    ratio = counts.var().item() / (NUM_ELEMENTS / len(counts) / 4)
    assert abs(ratio - 1) < SIGMAS * math.sqrt(2 / len(counts))


# --- nothing else decides ---------------------------------------------------------------------


def test_the_hash_is_splitmix64() -> None:
    """The first outputs of the published generator for the seed 1234567."""
    states = 1234567 + torch.arange(1, 6) * dropout.STEP
    assert [number % 2**64 for number in dropout.scramble(states).tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_a_row_has_its_mask_in_any_batch_after_anything() -> None:
    whole = kept(keys_of())
    torch.manual_seed(1)
    torch.rand(7)
    for row in range(ROWS):
        assert torch.equal(kept(keys_of(first=row, rows=1)), whole[row : row + 1])
    assert torch.equal(kept(keys_of().flip(0)), whole.flip(0))


def test_a_million_samples_have_a_million_keys() -> None:
    keys = torch.cat([keys_of(seed, first, 250_000) for seed in (0, 1) for first in (0, 250_000)])
    assert len(keys.unique()) == 1_000_000


@pytest.mark.parametrize("shape", [(8, 6), (8, 5, 3)], ids=["sequence", "heads"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_slice_of_dim_1_has_its_slice_of_the_mask(shape: tuple[int, ...], size: int) -> None:
    """(batch, seq, hidden) cut in its sequence; (batch, heads, queries, keys) in its heads."""
    x, module = random_input(ROWS, *shape), Dropout(0.3, "")
    whole = module(x, keys_of())
    for module.shard, part in enumerate(x.chunk(size, 1)):
        assert torch.equal(module(part, keys_of()), whole.chunk(size, 1)[module.shard])
    module.shard = 0
    last = module(x.chunk(size, 1)[-1], keys_of())
    assert not torch.equal(last, whole.chunk(size, 1)[-1]), "a slice taken for the first is seen"


# --- nothing shows ----------------------------------------------------------------------------

PAIRS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "neighbours in the hidden state": lambda: _apart(2, 1),
    "every second in the hidden state": lambda: _apart(2, 2),
    "neighbours in the sequence": lambda: _apart(1, 1),
    "neighbours in the batch": lambda: _apart(0, 1),
    "the next samples": lambda: (kept(keys_of(first=0)), kept(keys_of(first=ROWS))),
    "the next seed": lambda: (kept(keys_of(3)), kept(keys_of(4))),
    "the next seed, a sample back": lambda: (kept(keys_of(3, 1)), kept(keys_of(4, 0))),
    "the next layer": lambda: _sites("layers.0.mlp", "layers.1.mlp"),
    "the next place in the layer": lambda: _sites("layers.0.self_attn", "layers.0.mlp"),
}


def _apart(dim: int, distance: int) -> tuple[Tensor, Tensor]:
    mask = kept(keys_of())
    length = mask.shape[dim] - distance
    return mask.narrow(dim, 0, length), mask.narrow(dim, distance, length)


def _sites(one: str, other: str) -> tuple[Tensor, Tensor]:
    return kept(keys_of(), site=one), kept(keys_of(), site=other)


def _sigmas(pair: tuple[Tensor, Tensor]) -> float:
    """The correlation of two masks, in standard deviations of one by chance."""
    one, other = (mask.flatten().double() for mask in pair)
    correlation = torch.corrcoef(torch.stack((one, other)))[0, 1].item()
    return abs(correlation) * math.sqrt(one.numel())


@pytest.mark.parametrize("pair", PAIRS)
def test_two_masks_are_not_correlated(pair: str) -> None:
    assert _sigmas(PAIRS[pair]()) < SIGMAS


def test_a_weak_hash_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "scramble", lambda x: x)
    seen = [name for name, pair in PAIRS.items() if not _sigmas(pair()) < SIGMAS]
    assert len(seen) > len(PAIRS) / 2


def test_a_site_that_does_not_count_would_be_seen() -> None:
    assert _sigmas(_sites("layers.0.mlp", "layers.0.mlp")) > SIGMAS


# --- as a module ------------------------------------------------------------------------------


def test_without_keys_or_at_zero_nothing_is_dropped() -> None:
    x = random_input(ROWS, 3, 5)
    assert Dropout(0.5, "")(x, None) is x
    assert Dropout(0.0, "")(x, keys_of()) is x


def test_the_gradient_goes_through_what_was_kept() -> None:
    x, upstream = random_input(ROWS, 8, 6).requires_grad_(), random_input(ROWS, 8, 6)
    out = Dropout(0.3, "")(x, keys_of())
    out.backward(upstream)
    expected = torch.where(out == 0, 0.0, upstream / (1 - 0.3))
    assert x.grad is not None and torch.equal(x.grad, expected)
    assert 0 < (out == 0).sum() < out.numel()


def test_bf16_drops_the_same_elements_and_stays_bf16() -> None:
    x = random_input(ROWS, 8, 6)
    out, half = Dropout(0.3, "")(x, keys_of()), Dropout(0.3, "")(x.bfloat16(), keys_of())
    assert half.dtype == torch.bfloat16
    assert torch.equal(half == 0, out == 0)
    expected = x.bfloat16().float() / (1 - 0.3)
    assert torch.equal(half, expected.bfloat16().masked_fill(out == 0, 0.0))

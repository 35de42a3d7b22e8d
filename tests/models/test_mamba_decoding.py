"""A state-space mixer in several calls computes what it does in one, also across documents."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.models.test_mamba import BATCH, TINY, mixer_with, some_hidden
from torchtitan_lite.models.mamba import MambaMixer, MambaState
from torchtitan_lite.parallel.data import compute_in


@torch.no_grad()
def _in_calls(mixer: MambaMixer, x: Tensor, positions: Tensor | None, sizes: list[int]) -> Tensor:
    """The outputs of calls of `sizes` tokens, each going on from the one before."""
    mixer.state = MambaState.empty(mixer.config, len(x), dtype=x.dtype, device=x.device)
    cuts = [None] * len(sizes) if positions is None else positions.split(sizes, dim=1)
    parts = [mixer(part, cut) for part, cut in zip(x.split(sizes, dim=1), cuts, strict=True)]
    mixer.state = None
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("prefill", [1, 2, 3, 4, 7, 16])
def test_cached_equals_uncached(prefill: int, kernel: int) -> None:
    """A prompt, shorter than the kernel or longer; then single tokens; then several at once."""
    sizes = [prefill, 1, 1, 1, 1, 2, 9, 1]
    mixer, x = mixer_with(conv_kernel=kernel), some_hidden(sum(sizes))
    with torch.no_grad():
        expected = mixer(x)
    torch.testing.assert_close(_in_calls(mixer, x, None, sizes), expected, rtol=0, atol=1e-6)


ROWS = {
    "left padding": ([0, 0, 0, *range(17)], [0, *range(19)]),
    "a border at a call's edge": ([*range(5), *range(15)], [*range(6), *range(14)]),
    "borders inside calls": ([*range(9), *range(11)], [*range(2), *range(4), *range(14)]),
}


@pytest.mark.parametrize("sizes", [[5, 1, 1, 1, 12], [1] * 20, [2, 18], [20]], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_cached_equals_uncached_across_borders(rows: str, sizes: list[int]) -> None:
    mixer, x, positions = mixer_with(), some_hidden(20), torch.tensor(ROWS[rows])
    with torch.no_grad():
        expected = mixer(x, positions)
    torch.testing.assert_close(_in_calls(mixer, x, positions, sizes), expected, rtol=0, atol=1e-6)


def test_left_padding_changes_nothing() -> None:
    mixer, x = mixer_with(), some_hidden(20)
    positions = torch.tensor([[0, 0, 0, *range(17)]]).expand(BATCH, -1)
    padded = _in_calls(mixer, x, positions, [8, 1, 1, 10])[:, 3:]
    with torch.no_grad():
        torch.testing.assert_close(padded, mixer(x[:, 3:]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("lost", ["inputs", "hidden"])
def test_a_lost_state_would_be_seen(lost: str) -> None:
    mixer, x = mixer_with(), some_hidden(12)
    mixer.state = MambaState.empty(TINY, BATCH, dtype=x.dtype, device=x.device)
    with torch.no_grad():
        mixer(x[:, :8])
        getattr(mixer.state, lost).zero_()
        rest = mixer(x[:, 8:])
        mixer.state = None
        assert (rest - mixer(x)[:, 8:]).abs().max() > 1e-2


def test_the_state_is_small_and_without_one_nothing_is_kept() -> None:
    mixer = mixer_with()
    mixer(some_hidden(9))
    assert mixer.state is None
    mixer.state = MambaState.empty(TINY, BATCH, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        mixer(some_hidden(50))
    for tensor, numbers in ((mixer.state.inputs, 3 * 40), (mixer.state.hidden, 40 * 6)):
        assert tensor.numel() == BATCH * numbers
        assert tensor.untyped_storage().nbytes() == 4 * tensor.numel(), "a view of a long call"


def test_decoding_in_bf16_from_a_state_in_fp32_equals_uncached() -> None:
    """Parameters stored in fp32 and cast where they are used: the state may not know of it."""
    mixer, x = mixer_with(), some_hidden(12)
    for module in mixer.modules():
        compute_in(module, torch.bfloat16)
    with torch.no_grad():
        expected = mixer(x.bfloat16())
        mixer.state = MambaState.empty(TINY, BATCH, dtype=x.dtype, device=x.device)
        parts = [mixer(part) for part in x.bfloat16().split([5, 1, 6], dim=1)]
    assert expected.dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=2**-7, atol=2**-10)

"""Rows: shifted labels, no token lost or read twice, synthetic rows that can be learned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchtitan_lite.config import ConfigError
from torchtitan_lite.data.shards import TokenShards
from torchtitan_lite.data.sources import IGNORE_LABEL, SyntheticRows, TokenRows

WriteShards = Callable[..., Path]


@pytest.mark.parametrize("num_tokens", [9, 10, 12, 13])
def test_each_token_is_input_once_and_label_once(
    write_shards: WriteShards, num_tokens: int
) -> None:
    rows = TokenRows(TokenShards(write_shards(range(num_tokens), tokens_a_shard=3)), 4)
    assert len(rows) == (num_tokens - 1) // 4
    tokens = torch.cat([rows[row][0] for row in range(len(rows))])
    labels = torch.cat([rows[row][1] for row in range(len(rows))])
    assert tokens.tolist() == list(range(4 * len(rows)))
    assert labels.tolist() == list(range(1, 4 * len(rows) + 1))
    assert tokens.dtype == labels.dtype == torch.int64
    for row in (-1, len(rows) + 1):
        with pytest.raises(AssertionError, match="no slice"):
            rows[row]


def test_less_than_a_row_is_an_error_with_both_numbers(write_shards: WriteShards) -> None:
    shards = TokenShards(write_shards(range(8)))
    assert len(TokenRows(shards, 7)) == 1
    with pytest.raises(ConfigError, match=r"8 tokens, fewer than the 9 of one row"):
        TokenRows(shards, 8)


@pytest.mark.parametrize("num_tokens", [2, 9, 10, 12, 13])
def test_to_the_end_every_token_but_the_first_is_a_label(
    write_shards: WriteShards, num_tokens: int
) -> None:
    shards = TokenShards(write_shards(range(num_tokens), tokens_a_shard=3))
    rows = TokenRows(shards, 4, to_the_end=True)
    labels = torch.cat([rows[row][1] for row in range(len(rows))])
    assert labels[labels != IGNORE_LABEL].tolist() == list(range(1, num_tokens))
    assert len(labels) == 4 * len(rows) == 4 * -(-(num_tokens - 1) // 4)
    tokens = torch.cat([rows[row][0] for row in range(len(rows))])
    assert tokens[labels == IGNORE_LABEL].eq(0).all()
    assert tokens[: num_tokens - 1].tolist() == list(range(num_tokens - 1))


def synthetic(seed: int = 1, ignore_fraction: float = 0.0) -> SyntheticRows:
    return SyntheticRows(61, 64, num_rows=200, seed=seed, ignore_fraction=ignore_fraction)


def test_synthetic_rows_depend_on_seed_and_row_alone() -> None:
    assert all(map(torch.equal, synthetic()[5], synthetic()[5]))
    assert not torch.equal(synthetic()[5][0], synthetic()[6][0])
    assert not torch.equal(synthetic()[5][0], synthetic(seed=2)[5][0])
    assert not torch.equal(synthetic(seed=2**64 - 3)[5][0], synthetic(seed=2**64 - 4)[5][0])
    tokens, labels = synthetic()[5]
    assert torch.equal(tokens[1:], labels[:-1])
    assert tokens.min() >= 0 and tokens.max() < 61


def test_nine_of_ten_synthetic_tokens_follow_from_the_one_before() -> None:
    rows = [synthetic()[row] for row in range(200)]
    follows = [(tokens + 1) % 61 == labels for tokens, labels in rows]
    assert 0.88 < torch.stack(follows).double().mean() < 0.93
    assert SyntheticRows(1, 4, num_rows=1, seed=0)[0][0].tolist() == [0] * 4


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9, 1.0])
def test_ignored_labels_are_ragged_and_as_many_as_asked_for(fraction: float) -> None:
    rows = synthetic(ignore_fraction=fraction)
    counts = torch.tensor([int((rows[i][1] == IGNORE_LABEL).sum()) for i in range(len(rows))])
    assert abs(counts.double().mean() / 64 - fraction) < 0.03
    assert (len(counts.unique()) > 5) == (0 < fraction < 1)
    assert rows[0][0].min() >= 0  # inputs stay tokens

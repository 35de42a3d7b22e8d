"""Rows: shifted labels, no token lost or read twice, synthetic rows that can be learned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.data.test_shards import as_format_1
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


def all_of(rows: TokenRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and positions of all rows, one after the other."""
    parts = [rows[row] for row in range(len(rows))]
    assert all(part.positions is not None for part in parts)
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))  # type: ignore[return-value,arg-type]


# Ends of documents among 21 tokens in rows of 4: inside rows, at their ends (4, 12), of one token
# (5, 6), over two rows and more (12 -> 21).
ENDS = [4, 5, 6, 12, 21]


def test_positions_restart_at_documents_and_rows_and_last_tokens_have_no_label(
    write_shards: WriteShards,
) -> None:
    shards = TokenShards(write_shards(range(21), ends=ENDS, tokens_a_shard=5))
    tokens, labels, positions = all_of(TokenRows(shards, 4, document_mask=True))
    x = IGNORE_LABEL
    assert tokens.tolist() == list(range(20))
    assert positions.tolist() == [0, 1, 2, 3, 0, 0, 0, 1] + [0, 1, 2, 3] * 3
    assert labels.tolist() == [1, 2, 3, x, x, x, 7, 8, 9, 10, 11, x, *range(13, 21)]
    assert positions.dtype == labels.dtype == torch.int64


def test_without_the_mask_documents_change_nothing(write_shards: WriteShards) -> None:
    plain = TokenRows(TokenShards(write_shards(range(21), name="plain")), 4)
    rows = TokenRows(TokenShards(write_shards(range(21), ends=ENDS, name="ends")), 4)
    for row in range(len(plain)):
        assert plain[row].positions is None and rows[row].positions is None
        assert torch.equal(plain[row].tokens, rows[row].tokens)
        assert torch.equal(plain[row].labels, rows[row].labels)


@pytest.mark.parametrize("ends", [ENDS, [1, 20, 21], [21], list(range(1, 22)), [19, 21]])
@pytest.mark.parametrize("seq_len", [3, 4, 5, 7, 20, 30])
def test_to_the_end_under_the_mask_every_token_but_each_first_is_a_label(
    write_shards: WriteShards, ends: list[int], seq_len: int
) -> None:
    shards = TokenShards(write_shards(range(21), ends=ends, tokens_a_shard=5))
    rows = TokenRows(shards, seq_len, to_the_end=True, document_mask=True)
    tokens, labels, positions = all_of(rows)
    assert labels[labels != IGNORE_LABEL].tolist() == sorted(set(range(21)) - {0, *ends})
    # A label is the token that follows, in the document of its own place.
    given = (labels != IGNORE_LABEL).nonzero()[:, 0]
    assert labels[given].tolist() == (tokens[given] + 1).tolist()
    # The padding is a document of its own.
    assert positions[20:].tolist() == list(range(len(positions) - 20))
    restarts = set((positions == 0).nonzero()[:, 0].tolist())
    assert restarts - {20} == {0, *range(0, len(tokens), seq_len), *ends} - {20, 21}


def test_the_mask_on_shards_that_know_no_documents_is_an_error(write_shards: WriteShards) -> None:
    shards = TokenShards(as_format_1(write_shards(range(21))))
    assert len(TokenRows(shards, 4)) == 5
    with pytest.raises(ConfigError, match=r"^training\.document_mask = true: .*make it again"):
        TokenRows(shards, 4, document_mask=True)


def synthetic(
    seed: int = 1, ignore_fraction: float = 0.0, *, document_mask: bool = False
) -> SyntheticRows:
    return SyntheticRows(
        61,
        64,
        num_rows=200,
        seed=seed,
        ignore_fraction=ignore_fraction,
        document_mask=document_mask,
    )


def test_a_synthetic_row_of_documents_has_the_tokens_of_one_without() -> None:
    x, lengths = IGNORE_LABEL, set()
    for row in range(200):
        plain, masked = synthetic()[row], synthetic(document_mask=True)[row]
        assert plain.positions is None and masked.positions is not None
        assert torch.equal(plain.tokens, masked.tokens)
        begins = (masked.positions == 0).nonzero()[:, 0]
        assert torch.equal(
            masked.positions, torch.arange(64) - begins[masked.positions.eq(0).cumsum(0) - 1]
        )
        expected = plain.labels.clone()
        expected[begins[1:] - 1] = x
        # The row may end with a document or within one.
        assert masked.labels[:-1].tolist() == expected[:-1].tolist()
        assert int(masked.labels[-1]) in (x, int(plain.labels[-1]))
        lengths |= set(begins.diff().tolist())
    assert min(lengths) == 1 and max(lengths) > 50 and len(lengths) > 30
    ends = [int(synthetic(document_mask=True)[row].labels[-1] == x) for row in range(200)]
    assert 0 < sum(ends) < 200
    assert all(map(torch.equal, synthetic(document_mask=True)[5], synthetic(document_mask=True)[5]))  # type: ignore[arg-type]


def test_a_synthetic_row_never_changes() -> None:
    x = IGNORE_LABEL
    tokens, labels, _ = SyntheticRows(61, 8, num_rows=9, seed=5, ignore_fraction=0.3)[0]
    assert tokens.tolist() == [12, 13, 14, 15, 58, 12, 13, 27]
    assert labels.tolist() == [13, 14, 15, 58, x, x, x, x]


def test_synthetic_rows_depend_on_seed_and_row_alone() -> None:
    assert all(map(torch.equal, synthetic()[5][:2], synthetic()[5][:2]))
    assert not torch.equal(synthetic()[5][0], synthetic()[6][0])
    assert not torch.equal(synthetic()[5][0], synthetic(seed=2)[5][0])
    assert not torch.equal(synthetic(seed=2**64 - 3)[5][0], synthetic(seed=2**64 - 4)[5][0])
    tokens, labels, _ = synthetic()[5]
    assert torch.equal(tokens[1:], labels[:-1])
    assert tokens.min() >= 0 and tokens.max() < 61


def test_nine_of_ten_synthetic_tokens_follow_from_the_one_before() -> None:
    rows = [synthetic()[row] for row in range(200)]
    follows = [(tokens + 1) % 61 == labels for tokens, labels, _ in rows]
    assert 0.88 < torch.stack(follows).double().mean() < 0.93
    assert SyntheticRows(1, 4, num_rows=1, seed=0)[0][0].tolist() == [0] * 4


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9, 1.0])
def test_ignored_labels_are_ragged_and_as_many_as_asked_for(fraction: float) -> None:
    rows = synthetic(ignore_fraction=fraction)
    counts = torch.tensor([int((rows[i][1] == IGNORE_LABEL).sum()) for i in range(len(rows))])
    assert abs(counts.double().mean() / 64 - fraction) < 0.03
    assert (len(counts.unique()) > 5) == (0 < fraction < 1)
    assert rows[0][0].min() >= 0  # inputs stay tokens

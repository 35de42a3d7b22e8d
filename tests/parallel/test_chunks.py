"""Which rank holds which tokens, and which of them see which, counted token by token."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from torchtitan_lite.models.attention import RowMask, document_numbers
from torchtitan_lite.parallel.chunks import Order, Sight

SEQ = 24
DOCUMENTS = ((1, 5, 1, 3, 8, 6), (24,), (3, 3, 3, 3, 12), (12, 12))


def numbers_of(rows: tuple[tuple[int, ...], ...]) -> Tensor:
    positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in rows]
    return document_numbers(torch.stack(positions))


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_every_token_is_held_by_one_rank_and_found_again(size: int, balanced: bool) -> None:
    order, row = Order(size, balanced), torch.arange(2 * SEQ).view(2, SEQ)
    parts = [order.take(row, rank) for rank in range(size)]
    assert torch.cat(parts, 1).sort(1).values.equal(row)
    assert order.join(parts, 1).equal(row)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_in_balanced_order_every_rank_has_as_many_pairs_of_chunks(size: int) -> None:
    def pairs(order: Order) -> list[int]:
        return [sum(chunk + 1 for chunk in order.chunks(rank)) for rank in range(size)]

    assert pairs(Order(size)) == [2 * size + 1] * size
    assert pairs(Order(size, balanced=False)) == [4 * rank + 3 for rank in range(size)]


@pytest.mark.parametrize("num_chunks", [2, 4, 8, 12])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 7, 23, 24])
@pytest.mark.parametrize("rows", [None, DOCUMENTS[:1], DOCUMENTS], ids=["one", "a row", "rows"])
def test_what_the_stretches_say_is_what_a_mask_of_all_tokens_says(
    rows: tuple[tuple[int, ...], ...] | None, window: int | None, num_chunks: int
) -> None:
    row_mask = RowMask(
        None if rows is None else numbers_of(rows), num_keys=SEQ, device=torch.device("cpu")
    )
    dense = row_mask.dense(window)
    expected = torch.ones(1, SEQ, SEQ, dtype=torch.bool).tril() if dense is None else dense[:, 0]
    sight, length = Sight(row_mask, window, num_chunks), SEQ // num_chunks
    held = [chunk for rank in range(num_chunks // 2) for chunk in (rank, num_chunks - 1 - rank)]
    found = torch.zeros_like(expected)
    for query in range(num_chunks):
        for stretch in sight.stretches(query, held):
            for place in range(stretch.first, stretch.stop):
                block = torch.ones(1, length, length, dtype=torch.bool)
                if stretch.causal:
                    block = block.tril()
                if stretch.mask is not None:
                    block = stretch.mask[:, 0]
                key = held[place]
                rows_of, columns = (slice(c * length, (c + 1) * length) for c in (query, key))
                assert not found[:, rows_of, columns].any(), "a pair of chunks counts once"
                found[:, rows_of, columns] = block
    assert found.equal(expected)


def test_a_mask_is_made_only_where_a_document_or_a_window_ends_inside_a_pair() -> None:
    def masks(rows: tuple[tuple[int, ...], ...] | None, window: int | None) -> int:
        numbers = None if rows is None else numbers_of(rows)
        sight = Sight(RowMask(numbers, num_keys=SEQ, device=torch.device("cpu")), window, 4)
        stretches = [sight.stretches(query, range(4)) for query in range(4)]
        return sum(stretch.mask is not None for stretch in itertools.chain(*stretches))

    assert masks(None, None) == 0
    assert masks(((6, 6, 12),), None) == 0  # documents end where chunks end
    assert masks(((6, 5, 13),), None) == 3  # inside chunk 1, which chunks 2 and 3 see a token of
    assert masks(None, 12) == 2  # two chunks: it closes inside those at distance two


def test_whole_chunks_side_by_side_are_one_stretch() -> None:
    sight = Sight(RowMask(None, num_keys=SEQ, device=torch.device("cpu")), None, 4)
    stretches = sight.stretches(3, range(4))
    assert [(s.first, s.stop, s.causal) for s in stretches] == [(0, 3, False), (3, 4, True)]


def test_the_host_asks_for_the_ends_of_documents_once_for_all_layers() -> None:
    row_mask = RowMask(numbers_of(DOCUMENTS), num_keys=SEQ, device=torch.device("cpu"))
    first, second = Sight(row_mask, None, 4), Sight(row_mask, 5, 4)
    assert first.edges is second.edges

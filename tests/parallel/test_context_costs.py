"""What context parallelism costs: bytes, FLOPs and memory, counted by scripts/bench_context.py."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from scripts.bench_context import SMALL, Count, count, minimum
from torchtitan_lite.parallel.exchange import METHODS

MODEL, SEQ_LEN = dataclasses.replace(SMALL, num_hidden_layers=2), 512


@cache
def counted(rank: int, size: int, method: str, balanced: bool = True) -> Count:
    return count(MODEL, SEQ_LEN, rank, size, method, balanced=balanced)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_sends_what_it_must_and_no_more(method: str, size: int) -> None:
    sent = sum(counted(size - 1, size, method).sent.values()) / MODEL.num_hidden_layers
    assert sent == minimum(MODEL, SEQ_LEN, size, method)


@pytest.mark.parametrize("method", METHODS)
def test_in_balanced_order_every_rank_computes_its_share_exactly(method: str) -> None:
    alone = counted(0, 1, "").flops
    assert [4 * counted(rank, 4, method).flops for rank in (0, 3)] == [alone, alone]


def test_in_plain_order_the_last_rank_computes_seven_times_the_first() -> None:
    first, last = (counted(rank, 4, "ring", False).flops for rank in (0, 3))
    assert last == 7 * first


@pytest.mark.parametrize("method", METHODS)
def test_memory_of_activations_falls_with_the_ranks(method: str) -> None:
    alone = counted(0, 1, "").peak
    assert 4 * counted(3, 4, method).peak < 1.1 * alone

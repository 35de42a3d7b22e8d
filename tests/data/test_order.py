"""The permutation is one, for every size; it looks random; it never changes."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from torchtitan_lite.data.order import permute

GOLDEN_10 = [5, 3, 0, 6, 1, 7, 9, 8, 2, 4]
GOLDEN_LARGE = [681419463616, 516940852845, 258942774638]

Order = Callable[[NDArray[np.int64], int, int], NDArray[np.int64]]  # indices, n, epoch


def ours(indices: NDArray[np.int64], n: int, epoch: int) -> NDArray[np.int64]:
    return permute(indices, n, seed=42, epoch=epoch)


def in_sequence(indices: NDArray[np.int64], n: int, epoch: int) -> NDArray[np.int64]:
    return indices


def rotated(indices: NDArray[np.int64], n: int, epoch: int) -> NDArray[np.int64]:
    return (indices + 977 * epoch) % n


@pytest.mark.parametrize("n", [*range(1, 70), 255, 256, 257, 1000, 65536, 65537, 1_000_003])
def test_every_row_comes_exactly_once(n: int) -> None:
    rows = permute(np.arange(n), n, seed=7, epoch=3)
    assert np.array_equal(np.sort(rows), np.arange(n))


def test_a_row_does_not_depend_on_the_others_asked_for() -> None:
    whole = permute(np.arange(1000), 1000, seed=7, epoch=3)
    single = [int(permute(np.array([i]), 1000, seed=7, epoch=3)[0]) for i in range(0, 1000, 37)]
    assert single == whole[::37].tolist()
    assert permute(np.array([], dtype=np.int64), 10, seed=0, epoch=0).size == 0


def test_a_million_million_rows_need_no_memory_and_no_time() -> None:
    n = 10**12
    indices = np.random.default_rng(0).integers(0, n, 100_000)
    started = time.process_time()
    rows = permute(indices, n, seed=1, epoch=0)
    assert time.process_time() - started < 1.0  # 100,000 a second
    assert rows.min() >= 0 and rows.max() < n
    assert np.unique(rows).size == np.unique(indices).size


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    keys = [(seed, epoch) for seed in (-1, 0, 1, 2**63) for epoch in range(5)]
    orders = {
        tuple(permute(np.arange(100), 100, seed=seed, epoch=epoch).tolist()) for seed, epoch in keys
    }
    assert len(orders) == len(keys)


def test_the_order_is_the_one_that_checkpoints_rely_on() -> None:
    assert permute(np.arange(10), 10, seed=42, epoch=0).tolist() == GOLDEN_10
    assert permute(np.arange(3), 10**12, seed=42, epoch=1).tolist() == GOLDEN_LARGE


def chi_squared_of_places(order: Order, n: int, num_epochs: int) -> float:
    """How far from uniform row x place is, in standard deviations of chi-squared."""
    counts = np.zeros((n, n))
    for epoch in range(num_epochs):
        counts[order(np.arange(n), n, epoch), np.arange(n)] += 1
    expected = num_epochs / n
    freedom = (n - 1) ** 2
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def largest_correlation(order: Order, n: int) -> float:
    """Of a row with its place, its neighbour and its place in the next epoch; sigma about 1."""
    first, second = (order(np.arange(n), n, epoch).astype(float) for epoch in (0, 1))
    pairs = [(first, np.arange(n)), (first[1:], first[:-1]), (first, second)]
    return max(abs(np.corrcoef(a, b)[0, 1]) for a, b in pairs) * np.sqrt(n)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 17])
def test_every_row_is_equally_likely_at_every_place(n: int) -> None:
    assert abs(chi_squared_of_places(ours, n, 50 * n)) < 5


@pytest.mark.parametrize("n", [1000, 100_003])
def test_rows_do_not_correlate_with_place_neighbour_or_epoch(n: int) -> None:
    assert largest_correlation(ours, n) < 5


def test_the_statistics_tell_an_order_that_is_no_shuffle() -> None:
    assert chi_squared_of_places(in_sequence, 8, 1600) > 5
    assert largest_correlation(rotated, 1000) > 5
    assert largest_correlation(in_sequence, 1000) > 5

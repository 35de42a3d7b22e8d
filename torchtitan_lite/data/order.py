"""A shuffle that needs no list.

Row `index` of epoch `epoch` is a keyed permutation of [0, n), computed for one index without the
others: no list of n numbers exists, a run resumes at any place by arithmetic alone, and every
rank computes the same order by itself.

A Feistel network permutes b-bit numbers, 2^b being the smallest power of two >= n. The number is
cut in two halves; in turn, each half is xored with a keyed hash of the other:

    low  high
     |    |        high ^= hash(low,  key 0)
     |    |        low  ^= hash(high, key 1)      ... each step undoes itself, so the whole
     v    v        high ^= hash(low,  key 2)          is a bijection whatever the hash is

A result outside [0, n) is permuted again until it falls inside (cycle walking): as 2^b < 2n that
takes fewer than two passes on average, and it keeps the bijection (Black and Rogaway, "Ciphers
with arbitrary finite domains", 2002). Keys come from (seed, epoch) alone.

The order is part of what a checkpoint means: changing a constant here changes every resumed run.
Proven in tests/data/test_order.py, a golden order included.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 8
BYTES_A_KEY = 8


def permute(
    indices: NDArray[np.int64], n: int, *, seed: int, epoch: int
) -> NDArray[np.int64]:  # same shape
    """Where `indices` of [0, n) lie in the order of this seed and epoch; each row exactly once."""
    assert n >= 1, f"nothing to permute: n = {n}"
    assert indices.size == 0 or (indices.min() >= 0 and indices.max() < n), "index outside [0, n)"
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=NUM_ROUNDS * BYTES_A_KEY)
    keys = np.frombuffer(digest.digest(), dtype="<u8")
    num_bits = max(2, (n - 1).bit_length())  # at least one bit a half
    result = _feistel(indices.astype(np.uint64), num_bits, keys)
    outside = result >= n
    while outside.any():
        result[outside] = _feistel(result[outside], num_bits, keys)
        outside = result >= n
    return result.astype(np.int64)


def _feistel(
    values: NDArray[np.uint64], num_bits: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    low_bits = np.uint64(num_bits // 2)
    low_mask = np.uint64((1 << num_bits // 2) - 1)
    high_mask = np.uint64((1 << (num_bits - num_bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for round_number, key in enumerate(keys):
        if round_number % 2 == 0:
            high = high ^ (_hash(low, key) & high_mask)
        else:
            low = low ^ (_hash(high, key) & low_mask)
    return (high << low_bits) | low


def _hash(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), keyed at its entry."""
    mixed = values + key  # wraps modulo 2^64, as do the products
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))

"""Dropout whose mask is a pure function of (seed, sample, place), so that no mesh can change it.

A generator would have to be moved in step on every rank, kept for recomputation and saved for a
resume; and two ranks that hold parts of one tensor would still draw other masks than one process.
Here each element hashes its own name:

    key of a row      hash(seed, number of the sample in the run)        drawn by the trainer
    element           hash(key, site of the dropout in the model, index in the whole row)

So the same element is dropped in one process, on the tensor-parallel rank that holds it, on every
rank that holds a copy, in a recomputed forward, and after a resume on another mesh. The hash is
splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014); a dozen
integer operations an element.

Proven in tests/ops/test_dropout.py, and on meshes in tests/parallel/test_tensor_plan.py and
tests/parity/.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

_BITS = 24  # of the hash that are compared with p, which is so exact to 6e-8


def _signed(number: int) -> int:
    """The int64 with the 64 bits of `number`."""
    return (number & (2**64 - 1)) - (number >> 63 & 1) * 2**64


STEP, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def scramble(x: Tensor) -> Tensor:
    """splitmix64's output function; int64 multiplication wraps, and >> must not carry the sign."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _FIRST
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _SECOND
    return x ^ (x >> 31 & (1 << 33) - 1)


def sample_keys(seed: int, first_sample: int, num_samples: int, device: torch.device) -> Tensor:
    """(num_samples,) int64: a key for each of consecutive samples of a run."""
    samples = torch.arange(first_sample, first_sample + num_samples, device=device)
    return scramble(scramble(samples * STEP) + _signed(seed))


def hash_of_name(name: str) -> int:
    """An int64."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)


class Dropout(nn.Module):
    """Zero a share `p` of the elements and scale the rest by 1 / (1 - p), given keys.

    A plan that hands this module the `shard`-th of equal slices of dim 1 (of the sequence, or of
    the heads) sets `shard`. `site` names the place in the whole model.
    """

    def __init__(self, p: float, site: str) -> None:
        super().__init__()
        self.p = p
        self.site = hash_of_name(site)
        self.shard = 0

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """x: (batch, ...), keys: (batch,); without keys (evaluation) x itself."""
        if self.p == 0.0 or keys is None:
            return x
        # Slices of dim 1 lie one after the other in a row.
        first = self.shard * x[:1].numel()
        index = torch.arange(first, first + x[:1].numel(), device=x.device).view(x[:1].shape)
        key = scramble(keys + self.site).view(-1, *[1] * (x.dim() - 1))
        bits = scramble(key + index * STEP) & (1 << _BITS) - 1
        return x.masked_fill(bits < round(self.p * (1 << _BITS)), 0.0) / (1 - self.p)

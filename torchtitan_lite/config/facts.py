"""What a check looks at and what it finds: the material of checks.py and pipeline_checks.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torchtitan_lite.config.keys import Config
from torchtitan_lite.config.load import problem_line
from torchtitan_lite.config.schema import get_value

SHARD = "parallelism.data_parallel_shard_degree"
TENSOR = "parallelism.tensor_parallel_degree"
PIPELINE = "parallelism.pipeline_parallel_degree"
CONTEXT = "parallelism.context_parallel_degree"
DEGREES = (TENSOR, PIPELINE, "parallelism.data_parallel_replicate_degree", SHARD)
BATCH = ("training.global_batch_size", "training.local_batch_size")


class ModelShape(Protocol):
    """What the checks ask of a model's configuration."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def padded_vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


class Problem(NamedTuple):
    """One line for the user, and the keys it is about."""

    keys: tuple[str, ...]
    line: str

    def __str__(self) -> str:
        return self.line


@dataclass(frozen=True)
class Facts:
    """What a check may look at; `batch_ranks` is None where the degrees do not fit the world."""

    config: Config
    model: ModelShape | None
    world_size: int
    batch_ranks: int | None


def problem(config: Config, keys: tuple[str, ...], *, reason: str, fix: str) -> Problem:
    """A problem told at the first of its keys that the user set, or else at the first."""
    name = next((key for key in keys if key in config.user_set), keys[0])
    source = config.sources.get(name, "the defaults")
    return Problem(
        keys, problem_line(name, get_value(config, name), source, reason=reason, fix=fix)
    )


def nearest_number(options: list[int], number: int) -> int:
    """The option closest to a number, the smaller of two."""
    return min(options, key=lambda option: (abs(option - number), option))

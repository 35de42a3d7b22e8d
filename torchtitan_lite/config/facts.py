"""What the checks of a configuration look at, and the keys that several of them name.

A check (checks.py, model_checks.py) takes Facts and yields its findings: the keys it is about, the
reason, the fix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torchtitan_lite.config.keys import Config

TENSOR = "parallelism.tensor_parallel_degree"
PIPELINE = "parallelism.pipeline_parallel_degree"
REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
CONTEXT = "parallelism.context_parallel_degree"
DEGREES = {
    "pp": PIPELINE, "dp_replicate": REPLICATE, "dp_shard": SHARD, "cp": CONTEXT, "tp": TENSOR
}  # fmt: skip
SCHEDULE = "parallelism.pipeline_parallel_schedule"
LAYERS_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
BY_HAND = "parallelism.module_fqns_per_model_part"


class ModelShape(Protocol):
    """What the checks ask of a model's configuration."""

    @property
    def layer_type(self) -> str: ...
    @property
    def learned_positions(self) -> bool: ...
    @property
    def has_dropout(self) -> bool: ...
    @property
    def rope_follows_length(self) -> bool: ...
    @property
    def kv_lora_rank(self) -> int | None: ...
    @property
    def attention_dropout(self) -> float: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def qk_nope_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def router_bias(self) -> bool: ...
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
    def has_experts(self, index: int) -> bool: ...


class Facts(NamedTuple):
    """What a check may look at; `batch_ranks` is None where the degrees do not fit the world."""

    config: Config
    model: ModelShape | None
    world_size: int
    batch_ranks: int | None


Findings = Iterator[tuple[Sequence[str], str, str]]


def row_lengths(config: Config) -> dict[str, int]:
    """Key -> tokens, of each key that says how long a row is."""
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable and config.validation.seq_len != -1:
        lengths["validation.seq_len"] = config.validation.seq_len
    return lengths


def multiple(number: int, unit: int) -> str:
    """Words for the multiples of `unit`, with the one next to `number`."""
    return f"a multiple of {unit}, such as {max(1, round(number / unit)) * unit}"

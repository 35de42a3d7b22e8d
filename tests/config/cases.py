"""What the tests of the configuration share: a model's shape, a command line's problems."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lite.config import Config, ConfigError, config_warnings, load_and_check


@dataclass(frozen=True)
class Shape:
    """The sizes of a small Llama, as the checks see them."""

    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    num_hidden_layers: int = 6
    intermediate_size: int = 768
    padded_vocab_size: int = 2048
    max_position_embeddings: int = 2048
    layer_type: str = "attention"
    learned_positions: bool = False
    has_dropout: bool = False
    rope_follows_length: bool = False
    num_experts: int = 0
    router_bias: bool = False
    hidden_size: int = 256
    moe_intermediate_size: int = 256
    first_k_dense_replace: int = 0
    kv_lora_rank: int | None = None
    attention_dropout: float = 0.0
    head_dim: int = 32
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0

    def has_experts(self, index: int) -> bool:
        return self.num_experts > 0 and index >= self.first_k_dense_replace


SYNTHETIC = ["--training.dataset", "synthetic"]
"""What makes the defaults a complete configuration: data that needs no file."""


def checked(argv: list[str], *, world: int = 1, shape: Shape | None = None) -> Config:
    """The resolved Config of a command line over synthetic data."""
    shape = Shape() if shape is None else shape
    return load_and_check([*SYNTHETIC, *argv], world, lambda config: shape)[0]


def problems(argv: list[str], *, world: int = 1, shape: Shape | None = None) -> list[str]:
    """The lines that refuse a command line; none if it passes."""
    try:
        checked(argv, world=world, shape=shape)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def warnings(argv: list[str], *, world: int = 1, shape: Shape | None = None) -> list[str]:
    """The warnings about a command line that passes."""
    return config_warnings(checked(argv, world=world, shape=shape), shape or Shape())


def degrees(**short: int) -> list[str]:
    """Flags for the degrees given as pp, dr, ds, cp, tp."""
    names = {
        "pp": "pipeline_parallel_degree",
        "dr": "data_parallel_replicate_degree",
        "ds": "data_parallel_shard_degree",
        "cp": "context_parallel_degree",
        "tp": "tensor_parallel_degree",
    }
    return [f"--parallelism.{names[name]}={degree}" for name, degree in short.items()]

"""Every family trains alike on any mesh: biases, windows, norms of heads, positions, states.

Each row is a family's debugmodel made tiny, four steps of the real Trainer on eight ranks against
one process (tests/parity/harness.py).
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest

from tests.parity.harness import SEQ_LEN, TINY, Mesh, Run, assert_equal, errors, run
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.families import model_config

EVERY_AXIS = Mesh(pp=2, dp_shard=2, tp=2)
WITHOUT_TENSOR_PARALLEL = Mesh(pp=2, dp_replicate=2, dp_shard=2)
SIZES = {
    name: getattr(TINY, name)
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    )
}
DROPOUT = {"attention_dropout": 0.1, "residual_dropout": 0.2, "embedding_dropout": 0.3}
WINDOW = {"sliding_window": SEQ_LEN // 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": WINDOW,
    "qwen2": {"sliding_window": SEQ_LEN // 3, "max_window_layers": 2},
    "qwen3": {},
    "starcoder2": WINDOW,
    "smollm3": {"no_rope_layer_interval": 2},
    "gpt2": DROPOUT,
    "mamba": {"state_size": 3, "time_step_rank": 5},
}
# Without rotation a key's bias adds the same to all scores of a query, and the softmax forgets it:
# its gradient is the rounding error of zero.
ROUNDING = "self_attn.k_proj.bias"


def tiny(family: str, **changes: Any) -> ModelConfig:
    """The family's debugmodel in the sizes of TINY."""
    config = model_config(family, "debugmodel", {}, "")
    return dataclasses.replace(config, **{**SIZES, **FAMILIES[family], **changes})


# A bias starts at zero: after four steps it is Adam's updates and nothing else, so their rounding
# where a gradient is about eps (tests/parity/harness.py) is not diluted as in a weight.
OPTIONS = {"optimizer.eps": 1e-4}


@cache
def alone(family: str) -> Run:
    return run(Mesh(), OPTIONS, model=tiny(family))


# What has nothing that another has not, or is long: slow proofs.
SLOW = ("mistral", "qwen2", "smollm3", "starcoder2", "gpt2")


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow if f in SLOW else ()) for f in FAMILIES],
)
def test_a_family_trains_on_every_axis_as_on_one_process(family: str) -> None:
    mesh = WITHOUT_TENSOR_PARALLEL if family == "mamba" else EVERY_AXIS
    ours, expected = run(mesh, OPTIONS, model=tiny(family)), alone(family)
    if family == "gpt2":
        for one in (ours, expected):
            noise = [name for name in one.gradients if name.endswith(ROUNDING)]
            assert len(noise) == TINY.num_hidden_layers
            assert all(one.gradients.pop(name).abs().max() < 1e-7 for name in noise)
            assert all(one.parameters.pop(name).abs().max() < 1e-3 for name in noise)
    assert_equal(ours, expected)


@pytest.mark.parametrize("options", [{}, {"parallelism.enable_sequence_parallel": False}])
def test_dropout_drops_the_same_on_tensor_parallel_ranks(options: dict[str, Any]) -> None:
    """Also where layers are computed again, which draws the masks again."""
    model = dataclasses.replace(TINY, **DROPOUT)
    options = {**options, "activation_checkpoint.mode": "full"}
    assert_equal(run(Mesh(dp_shard=2, tp=2), options, model=model), run(Mesh(), model=model))


def test_dropout_acts() -> None:
    found = errors(run(Mesh(), model=dataclasses.replace(TINY, **DROPOUT)), run(Mesh()))
    assert found["loss"] > 1e-3


def test_a_tied_model_on_two_stages_keeps_one_weight() -> None:
    """Starcoder2's head is its embedding: trained on pp2, both stages hold the same bits."""
    ends = run(Mesh(pp=2), model=tiny("starcoder2"), act=_train_and_return_ends).returned
    assert ends[0].keys() == {"embed_tokens"} and ends[1].keys() == {"lm_head"}
    assert ends[0]["embed_tokens"].equal(ends[1]["lm_head"])
    assert_equal(run(Mesh(pp=2), OPTIONS, model=tiny("starcoder2")), alone("starcoder2"))


def _train_and_return_ends(trainer: Any) -> dict[str, Any]:
    trainer.train()
    modules = [(name, m) for part in trainer.model.parts for name, m in part.named_children()]
    ends = {name: m for name, m in modules if name in ("embed_tokens", "lm_head")}
    return {name: module.weight.detach().clone() for name, module in ends.items()}

"""What context parallelism asks of rows, heads and models, and its keys' other names."""

from __future__ import annotations

import pytest

from tests.config.cases import Shape, checked, degrees, problems, warnings

METHOD = "--parallelism.context_parallel_method="
ROTATE = "--parallelism.context_parallel_rotate_method="
ORDER = "--parallelism.context_parallel_load_balancer="


@pytest.mark.parametrize(
    ("axes", "length", "reason", "fitting"),
    [
        ({"cp": 4}, 2044, "cuts the 2044 tokens of a row in 2 x 4 pieces", 2048),
        ({"cp": 4}, 12, "cuts the 12 tokens of a row in 2 x 4 pieces", 16),
        ({"cp": 3}, 2048, "cuts the 2048 tokens of a row in 2 x 3 pieces", 2046),
        (
            {"cp": 2, "tp": 4},
            2044,
            "in 2 x 2 pieces, and sequence parallelism a rank's two among 4",
            2048,
        ),
    ],
)
def test_a_row_has_as_many_tokens_as_the_ranks_can_share(
    axes: dict[str, int], length: int, reason: str, fitting: int
) -> None:
    world = axes["cp"] * axes.get("tp", 1)
    (line,) = problems([*degrees(**axes), f"--training.seq_len={length}"], world=world)
    assert f"context parallelism {reason}" in line or reason in line
    assert f"set training.seq_len to a multiple of {_unit(axes)}, such as {fitting}" in line
    assert problems([*degrees(**axes), f"--training.seq_len={fitting}"], world=world) == []


def _unit(axes: dict[str, int]) -> int:
    return {(4, 1): 8, (3, 1): 6, (2, 4): 8}[axes["cp"], axes.get("tp", 1)]


def test_rows_of_validation_are_shared_too() -> None:
    held_out = ["--validation.enable", "--validation.dataset=synthetic"]
    argv = [*degrees(cp=4), *held_out, "--validation.seq_len=2044"]
    (line,) = problems(argv, world=4)
    assert line.startswith("validation.seq_len = 2044")


def test_ulysses_shares_the_kv_heads() -> None:
    flags = [METHOD + "ulysses"]
    (line,) = problems([*degrees(cp=8), *flags], world=8)
    assert line.endswith(
        "ulysses shares 4 KV heads (num_key_value_heads 4 / tp 1) among 8 ranks; set "
        "parallelism.context_parallel_degree to 1, 2 or 4, or the method to allgather or ring"
    )
    assert problems([*degrees(cp=4), *flags], world=4) == []
    latent = Shape(kv_lora_rank=16, num_attention_heads=8, num_key_value_heads=4)
    assert problems([*degrees(cp=8), *flags], world=8, shape=latent) == []
    (line,) = problems([*degrees(cp=4, tp=2), *flags], world=8)
    assert "shares 2 KV heads (num_key_value_heads 4 / tp 2) among 4 ranks" in line
    assert problems([*degrees(cp=8), METHOD + "ring"], world=8) == []


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape(layer_type="state_space"), "layers with a state that passes along the row"),
        (Shape(has_dropout=True), "dropout"),
        (Shape(rope_follows_length=True), "rope_type dynamic"),
    ],
    ids=["state space", "dropout", "dynamic rope"],
)
def test_what_needs_whole_rows_is_not_shared(shape: Shape, reason: str) -> None:
    (line,) = problems(degrees(cp=2), world=2, shape=shape)
    assert line.startswith("parallelism.context_parallel_degree = 2")
    assert reason in line and line.endswith("needs whole rows on a rank; set it to 1")
    assert problems([], shape=shape) == []


@pytest.mark.parametrize(("name", "method"), [("alltoall", "ring"), ("allgather", "allgather")])
def test_the_rotate_method_is_another_name_of_the_method(name: str, method: str) -> None:
    config = checked([*degrees(cp=2), ROTATE + name], world=2)
    assert config.parallelism.context_parallel_method == method
    assert config.parallelism.context_parallel_rotate_method == "default"


def test_two_names_that_disagree_are_refused() -> None:
    (line,) = problems([*degrees(cp=2), ROTATE + "alltoall", METHOD + "ulysses"], world=2)
    assert "means parallelism.context_parallel_method = ring, which is set to ulysses" in line
    assert line.endswith("keep one of the two")
    assert problems([*degrees(cp=2), ROTATE + "alltoall", METHOD + "ring"], world=2) == []


def test_its_keys_do_nothing_on_one_rank() -> None:
    lines = warnings([METHOD + "ring", ORDER + "none"])
    assert len(lines) == 2
    assert all("has no effect" in line and "context_parallel_degree is 1" in line for line in lines)
    assert warnings([*degrees(cp=2), METHOD + "ring", ORDER + "none"], world=2) == []

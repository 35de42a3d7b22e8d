"""What must hold between a configuration and its model, or the weights that it begins with."""

from __future__ import annotations

from pathlib import Path

from tests.config.cases import Shape, degrees, problems, warnings

STATE_SPACE = Shape(layer_type="state_space", max_position_embeddings=1024)
LEARNED = Shape(learned_positions=True, max_position_embeddings=1024)
VALIDATION = ["--validation.enable", "--validation.dataset=synthetic"]


def test_a_state_space_model_is_not_cut_over_tensor_parallel_ranks() -> None:
    (line,) = problems(degrees(tp=2), world=2, shape=STATE_SPACE)
    assert line.startswith("parallelism.tensor_parallel_degree = 2")
    assert "a state-space layer cannot be cut over 2 ranks" in line
    assert problems(degrees(pp=2), world=2, shape=STATE_SPACE) == []


def test_a_row_is_no_longer_than_the_positions_that_are_learned() -> None:
    argv = [*VALIDATION, "--training.seq_len=1024", "--validation.seq_len=1025"]
    (line,) = problems(argv, shape=LEARNED)
    assert line.startswith("validation.seq_len = 1025")
    assert "an embedding for 1024 positions" in line
    assert problems(argv[2:3], shape=LEARNED) == []
    (line,) = problems(["--training.seq_len=1025"], shape=LEARNED)
    assert line.startswith("training.seq_len = 1025")
    assert problems(["--training.seq_len=1025"], shape=Shape()) == []


def test_a_state_space_model_extrapolates_no_position() -> None:
    long = ["--training.seq_len=1025"]
    assert warnings(long, shape=STATE_SPACE) == []
    (line,) = warnings(long, shape=Shape(max_position_embeddings=1024))
    assert "extrapolated" in line


def test_the_kind_of_folder_and_the_key_agree(tmp_path: Path) -> None:
    argv = ["--checkpoint.enable", f"--checkpoint.initial_load_path={tmp_path}"]
    in_hf = [*argv, "--checkpoint.initial_load_in_hf"]
    (line,) = problems(in_hf)
    assert "there is no config.json in it" in line
    assert problems(argv) == []
    (tmp_path / "config.json").write_text("{}")
    assert problems(in_hf) == []
    (line,) = problems(argv)
    assert line.endswith("it is a Hugging Face folder; set checkpoint.initial_load_in_hf to true")
    (line,) = problems([*in_hf, "--checkpoint.no_initial_load_model_only"])
    assert line.startswith("checkpoint.initial_load_model_only = false")
    assert "holds weights alone" in line


EXPERTS = Shape(num_experts=8)


def test_experts_are_shared_among_ranks_that_divide_them() -> None:
    (line,) = problems(
        [*degrees(), "--parallelism.expert_parallel_degree=3"], world=6, shape=EXPERTS
    )
    assert line.startswith("parallelism.expert_parallel_degree = 3")
    assert line.endswith("3 does not divide the model's 8 experts; set it to 1, 2, 4 or 8")
    argv = [*degrees(pp=2, tp=2), "--parallelism.expert_parallel_degree=8"]
    (line,) = problems(argv, world=8, shape=EXPERTS)
    assert "dp_shard x cp x tp = 4 ranks, which 8 does not divide" in line
    assert line.endswith("set it to 1, 2 or 4")
    assert (
        problems([*argv[:-1], "--parallelism.expert_parallel_degree=4"], world=8, shape=EXPERTS)
        == []
    )
    (line,) = problems(["--parallelism.expert_parallel_degree=2"], world=2)
    assert "the model has no experts to share among 2 ranks" in line


def test_keys_of_experts_act_where_there_are_some() -> None:
    argv = ["--moe.aux_loss_weight=0.1", "--moe.aux_loss_form=global"]
    assert warnings(argv, shape=EXPERTS) == []
    assert len(warnings(argv)) == 2 and all("has no experts" in line for line in warnings(argv))
    (line,) = warnings(argv[1:], shape=EXPERTS)
    assert line.endswith("has no effect; moe.aux_loss_weight is 0.0")
    speed = ["--moe.bias_update_speed=0.01"]
    (line,) = warnings(speed, shape=EXPERTS)
    assert "routers have no bias" in line
    assert warnings(speed, shape=Shape(num_experts=8, router_bias=True)) == []


def test_tensor_parallel_ranks_share_the_experts() -> None:
    argv = [*degrees(tp=2), "--parallelism.zero_stage=1"]
    assert warnings(argv, world=2, shape=EXPERTS) == []
    (line,) = warnings(argv, world=2)
    assert "there is one rank to share" in line

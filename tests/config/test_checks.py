"""Checks between keys, model and world: each with what passes and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.cases import Shape, checked, degrees, problems
from torchtitan_lite.config import Config, ConfigError, check_config, load_and_check, load_config


@pytest.mark.parametrize(
    ("argv", "world", "line"),
    [
        (
            degrees(tp=3),
            8,
            'parallelism.tensor_parallel_degree = 3 (from --parallelism.tensor_parallel_degree): '
            "pp 1 x dp_replicate 1 x dp_shard the rest x cp 1 x tp 3 = 3, which does not divide "
            "this world of 8 ranks; set parallelism.tensor_parallel_degree to 2",
        ),
        (
            degrees(dr=2, ds=3),
            8,
            "parallelism.data_parallel_replicate_degree = 2 "
            "(from --parallelism.data_parallel_replicate_degree): "
            "pp 1 x dp_replicate 2 x dp_shard 3 x cp 1 x tp 1 = 6, and this is a world of 8 ranks; "
            "set parallelism.data_parallel_shard_degree to 4, or to -1 for the rest of the world",
        ),
        (
            degrees(tp=2),
            1,
            'parallelism.tensor_parallel_degree = 2 (from --parallelism.tensor_parallel_degree): '
            "pp 1 x dp_replicate 1 x dp_shard the rest x cp 1 x tp 2 = 2, which does not divide "
            "this world of 1 rank; set parallelism.tensor_parallel_degree to 1",
        ),
        (
            degrees(pp=2, tp=8),
            8,
            'parallelism.tensor_parallel_degree = 8 (from --parallelism.tensor_parallel_degree): '
            "pp 2 x dp_replicate 1 x dp_shard the rest x cp 1 x tp 8 = 16, which does not divide "
            "this world of 8 ranks; set parallelism.tensor_parallel_degree to 4",
        ),
        (
            degrees(pp=5, tp=3),
            8,
            'parallelism.tensor_parallel_degree = 3 (from --parallelism.tensor_parallel_degree): '
            "pp 5 x dp_replicate 1 x dp_shard the rest x cp 1 x tp 3 = 15, which does not divide "
            "this world of 8 ranks; choose degrees whose product divides 8, and set "
            "parallelism.data_parallel_shard_degree to -1",
        ),
        (
            degrees(cp=2),
            2,
            "parallelism.context_parallel_degree = 2 (from --parallelism.context_parallel_degree): "
            "this version has no context parallelism; set it to 1; for long rows use tensor "
            "parallelism with sequence parallelism",
        ),
    ],
)  # fmt: skip
def test_degrees_that_do_not_fit_the_world(argv: list[str], world: int, line: str) -> None:
    assert problems([*argv, "--training.seq_len=48"], world=world, shape=Shape(*(48,) * 6)) == [
        line
    ]


@pytest.mark.parametrize("world", range(1, 17))
def test_the_advice_about_the_world_works(world: int) -> None:
    shape, rows = Shape(*(720720,) * 6), ["--training.seq_len=720720"]
    for pp, tp in ((1, 3), (1, 5), (2, 3), (3, 1), (1, 17)):
        lines = problems([*rows, *degrees(pp=pp, tp=tp)], world=world, shape=shape)
        for line in lines:
            advice = line.rpartition("; ")[2]
            if advice.startswith("set parallelism."):
                _, name, _, value = advice.split()
                argv = [*rows, *degrees(pp=pp, tp=tp), f"--{name}={value}"]
                assert problems(argv, world=world, shape=shape) == []


@pytest.mark.parametrize(
    ("shape", "uneven", "fitting"),
    [
        (Shape(), "num_key_value_heads 4", "1, 2 or 4, the nearest is 4"),
        (Shape(num_key_value_heads=2), "num_key_value_heads 2", "1 or 2, the nearest is 2"),
        (
            Shape(num_attention_heads=12, num_key_value_heads=12),
            "num_attention_heads 12, num_key_value_heads 12",
            "1, 2 or 4, the nearest is 4",
        ),
        (
            Shape(num_key_value_heads=8, intermediate_size=100),
            "intermediate_size 100",
            "1, 2 or 4, the nearest is 4",
        ),
        (
            Shape(num_key_value_heads=8, padded_vocab_size=61),
            "padded_vocab_size 61",
            "1, the nearest is 1",
        ),
    ],
)
def test_sizes_that_tp_does_not_divide_are_named_with_both_numbers(
    shape: Shape, uneven: str, fitting: str
) -> None:
    (line,) = problems(degrees(tp=8), world=8, shape=shape)
    assert (
        f": 8 does not divide the model's {uneven}; degrees that divide all are {fitting}" in line
    )
    assert problems(degrees(tp=int(line[-1])), world=8, shape=shape) == []


def test_a_tp_that_divides_everything_passes() -> None:
    assert problems(degrees(tp=8), world=8, shape=Shape(num_key_value_heads=8)) == []


def test_sequence_parallelism_needs_rows_that_divide(tmp_path: Path) -> None:
    odd = [*degrees(tp=4), "--training.seq_len=30"]
    (line,) = problems(odd, world=4)
    assert "shares the 30 tokens of a row among 4 ranks" in line
    assert "set training.seq_len to 28 or 32, or" in line
    assert problems([*odd, "--parallelism.no_enable_sequence_parallel"], world=4) == []
    assert problems([*degrees(tp=1), "--training.seq_len=30"], world=4) == []
    validated = [
        *degrees(tp=4),
        "--validation.enable",
        "--validation.dataset=synthetic",
        "--validation.seq_len=30",
    ]
    (line,) = problems(validated, world=4)
    assert line.startswith("validation.seq_len = 30 ") and "28 or 32" in line


def test_the_global_batch_is_a_multiple_of_what_all_batch_ranks_read() -> None:
    argv = ["--training.local_batch_size=4", "--training.global_batch_size=20"]
    (line,) = problems(argv, world=2)
    assert line == (
        "training.global_batch_size = 20 (from --training.global_batch_size): "
        "training.global_batch_size 20 is not a multiple of training.local_batch_size 4 x "
        "2 batch ranks = 8; set training.global_batch_size to 16 or 24, "
        "or training.local_batch_size to 5"
    )
    for batch in (16, 24):
        assert problems([*argv, f"--training.global_batch_size={batch}"], world=2) == []
    assert problems([*argv, "--training.local_batch_size=5"], world=2) == []
    (line,) = problems([*argv, "--training.global_batch_size=3"], world=2)
    assert line.endswith("set training.global_batch_size to 8")
    # Ranks that share rows are no batch ranks.
    assert problems([*argv, *degrees(tp=2)], world=2) == []


def test_two_names_of_zero_stage_must_agree(tmp_path: Path) -> None:
    never = "--parallelism.fsdp_reshard_after_forward=never"
    (line,) = problems([never, "--parallelism.zero_stage=3"])
    assert "means parallelism.zero_stage = 2, which is set to 3; keep one of the two" in line
    assert problems([never, "--parallelism.zero_stage=2"]) == []
    assert problems([never]) == []
    path = tmp_path / "run.toml"
    path.write_text("[parallelism]\nzero_stage = 3\n")
    assert len(problems([never, "--job.config_file", str(path)])) == 1


def test_data_has_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "train.txt").write_text("some text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "nothing").mkdir()
    base = [f"--model.hf_assets_path={tmp_path}", "--training.dataset=auto"]

    def path(name: str) -> str:
        return f"--training.dataset_path={tmp_path / name}"

    assert problems([*base, path("train.txt")]) == []
    (line,) = problems(base)
    assert line == (
        'training.dataset_path = "" (from the defaults): training.dataset auto reads a file or a '
        'folder, and none is given; set training.dataset_path, or training.dataset to "synthetic"'
    )
    (line,) = problems([*base, path("trian.txt")])
    assert line.endswith(f"no such file or folder; did you mean {tmp_path / 'train.txt'}?")
    for name in ("empty.txt", "nothing"):
        (line,) = problems([*base, path(name)])
        assert line.endswith("is empty; give a file or a folder with data")
    validated = [*base, path("train.txt"), "--validation.enable"]
    (line,) = problems(validated)
    assert line.startswith('validation.dataset_path = "" (from the defaults): ')
    assert problems([*validated, f"--validation.dataset_path={tmp_path / 'train.txt'}"]) == []


def test_text_needs_a_tokenizer_and_tokens_do_not(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("some text")
    argv = [f"--model.hf_assets_path={tmp_path}", f"--training.dataset_path={tmp_path}/train.txt"]
    (line,) = problems([*argv, "--training.dataset=text"])
    assert line.startswith(f'model.hf_assets_path = "{tmp_path}"')
    assert f"there is no {tmp_path}/tokenizer.json" in line
    assert problems([*argv, "--training.dataset=tokens"]) == []
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "index.json").write_text("{}")
    found = [f"--training.dataset_path={tmp_path}/shards", "--training.dataset=auto"]
    assert problems([*argv, *found]) == []
    assert problems(argv) == []  # synthetic, by tests.config.cases


def test_a_run_starts_from_a_folder_that_exists(tmp_path: Path) -> None:
    (tmp_path / "step-5").mkdir()
    (tmp_path / "file").write_text("x")

    def from_path(name: str) -> list[str]:
        return ["--checkpoint.enable", f"--checkpoint.initial_load_path={tmp_path / name}"]

    assert problems(from_path("step-5")) == []
    (line,) = problems(from_path("step-6"))
    assert line.endswith(f"no such folder; did you mean {tmp_path / 'step-5'}?")
    (line,) = problems(from_path("file"))
    assert line.endswith("is a file; give the step folder")


def test_a_trace_fits_between_two_traces() -> None:
    argv = ["--profiling.enable_profiling", "--profiling.profile_freq=3"]
    (line,) = problems(argv)
    assert line.endswith("set profiling.profile_freq to at least 4")
    assert problems([*argv, "--profiling.profile_freq=4"]) == []
    assert problems(argv[1:]) == []


def test_problems_of_the_model_come_with_all_others() -> None:
    def resolve_model(config: Config) -> Shape:
        raise ConfigError("model.flavor is unknown\nmodel.overrides too")

    with pytest.raises(ConfigError) as caught:
        load_and_check(["--training.seqlen=3", "--training.dataset=synthetic"], 1, resolve_model)
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "training.seqlen",
        "model.flavor",
        "model.overrides",
    ]


def test_a_model_section_that_could_not_be_read_is_not_resolved() -> None:
    def resolve_model(config: Config) -> Shape:
        raise AssertionError("called")

    with pytest.raises(ConfigError, match="^model.flavour = "):
        load_and_check(["--model.flavour=8B", "--training.dataset=synthetic"], 1, resolve_model)


def test_checking_leaves_the_configuration_as_it_is() -> None:
    config = load_config(degrees(tp=3))
    check_config(config, Shape(), 8)
    assert config == load_config(degrees(tp=3))


def test_the_checked_configuration_and_its_model_are_handed_over() -> None:
    shape = Shape()
    config, model = load_and_check(["--training.dataset=synthetic"], 2, lambda config: shape)
    assert model is shape
    assert config == checked([], world=2)

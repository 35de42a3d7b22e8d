"""An option without effect is a warning that names the key; one with effect is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.cases import SYNTHETIC, Shape, checked, degrees, warnings
from torchtitan_lite.config import config_warnings, load_and_check, to_toml
from torchtitan_lite.config.effects import SILENT
from torchtitan_lite.config.schema import all_keys

FLOAT8 = "--quantize.linear.float8"
PP = "--parallelism.pipeline_parallel"
QUIET = ["--lr_scheduler.warmup_steps=1"]
BY_HAND = (
    '--parallelism.module_fqns_per_model_part=[["embed_tokens", "layers.0", "layers.1"], '
    '["layers.2", "layers.3", "layers.4", "layers.5", "norm", "lm_head"]]'
)

BY_BUDGET = ["--activation_checkpoint.mode=memory_budget", "--compile.enable"]

# (the key set, what makes it act, the world): alone it warns, with its condition it does not.
ROWS = [
    (f"{PP}_schedule=GPipe", degrees(pp=2), 2),
    (f"{PP}_microbatch_size=2", degrees(pp=2), 2),
    (f"{PP}_layers_per_stage=3", degrees(pp=2), 2),
    (BY_HAND, degrees(pp=2), 2),
    ("--parallelism.no_enable_sequence_parallel", degrees(tp=2), 2),
    ("--parallelism.disable_loss_parallel", degrees(tp=2), 2),
    ("--optimizer.momentum=0.9", ["--optimizer.name=SGD"], 1),
    ("--lr_scheduler.min_lr_factor=0.1", [], 1),
    (
        "--training.packing=best_fit",
        ["--validation.enable", "--validation.dataset=tokens", "--validation.dataset_path=."],
        1,
    ),
    ("--training.dataloader.prefetch_factor=4", ["--training.dataloader.num_workers=1"], 1),
    ("--checkpoint.interval=5", ["--checkpoint.enable"], 1),
    ("--checkpoint.folder=x", ["--checkpoint.enable"], 1),
    ("--checkpoint.keep_latest_k=5", ["--checkpoint.enable"], 1),
    ("--checkpoint.async_mode=async", ["--checkpoint.enable"], 1),
    ("--checkpoint.exclude_from_loading=optimizer", ["--checkpoint.enable"], 1),
    ("--checkpoint.initial_load_path=.", ["--checkpoint.enable"], 1),
    (
        "--checkpoint.no_initial_load_model_only",
        ["--checkpoint.enable", "--checkpoint.initial_load_path=."],
        1,
    ),
    (
        "--checkpoint.export_dtype=bfloat16",
        ["--checkpoint.enable", "--checkpoint.last_save_model_only"],
        1,
    ),
    (
        "--checkpoint.export_dtype=bfloat16",
        ["--checkpoint.enable", "--checkpoint.last_save_in_hf"],
        1,
    ),
    ("--compile.components=model", ["--compile.enable"], 1),
    ("--compile.backend=aot_eager", ["--compile.enable"], 1),
    ("--activation_checkpoint.memory_budget=0.3", BY_BUDGET, 1),
    (f"{FLOAT8}.scaling=delayed", [f"{FLOAT8}.recipe_name=tensorwise"], 1),
    (
        f"{FLOAT8}.amax_history_length=4",
        [f"{FLOAT8}.recipe_name=tensorwise", f"{FLOAT8}.scaling=delayed"],
        1,
    ),
    ("--metrics.save_tb_folder=x", ["--metrics.enable_tensorboard"], 1),
    ("--profiling.save_traces_folder=x", ["--profiling.enable_profiling"], 1),
    ("--profiling.profiler_active=2", ["--profiling.enable_profiling"], 1),
    ("--profiling.profiler_warmup=2", ["--profiling.enable_profiling"], 1),
    ("--profiling.profile_freq=20", ["--profiling.enable_profiling"], 1),
    ("--profiling.profile_freq=20", ["--profiling.enable_memory_snapshot"], 1),
    ("--profiling.save_memory_snapshot_folder=x", ["--profiling.enable_memory_snapshot"], 1),
    ("--validation.freq=5", ["--validation.enable", "--validation.dataset=synthetic"], 1),
    ("--validation.dataset=synthetic", ["--validation.enable"], 1),
    ("--validation.seq_len=2", ["--validation.enable", "--validation.dataset=synthetic"], 1),
]  # fmt: skip

# (the key set, what silences it, the world): alone it acts, with the other it warns.
SILENCED = [
    ("--parallelism.zero_stage=1", degrees(dr=2, ds=1), 2),
    ("--parallelism.zero_stage=0", degrees(tp=2), 2),
    ("--parallelism.fsdp_reshard_after_forward=never", degrees(dr=2, ds=1), 2),
    ("--model.flavor=1B", ["--model.name=auto"], 1),
    ("--optimizer.beta1=0.8", ["--optimizer.name=SGD"], 1),
    ("--optimizer.beta2=0.8", ["--optimizer.name=SGD"], 1),
    ("--optimizer.eps=1e-6", ["--optimizer.name=SGD"], 1),
    ("--optimizer.state_dtype=bfloat16", ["--optimizer.name=SGD"], 1),
    ("--optimizer.state_dtype=float32", ["--training.dtype=bfloat16"], 1),
    ("--optimizer.implementation=foreach", ["--optimizer.state_dtype=bfloat16"], 1),
    ("--optimizer.no_decay=*.bias", ["--optimizer.weight_decay=0"], 1),
    ("--lr_scheduler.min_lr_factor=0.1", ["--lr_scheduler.decay_type=constant"], 1),
    ("--lr_scheduler.decay_ratio=0.1", ["--lr_scheduler.decay_type=constant"], 1),
    ("--activation_checkpoint.selective_ac_option=op", ["--activation_checkpoint.mode=full"], 1),
    (
        "--activation_checkpoint.selective_ac_option=op",
        ["--activation_checkpoint.mode=memory_budget", "--compile.enable"],
        1,
    ),
    (f"{PP}_layers_per_stage=3", [BY_HAND], 2),
]


def _key(flag: str) -> str:
    return flag.removeprefix("--").partition("=")[0].replace(".no_enable", ".enable").replace(
        ".no_initial", ".initial"
    )  # fmt: skip


@pytest.mark.parametrize(("flag", "condition", "world"), ROWS)
def test_a_key_acts_only_under_its_condition(flag: str, condition: list[str], world: int) -> None:
    if flag != "--lr_scheduler.min_lr_factor=0.1":
        (line,) = warnings([*QUIET, flag], world=world)
        assert line.startswith(f"{_key(flag)} = ") and ": has no effect; " in line
        assert f"(from {flag.partition('=')[0]})" in line
    assert warnings([*QUIET, flag, *condition], world=world) == []


@pytest.mark.parametrize(("flag", "other", "world"), SILENCED)
def test_a_key_is_silenced_by_another(flag: str, other: list[str], world: int) -> None:
    pipeline = degrees(pp=2) if flag.startswith(PP) else []
    argv = [*QUIET, *pipeline, flag]
    assert warnings(argv, world=world) == []
    (line,) = warnings([*argv, *other], world=world)
    assert ": has no effect; " in line


def test_keys_of_the_data_warn_where_nothing_reads_them(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "data").write_text("x")
    argv = [*QUIET, f"--training.dataset_path={tmp_path / 'data'}"]
    (line,) = warnings(argv)
    assert line.endswith('has no effect; training.dataset is "synthetic"')
    tokens = [*argv, "--training.dataset=tokens"]
    assert warnings(tokens) == []
    packing = ["--training.packing=best_fit", "--validation.enable"]
    packing.append("--validation.dataset=synthetic")
    assert warnings([*tokens, *packing]) == []
    (line,) = warnings([*QUIET, *packing])
    assert line.endswith('training.dataset is "synthetic" and validation.dataset is "synthetic"')
    (line,) = warnings([*tokens, "--training.token_cache=x"])
    assert line.endswith('training.dataset is "tokens" and validation.enable is false')
    text = [*argv, "--training.dataset=text", f"--model.hf_assets_path={tmp_path}"]
    assert warnings([*text, "--training.token_cache=x"]) == []
    (line,) = warnings([*text, "--training.dataset_text_column=x"])
    assert line.endswith('training.dataset is "text" and validation.enable is false')
    assert warnings([*text, "--training.dataset=jsonl", "--training.dataset_text_column=x"]) == []


def test_every_row_is_about_keys_that_exist() -> None:
    from fnmatch import fnmatchcase

    for pattern, others in SILENT:
        assert [name for name in all_keys() if fnmatchcase(name, pattern)], pattern
        assert set(others) <= set(all_keys())


def test_switching_a_section_off_is_no_warning_itself() -> None:
    off = ["--checkpoint.no_enable", "--validation.no_enable", "--optimizer.weight_decay=0"]
    assert warnings([*QUIET, *off]) == []


def test_parameters_gathered_anew_for_every_micro_batch_are_told() -> None:
    argv = [*QUIET, *degrees(pp=2), "--parallelism.zero_stage=3"]
    (line,) = warnings(argv, world=4)
    assert line == (
        "parallelism.zero_stage = 3 (from --parallelism.zero_stage): gathers the parameters anew "
        "for every micro-batch; 2 keeps them"
    )
    assert warnings([*argv, "--parallelism.zero_stage=2"], world=4) == []
    assert warnings([*QUIET, "--parallelism.zero_stage=3"], world=4) == []
    (line,) = warnings(argv, world=2)
    assert line.endswith("has no effect; there is one rank to share")


def test_a_saved_configuration_warns_of_nothing_that_was_left_at_its_default(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(checked(QUIET)))
    config, shape = load_and_check(["--job.config_file", str(path)], 1, lambda config: Shape())
    assert config_warnings(config, shape) == []
    # The twin: what was asked for is warned about again.
    path.write_text(to_toml(checked([*QUIET, "--checkpoint.interval=7"])))
    config, shape = load_and_check(["--job.config_file", str(path)], 1, lambda config: Shape())
    assert len(config_warnings(config, shape)) == 1


def test_a_default_typed_on_the_command_line_is_asked_for() -> None:
    (line,) = warnings([*QUIET, "--checkpoint.interval=500"])
    assert line.startswith("checkpoint.interval = 500 ")


def test_a_warm_up_longer_than_the_schedule_is_cut() -> None:
    (line,) = warnings(["--training.steps=20"])
    assert line == (
        "lr_scheduler.warmup_steps = 200 (from the defaults): the schedule has 20 steps; cut to 20"
    )
    assert warnings(["--training.steps=200"]) == []


def test_a_decay_longer_than_what_the_warm_up_leaves_is_cut() -> None:
    argv = ["--training.steps=100", "--lr_scheduler.warmup_steps=40"]
    assert warnings([*argv, "--lr_scheduler.decay_ratio=0.6"]) == []
    (line,) = warnings([*argv, "--lr_scheduler.decay_ratio=0.7"])
    assert line.endswith("40 of 100 steps are warm-up; the decay is cut to the other 60")


def test_steps_beyond_the_schedule_are_told() -> None:
    (line,) = warnings([*QUIET, "--training.steps=100", "--lr_scheduler.total_steps=90"])
    assert line.endswith("the steps after 90 train at 0.0 x optimizer.lr")
    constant = ["--lr_scheduler.decay_type=constant", "--lr_scheduler.total_steps=90"]
    assert warnings([*QUIET, "--training.steps=100", *constant]) == []


def test_rows_longer_than_the_models_positions_are_told() -> None:
    (line,) = warnings([*QUIET, "--training.seq_len=4096"])
    assert "longer than the model's max_position_embeddings 2048" in line
    assert config_warnings(checked([*QUIET, *SYNTHETIC, "--training.seq_len=4096"])) == []

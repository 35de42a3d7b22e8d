"""Sources and their order, and the grammar of the command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.config import Config, help_for, help_text, load_config
from torchtitan_lite.config.schema import get_value


def _write(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_nothing_given_is_the_defaults() -> None:
    assert load_config([]) == Config()
    assert load_config([]).user_set == {}


def test_the_file_replaces_defaults_and_the_command_line_replaces_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path, "[training]\nseq_len = 64\nsteps = 5\n[optimizer]\nlr = 1\n")
    # The order on the command line does not matter: the file always comes first.
    config = load_config(["--training.steps", "7", "--job.config_file", path])
    assert (config.training.seq_len, config.training.steps, config.optimizer.lr) == (64, 7, 1.0)
    assert config.training.local_batch_size == Config().training.local_batch_size
    assert config.job.config_file == path
    assert config.user_set == config.sources
    assert config.sources == {
        "training.seq_len": path,
        "training.steps": "--training.steps",
        "optimizer.lr": path,
        "job.config_file": "--job.config_file",
    }


def test_a_default_in_a_file_is_not_asked_for_and_one_on_the_command_line_is(
    tmp_path: Path,
) -> None:
    path = _write(tmp_path, "[training]\nsteps = 10000\nseq_len = 2048\n")
    config = load_config(["--job.config_file", path, "--training.seq_len=2048"])
    assert set(config.user_set) == {"job.config_file", "training.seq_len"}
    assert config.sources["training.steps"] == path


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--training.steps", "3"], "training.steps", 3),
        (["--training.steps=3"], "training.steps", 3),
        (["--training.steps", "1_000"], "training.steps", 1000),
        (["--training.steps", "3", "--training.steps", "4"], "training.steps", 4),
        (["--training.global-batch-size", "-1"], "training.global_batch_size", -1),
        (["--training.global_batch_size=-1"], "training.global_batch_size", -1),
        (["--lr-scheduler.warmup-steps=3"], "lr_scheduler.warmup_steps", 3),
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 1e-3),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--training.norm_type", "inf"], "training.norm_type", math.inf),
        (["--checkpoint.enable"], "checkpoint.enable", True),
        (["--checkpoint.enable", "--checkpoint.no_enable"], "checkpoint.enable", False),
        (["--checkpoint.enable", "false"], "checkpoint.enable", False),
        (["--checkpoint.enable", "True"], "checkpoint.enable", True),
        (["--checkpoint.enable=false"], "checkpoint.enable", False),
        (["--checkpoint.no-enable"], "checkpoint.enable", False),
        (
            ["--parallelism.no_enable_sequence_parallel"],
            "parallelism.enable_sequence_parallel",
            False,
        ),
        (["--optimizer.no_decay", "*.bias,a.b"], "optimizer.no_decay", ["*.bias", "a.b"]),
        (["--optimizer.no_decay", "*.bias, a.b"], "optimizer.no_decay", ["*.bias", "a.b"]),
        (["--optimizer.no_decay", '["x", "y"]'], "optimizer.no_decay", ["x", "y"]),
        (["--optimizer.no_decay", "[xy].bias"], "optimizer.no_decay", ["[xy].bias"]),
        (["--optimizer.no_decay="], "optimizer.no_decay", []),
        (["--optimizer.no_decay", ""], "optimizer.no_decay", []),
        (["--checkpoint.exclude_from_loading", "model,train-state"],
         "checkpoint.exclude_from_loading", ["model", "train_state"]),
        (
            ["--parallelism.module_fqns_per_model_part", '[["a", "b"], ["c"]]'],
            "parallelism.module_fqns_per_model_part",
            [["a", "b"], ["c"]],
        ),
        (["--lr_scheduler.total_steps", "none"], "lr_scheduler.total_steps", None),
        (["--lr_scheduler.decay_ratio", "0.5"], "lr_scheduler.decay_ratio", 0.5),
        (["--optimizer.name", "adamw"], "optimizer.name", "AdamW"),
        (["--optimizer.implementation", "for_loop"], "optimizer.implementation", "for-loop"),
        (
            ["--parallelism.pipeline_parallel_schedule", "interleaved1f1b"],
            "parallelism.pipeline_parallel_schedule",
            "Interleaved1F1B",
        ),
        (["--job.description", "--a b"], "job.description", None),
        (["--job.description=--a b"], "job.description", "--a b"),
        (["--job.description", "-5"], "job.description", "-5"),
        (["--job.description", "x = 1, y"], "job.description", "x = 1, y"),
        (["--training.dataloader.num_workers", "2"], "training.dataloader.num_workers", 2),
        (["--activation_checkpoint.selective_ac_option", "3"],
         "activation_checkpoint.selective_ac_option", "3"),
    ],
)  # fmt: skip
def test_the_command_line_reads(argv: list[str], name: str, value: Any) -> None:
    if argv == ["--job.description", "--a b"]:
        # What looks like a flag is one; a text that begins with two dashes takes an equals sign.
        with pytest.raises(ValueError, match="no value given"):
            load_config(argv)
        return
    read = get_value(load_config(argv), name)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4), ("-4", -4), ("0.5", 0.5), ("1e-5", 1e-5), ("true", True), ("[1, 2]", [1, 2]),
        ("{ factor = 8.0 }", {"factor": 8.0}), ("silu", "silu"), ('"4"', "4"), ("True", "True"),
        ("1\nb = 2", "1\nb = 2"), ("2026-01-01", "2026-01-01"), ("", ""), ("9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_overrides_are_toml_values_or_else_text(text: str, value: Any) -> None:
    config = load_config([f"--model.overrides.some-field={text}"])
    assert config.model.overrides == {"some_field": value}
    assert type(config.model.overrides["some_field"]) is type(value)


def test_tables_grow_by_entries(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        "[model.overrides]\nnum_hidden_layers = 2\nrope_scaling.factor = 8.0\n"
        '[optimizer.lr_multipliers]\n"*.bias" = 2\n',
    )
    config = load_config(
        [
            f"--job.config_file={path}",
            "--model.overrides.num_hidden_layers=4",
            "--model.overrides.rope_scaling.low=1",
            "--optimizer.lr_multipliers.layers.0.*=0.5",
        ]
    )
    assert config.model.overrides == {
        "num_hidden_layers": 4,
        "rope_scaling": {"factor": 8.0, "low": 1},
    }
    assert config.optimizer.lr_multipliers == {"*.bias": 2.0, "layers.0.*": 0.5}
    whole = load_config(["--model.overrides", "{ a = 1 }"])
    assert whole.model.overrides == {"a": 1}


def test_help_is_found_in_any_of_its_forms() -> None:
    assert help_for(["--training.steps", "3"]) is None
    assert help_for(["--job.config_file", "x.toml", "--help"]) == help_text()
    assert help_for(["-h"]) == help_text()
    for argv in (["--help", "lr-scheduler"], ["--help=lr_scheduler"], ["--lr_scheduler.help"]):
        assert help_for(argv) == help_text("lr_scheduler")
    with pytest.raises(ValueError, match=r"--help trainng: no such section; did you mean training"):
        help_for(["--help", "trainng"])

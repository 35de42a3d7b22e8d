"""Sources and their order, the grammar of the command line, and what a mistake is told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.config.cases import degrees, problems
from torchtitan_lite.config import Config, ConfigError, help_for, load_config
from torchtitan_lite.config.schema import get_value, help_text


def _write(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def _lines(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return str(caught.value).splitlines()


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


SEQUENCE_PARALLEL, MODULES = "enable_sequence_parallel", "module_fqns_per_model_part"
READS: list[tuple[list[str], str, Any]] = [
    (["--training.steps", "3"], "training.steps", 3),
    (["--training.steps=3"], "training.steps", 3),
    (["--training.steps", "1_000"], "training.steps", 1000),
    (["--training.steps", "3", "--training.steps", "4"], "training.steps", 4),
    (["--training.global-batch-size", "-1"], "training.global_batch_size", -1),
    (["--training.global_batch_size=-1"], "training.global_batch_size", -1),
    (["--lr-scheduler.warmup-steps=3"], "lr_scheduler.warmup_steps", 3),
    (["--optimizer.lr", "1e-3"], "optimizer.lr", 1e-3),
    (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
    (["--optimizer.lr=.5"], "optimizer.lr", 0.5),
    (["--training.norm_type", "inf"], "training.norm_type", math.inf),
    (["--checkpoint.enable"], "checkpoint.enable", True),
    (["--checkpoint.enable", "--checkpoint.no_enable"], "checkpoint.enable", False),
    (["--checkpoint.enable", "false"], "checkpoint.enable", False),
    (["--checkpoint.enable", "True"], "checkpoint.enable", True),
    (["--checkpoint.enable=false"], "checkpoint.enable", False),
    (["--checkpoint.no-enable"], "checkpoint.enable", False),
    ([f"--parallelism.no_{SEQUENCE_PARALLEL}"], f"parallelism.{SEQUENCE_PARALLEL}", False),
    (["--optimizer.no_decay", "*.bias,a.b"], "optimizer.no_decay", ["*.bias", "a.b"]),
    (["--optimizer.no_decay", "*.bias, a.b"], "optimizer.no_decay", ["*.bias", "a.b"]),
    (["--optimizer.no_decay", '["x", "y"]'], "optimizer.no_decay", ["x", "y"]),
    (["--optimizer.no_decay", "[xy].bias"], "optimizer.no_decay", ["[xy].bias"]),
    (["--optimizer.no_decay="], "optimizer.no_decay", []),
    (["--optimizer.no_decay", ""], "optimizer.no_decay", []),
    (["--checkpoint.exclude_from_loading", "model,train-state"],
     "checkpoint.exclude_from_loading", ["model", "train_state"]),
    ([f"--parallelism.{MODULES}", '[["a", "b"], ["c"]]'],
     f"parallelism.{MODULES}", [["a", "b"], ["c"]]),
    (["--lr_scheduler.total_steps", "None"], "lr_scheduler.total_steps", None),
    (["--lr_scheduler.decay_ratio", "0.5"], "lr_scheduler.decay_ratio", 0.5),
    (["--optimizer.name", "adamw"], "optimizer.name", "AdamW"),
    (["--optimizer.implementation", "for_loop"], "optimizer.implementation", "for-loop"),
    (["--parallelism.pipeline_parallel_schedule", "interleaved1f1b"],
     "parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
    (["--job.description=--a b"], "job.description", "--a b"),
    (["--job.description", "-5"], "job.description", "-5"),
    (["--job.description", "x = 1, y"], "job.description", "x = 1, y"),
    (["--training.dataloader.num_workers", "2"], "training.dataloader.num_workers", 2),
    (["--activation_checkpoint.selective_ac_option", "3"],
     "activation_checkpoint.selective_ac_option", "3"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "name", "value"), READS)
def test_the_command_line_reads(argv: list[str], name: str, value: Any) -> None:
    read = get_value(load_config(argv), name)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4), ("-4", -4), ("0.5", 0.5), ("1e-5", 1e-5), ("true", True), ("[1, 2]", [1, 2]),
        ("{ factor = 8.0 }", {"factor": 8.0}), ("silu", "silu"), ('"4"', "4"), ("True", "True"),
        ("1\nb = 2", "1\nb = 2"), ("", ""), ("9" * 5000, "9" * 5000),
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
        '[optimizer.lr_multipliers]\n"*.bias" = 2\nlayers.1.x = 3\n',
    )
    config = load_config(
        [
            f"--job.config_file={path}",
            "--model.overrides.num_hidden_layers=4",
            "--model.overrides.rope_scaling.low=1",
            "--optimizer.lr_multipliers.layers.0.*=0.5",
        ]
    )
    rope_scaling = {"factor": 8.0, "low": 1}
    assert config.model.overrides == {"num_hidden_layers": 4, "rope_scaling": rope_scaling}
    # With and without quotes: a parameter name contains dots.
    multipliers = {"*.bias": 2.0, "layers.1.x": 3.0, "layers.0.*": 0.5}
    assert config.optimizer.lr_multipliers == multipliers
    whole = load_config(["--model.overrides", "{ a = 1 }"])
    assert whole.model.overrides == {"a": 1}
    assert Config().model.overrides == {}


def test_help_is_found_in_any_of_its_forms() -> None:
    assert help_for(["--training.steps", "3"]) is None
    assert help_for(["--job.config_file", "x.toml", "--help"]) == help_text()
    assert help_for(["-h"]) == help_for(["--help", "--training.steps=3"]) == help_text()
    assert help_for(["--help", "lr-scheduler"]) == help_text("lr_scheduler")
    with pytest.raises(ValueError, match=r"--help trainng: no such section; did you mean training"):
        help_for(["--help", "trainng"])


# The flags, and the one line about them; ... stands for `KEY = VALUE (from --KEY): `.
ON_THE_COMMAND_LINE = [
    ("--training.seqlen=5", '"5"', "unknown key; did you mean training.seq_len?"),
    ("--lr=5", '"5"', "unknown key; did you mean optimizer.lr?"),
    ("--training.warmup_steps=5", '"5"', "unknown key; did you mean lr_scheduler.warmup_steps?"),
    ("--trainng.steps=5", '"5"',
     "unknown key; did you mean training.steps or validation.steps?"),
    ("--debug.zzzz", "true", "unknown key; --help lists all keys"),
    ("--training.no_steps", "true", "unknown key; did you mean training.steps?"),
    ("--checkpoint.no_enable=true", '"true"', "unknown key; did you mean checkpoint.enable?"),
    ("--training.steps=ten", '"ten"', "not an integer; give an integer"),
    ("--training.steps=1e3", '"1e3"', "not an integer; give an integer"),
    ("--optimizer.lr=fast", '"fast"', "not a number; give a number, without quotes"),
    ("--optimizer.lr=nan", '"nan"', "not a number; give a number, without quotes"),
    ("--checkpoint.enable=maybe", '"maybe"', "not a boolean; give true or false"),
    ("--training.steps", '""', "no value given; give --training.steps VALUE"),
    ("--job.description", '""', "no value given; give --job.description VALUE"),
    ("--optimizer.name=AdamX", '"AdamX"', "not one of AdamW, SGD; did you mean AdamW?"),
    ("--training.dtype=int8", '"int8"', "not one of float32, bfloat16; choose one of them"),
    ("--quantize.linear.float8.recipe_name=mxfp8", '"mxfp8"',
     'not one of "" (off), tensorwise, rowwise, blockwise; choose one of them'),
    ("--checkpoint.exclude_from_loading=data_loader", '"data_loader"',
     "not one of model, optimizer, dataloader, train_state; did you mean dataloader?"),
    ("--parallelism.module_fqns_per_model_part=a,b", '"a,b"',
     'not a list; give a list, such as ["a", "b"]'),
    ("--model.overrides=5", '"5"', "not a table; give a table of name = value"),
    ("--optimizer.lr_multipliers.*.bias=big", '"big"',
     "not a number; give a number, without quotes"),
]  # fmt: skip


@pytest.mark.parametrize(("flag", "shown", "told"), ON_THE_COMMAND_LINE)
def test_a_mistake_on_the_command_line_is_one_line_with_its_fix(
    flag: str, shown: str, told: str
) -> None:
    name = flag[2:].partition("=")[0]
    assert _lines([flag]) == [f"{name} = {shown} (from --{name}): {told}"]


def test_what_is_no_option_is_told_the_form_of_options() -> None:
    assert _lines(["run.toml"]) == [
        '"run.toml" (from the command line): not an option; '
        "options are --section.key VALUE, and lists are a,b,c"
    ]
    # What looks like a flag is one; a text that begins with two dashes takes an equals sign.
    assert "no value given" in _lines(["--job.description", "--a b"])[0]


# A file, the key and value that the line is about, and what it is told.
IN_A_FILE = [
    ("[trainig]\nseq_len = 1", "trainig.seq_len = 1",
     "unknown key; did you mean training.seq_len or validation.seq_len?"),
    ("[trainig]\nstps = 1", "trainig.stps = 1", "unknown key; did you mean training.steps?"),
    ("[wrong]", "wrong = {}", "unknown key; --help lists all keys"),
    ("[training]\nseqlen = 1", "training.seqlen = 1",
     "unknown key; did you mean training.seq_len?"),
    ("seq_len = 1", "seq_len = 1",
     "unknown key; did you mean training.seq_len or validation.seq_len?"),
    ("training = 1", "training = 1",
     "a section, not a key; write [training] with keys below it"),
    ("[[training]]\nsteps = 1", 'training = [{"steps" = 1}]',
     "a section, not a key; write [training] with keys below it"),
    ("[training.dataloader]\nworkers = 1", "training.dataloader.workers = 1",
     "unknown key; did you mean training.dataloader.num_workers?"),
    ("[training]\nsteps = 4.0", "training.steps = 4.0", "not an integer; give an integer"),
    ("[training]\nsteps = true", "training.steps = true", "not an integer; give an integer"),
    ('[training]\nsteps = "3"', 'training.steps = "3"', "not an integer; give an integer"),
    ('[optimizer]\nlr = "1e-3"', 'optimizer.lr = "1e-3"',
     "not a number; give a number, without quotes"),
    ("[optimizer]\nlr = true", "optimizer.lr = true",
     "not a number; give a number, without quotes"),
    ("[optimizer]\nlr = nan", "optimizer.lr = nan", "not a number; give a number, without quotes"),
    ("[checkpoint]\nenable = 1", "checkpoint.enable = 1", "not a boolean; give true or false"),
    ("[activation_checkpoint]\nselective_ac_option = 2",
     "activation_checkpoint.selective_ac_option = 2", "not a text; put it in quotes"),
    ('[optimizer]\nno_decay = "*.bias"', 'optimizer.no_decay = "*.bias"',
     'not a list; give a list, such as ["a", "b"]'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "shown", "told"), IN_A_FILE)
def test_a_mistake_in_a_file_is_one_line_with_its_fix(
    tmp_path: Path, text: str, shown: str, told: str
) -> None:
    path = _write(tmp_path, text)
    assert _lines(["--job.config_file", path]) == [f"{shown} (from {path}): {told}"]


def test_an_empty_section_is_no_mistake(tmp_path: Path) -> None:
    path = _write(tmp_path, "[training]\n[training.dataloader]\n[model.overrides]\n")
    assert load_config(["--job.config_file", path]).training == Config().training


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[training]\nsteps = \nseq_len = 1", "not valid TOML: Invalid value (at line 2, col"),
        ('[training]\ndataset = "', "not valid TOML: Unterminated string (at end of document)"),
        ("[training]\nsteps = 1\nsteps = 2", "not valid TOML: Cannot overwrite a value"),
        (b'[job]\ndescription = "caf\xe9"', "not valid TOML: 'utf-8' codec can't decode"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_toml_says_where(tmp_path: Path, text: Any, told: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    (line,) = _lines(["--job.config_file", str(path)])
    assert f"{told}" in line and line.endswith("; correct it there")


def test_a_file_that_cannot_be_read_is_the_only_problem(tmp_path: Path) -> None:
    for path, told in (
        (tmp_path / "x.toml", "cannot be read: No such file or directory; give a TOML file"),
        (tmp_path, "cannot be read: Is a directory; give a TOML file"),
    ):
        argv = ["--job.config_file", str(path), "--training.dataset=text"]
        (line,) = problems(argv, world=3)
        assert told in line


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbf[training]\nsteps = 3")
    assert load_config(["--job.config_file", str(path)]).training.steps == 3


def test_all_problems_of_all_sources_come_together(tmp_path: Path) -> None:
    path = _write(tmp_path, '[training]\nseqlen = 1\nsteps = "x"\n[wrong]\n[optimizer]\nlr = -1\n')
    argv = ["--job.config_file", path, "--debug.seed=x", *degrees(tp=3)]
    lines = problems(argv)
    assert len(lines) == 7  # five of reading, and 3 fits neither the world nor the heads
    for part in ("seqlen", "training.steps", "wrong", "optimizer.lr", "debug.seed", "heads"):
        assert sum(part in line for line in lines) == 1, (part, lines)


def test_a_key_that_could_not_be_read_makes_no_echo_in_the_checks() -> None:
    wrong = ["--training.local_batch_size=eight", "--training.global_batch_size=3"]
    assert len(problems(wrong)) == 1
    misspelt = ["--training.local_batch_sise=3", "--training.global_batch_size=3"]
    assert len(problems(misspelt)) == 1
    renamed = ["--training.batch_size=3", "--training.global_batch_size=3"]
    assert len(problems(renamed)) == 1
    # The twin: the same check does speak when the key was read.
    assert len(problems(["--training.local_batch_size=8", "--training.global_batch_size=3"])) == 1
    assert "batch ranks" in problems(["--training.global_batch_size=3"])[0]


def test_a_value_with_line_breaks_stays_on_its_line() -> None:
    assert len(_lines(["--training.steps", "a\nb\nc"])) == 1
    assert len(_lines(["--optimizer.name", "a\nAdamX"])) == 1
    assert len(_lines(["a\nb"])) == 1
    (line,) = _lines(["--training.steps", "x" * 5000])
    assert len(line) < 300

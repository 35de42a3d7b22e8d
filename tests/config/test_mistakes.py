"""What a wrong key, a wrong value or a wrong file is told: all at once, one line each, a fix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.config.cases import degrees, problems
from torchtitan_lite.config import ConfigError, load_config


def _lines(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return str(caught.value).splitlines()


def _file_lines(folder: Path, text: str) -> list[str]:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    # The path is replaced so that a test can compare whole lines.
    return [
        line.replace(str(path), "run.toml") for line in _lines(["--job.config_file", str(path)])
    ]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--training.seqlen", "5"],
            'training.seqlen = "5" (from --training.seqlen): unknown key; '
            "did you mean training.seq_len?",
        ),
        (["--lr", "5"], 'lr = "5" (from --lr): unknown key; did you mean optimizer.lr?'),
        (
            ["--training.warmup_steps=5"],
            'training.warmup_steps = "5" (from --training.warmup_steps): unknown key; '
            "did you mean lr_scheduler.warmup_steps?",
        ),
        (
            ["--trainng.steps=5"],
            'trainng.steps = "5" (from --trainng.steps): unknown key; '
            "did you mean training.steps or validation.steps?",
        ),
        (
            ["--debug.zzzz"],
            "debug.zzzz = true (from --debug.zzzz): unknown key; "
            "--help debug lists the keys of this section",
        ),
        (
            ["--training.steps", "ten"],
            'training.steps = "ten" (from --training.steps): not an integer; give an integer',
        ),
        (
            ["--training.steps", "1e3"],
            'training.steps = "1e3" (from --training.steps): not an integer; give an integer',
        ),
        (
            ["--optimizer.lr", "fast"],
            'optimizer.lr = "fast" (from --optimizer.lr): not a number; give a number',
        ),
        (
            ["--optimizer.lr", "nan"],
            'optimizer.lr = "nan" (from --optimizer.lr): not a number; give a number',
        ),
        (
            ["--checkpoint.enable", "maybe"],
            'checkpoint.enable = "maybe" (from --checkpoint.enable): not a boolean; '
            "give true or false",
        ),
        (
            ["--checkpoint.no_enable", "true"],
            'checkpoint.no_enable = "true" (from --checkpoint.no_enable): takes no value; '
            "give --checkpoint.no_enable alone, or --checkpoint.enable true",
        ),
        (
            ["--training.no_steps"],
            "training.no_steps = true (from --training.no_steps): unknown key; "
            "did you mean training.steps?",
        ),
        (
            ["--training.steps"],
            "training.steps (from --training.steps): no value given; give --training.steps VALUE",
        ),
        (
            ["--optimizer.name", "AdamX"],
            'optimizer.name = "AdamX" (from --optimizer.name): "AdamX" is not one of AdamW, SGD; '
            "did you mean AdamW?",
        ),
        (
            ["--training.dtype", "int8"],
            'training.dtype = "int8" (from --training.dtype): not one of the choices; '
            "give float32 or bfloat16",
        ),
        (
            ["--checkpoint.exclude_from_loading", "data_loader"],
            'checkpoint.exclude_from_loading = "data_loader" '
            '(from --checkpoint.exclude_from_loading): "data_loader" is not one of '
            "model, optimizer, dataloader, train_state; did you mean dataloader?",
        ),
        (
            ["--parallelism.module_fqns_per_model_part", "a,b"],
            'parallelism.module_fqns_per_model_part = "a,b" '
            "(from --parallelism.module_fqns_per_model_part): not a list; give a list, such as "
            '[["embed_tokens", "layers.0"], ["layers.1", "norm", "lm_head"]]',
        ),
        (
            ["--model.overrides", "5"],
            'model.overrides = "5" (from --model.overrides): not a table; '
            "give a table of name = value",
        ),
        (
            ["--optimizer.lr_multipliers.*.bias", "big"],
            'optimizer.lr_multipliers.*.bias = "big" (from --optimizer.lr_multipliers.*.bias): '
            "*.bias: not a number; give a number",
        ),
        (
            ["--model.overrides.a=1", "--model.overrides.a.b=1"],
            'model.overrides.a.b = "1" (from --model.overrides.a.b): a is not a table; '
            "name the whole entry",
        ),
        (
            ["run.toml"],
            '"run.toml" (from the command line): not an option; '
            "options are --section.key VALUE, and lists are a,b,c",
        ),
        (
            ["--job.description", "\udcff"],
            'job.description = "\udcff" (from --job.description): not UTF-8 text; give it in UTF-8',
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_with_its_fix(argv: list[str], line: str) -> None:
    assert _lines(argv) == [line]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[trainig]\nseq_len = 1\nstps = 2",
            "[trainig] (from run.toml): unknown section; did you mean [training]?",
        ),
        (
            "[training]\nseqlen = 1",
            "training.seqlen = 1 (from run.toml): unknown key; did you mean training.seq_len?",
        ),
        (
            "seq_len = 1",
            "seq_len = 1 (from run.toml): unknown key; "
            "did you mean training.seq_len or validation.seq_len?",
        ),
        (
            "training = 1",
            "training = 1 (from run.toml): a section, not a key; "
            "write [training] with keys below it",
        ),
        (
            "[[training]]\nsteps = 1",
            "training = [{ steps = 1 }] (from run.toml): a section, not a key; "
            "write [training] with keys below it",
        ),
        (
            "[training.dataloader]\nworkers = 1",
            "training.dataloader.workers = 1 (from run.toml): unknown key; "
            "did you mean training.dataloader.num_workers?",
        ),
        (
            "[training]\nsteps = 4.0",
            "training.steps = 4.0 (from run.toml): not an integer; give 4",
        ),
        (
            "[training]\nsteps = true",
            "training.steps = true (from run.toml): not an integer; give an integer",
        ),
        (
            '[optimizer]\nlr = "1e-3"',
            'optimizer.lr = "1e-3" (from run.toml): not a number; write it without quotes',
        ),
        (
            "[optimizer]\nlr = true",
            "optimizer.lr = true (from run.toml): not a number; give a number",
        ),
        (
            "[optimizer]\nlr = nan",
            "optimizer.lr = nan (from run.toml): not a number; give a number",
        ),
        (
            "[checkpoint]\nenable = 1",
            "checkpoint.enable = 1 (from run.toml): not a boolean; give true or false",
        ),
        (
            "[activation_checkpoint]\nselective_ac_option = 2",
            "activation_checkpoint.selective_ac_option = 2 (from run.toml): not a text; "
            "put it in quotes",
        ),
        (
            '[optimizer]\nno_decay = "*.bias"',
            'optimizer.no_decay = "*.bias" (from run.toml): not a list; '
            'give a list, such as ["a", "b"]',
        ),
        (
            "[optimizer.lr_multipliers]\nlayers.0.x = 1",
            "optimizer.lr_multipliers = { layers = { 0 = { x = 1 } } } (from run.toml): "
            "layers holds a table; put a pattern with dots in quotes",
        ),
        (
            "[model.overrides]\nday = 2026-01-01",
            "model.overrides = { day = 2026-01-01 } (from run.toml): day: a date or a time; "
            "give a number, a text, a boolean, a list or a table",
        ),
        (
            "[training]\nsteps = \nseq_len = 1",
            'job.config_file = "run.toml" (from --job.config_file): not valid TOML: '
            "Invalid value (at line 2, column 9); correct the file there",
        ),
        (
            '[training]\ndataset = "',
            'job.config_file = "run.toml" (from --job.config_file): not valid TOML: '
            "Unterminated string (at line 2, the last); correct the file there",
        ),
        (
            "[training]\nsteps = 1\nsteps = 2",
            'job.config_file = "run.toml" (from --job.config_file): not valid TOML: '
            "Cannot overwrite a value (at line 3, the last); correct the file there",
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_its_fix(tmp_path: Path, text: str, line: str) -> None:
    assert _file_lines(tmp_path, text) == [line]


def test_an_unreadable_file_says_why(tmp_path: Path) -> None:
    (tmp_path / "debug.toml").write_text("", encoding="utf-8")
    (line,) = _lines(["--job.config_file", str(tmp_path / "debgu.toml")])
    assert line.endswith(f"no such file; did you mean {tmp_path / 'debug.toml'}?")
    (line,) = _lines(["--job.config_file", str(tmp_path)])
    assert "cannot be read (Is a directory)" in line
    (line,) = _lines(["--job.config_file", "/no/such/folder/x.toml"])
    assert line.endswith("no such file; correct the path")
    (tmp_path / "latin.toml").write_bytes(b'[job]\ndescription = "caf\xe9"')
    (line,) = _lines(["--job.config_file", str(tmp_path / "latin.toml")])
    assert line.endswith("not UTF-8 text; save it as UTF-8")


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbf[training]\nsteps = 3")
    assert load_config(["--job.config_file", str(path)]).training.steps == 3


def test_all_problems_of_all_sources_come_together(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[training]\nseqlen = 1\nsteps = "x"\n[wrong]\n[optimizer]\nlr = -1\n')
    argv = ["--job.config_file", str(path), "--debug.seed=x", *degrees(tp=3)]
    lines = problems(argv)
    assert len(lines) == 7  # five of reading, and 3 fits neither the world nor the heads
    for part in ("seqlen", "training.steps", "[wrong]", "optimizer.lr", "debug.seed", "heads"):
        assert sum(part in line for line in lines) == 1, (part, lines)


def test_a_key_that_could_not_be_read_makes_no_echo_in_the_checks() -> None:
    wrong = ["--training.local_batch_size=eight", "--training.global_batch_size=3"]
    assert len(problems(wrong)) == 1
    misspelt = ["--training.local_batch_sise=3", "--training.global_batch_size=3"]
    assert len(problems(misspelt)) == 1
    # The twin: the same check does speak when the key was read.
    assert len(problems(["--training.local_batch_size=8", "--training.global_batch_size=3"])) == 1
    assert "batch ranks" in problems(["--training.global_batch_size=3"])[0]


def test_a_file_that_could_not_be_read_is_the_only_problem(tmp_path: Path) -> None:
    argv = ["--job.config_file", os.path.join(tmp_path, "x.toml"), "--training.dataset=text"]
    (line,) = problems(argv, world=3)
    assert "no such file" in line


def test_a_value_with_line_breaks_stays_on_its_line() -> None:
    assert len(_lines(["--training.steps", "a\nb\nc"])) == 1
    assert len(_lines(["--optimizer.name", "a\nAdamX"])) == 1
    assert len(_lines(["a\nb"])) == 1
    (line,) = _lines(["--training.steps", "x" * 5000])
    assert len(line) < 300

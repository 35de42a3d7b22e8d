"""The command that a user types: what it leaves behind, and how it says no.

Runs that train go through a real subprocess or torchrun. What is refused goes through the same
`main`, forked from this process, where torch is loaded already: a tenth of the time.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import train
from tests.checkpoint.test_manifest import flip_a_byte
from torchtitan_lite.data.shards import write_shards
from torchtitan_lite.launch import told
from torchtitan_lite.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "--model.overrides.hidden_size=32",
    "--model.overrides.intermediate_size=64",
    "--model.overrides.num_hidden_layers=2",
    "--model.overrides.num_attention_heads=4",
    "--model.overrides.num_key_value_heads=2",
    "--model.overrides.head_dim=8",
]
QUICK = [
    "--training.seq_len=32",
    "--training.steps=5",
    "--lr_scheduler.warmup_steps=1",
    "--optimizer.lr=1e-2",
    "--metrics.log_freq=1",
]
# What a run leaves, as the README lists it.
PROMISED = {
    "step",
    "loss",
    "loss_max",
    "grad_norm",
    "lr",
    "tokens_seen",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "mfu",
    "tflops",
    "data_seconds",
    "step_seconds",
    "memory_gib",
}


@dataclass
class Ended:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    unset = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}


def start(*command: str) -> Ended:
    """The command in a process of its own, from the root of the repository."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=180
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def fork(folder: Path, argv: list[str]) -> Ended:
    """`train.py argv` in a fork of this process; `folder` takes what it prints."""
    out, err = folder / "printed.out", folder / "printed.err"

    def run() -> None:
        os.chdir(ROOT)
        os.environ.clear()
        os.environ.update(environment())
        sys.stdout, sys.stderr = open(out, "w"), open(err, "w")  # noqa: SIM115 (until it ends)
        sys.exit(told(train.main, argv))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "it hangs"
    return Ended(process.exitcode, out.read_text(), err.read_text())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty lines of the text that ships."""
    lines = (ROOT / "assets" / "text" / "train.txt").read_text(encoding="utf-8").splitlines()
    path = tmp_path_factory.mktemp("text") / "twenty-lines.txt"
    full = [line for line in lines if len(line) > 60]
    path.write_text("\n".join(full[:20]) + "\n", encoding="utf-8")
    return path


def recipe(text: Path, dump_folder: Path) -> list[str]:
    """The shipped debug recipe with a tiny model and little text."""
    return [
        "--job.config_file=train_configs/debug.toml",
        f"--job.dump_folder={dump_folder}",
        f"--training.dataset_path={text}",
        f"--validation.dataset_path={text}",
        f"--training.token_cache={dump_folder.parent / 'token_cache'}",
        *TINY,
        *QUICK,
    ]


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """The dump folder of five steps, and how the command ended."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, start(sys.executable, "train.py", *recipe(text, folder))


# --- it trains -----------------------------------------------------------------------------------


def test_the_debug_recipe_trains_and_leaves_what_the_readme_names(
    trained: tuple[Path, Ended],
) -> None:
    folder, ended = trained
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
    assert "step 5/5  loss" in ended.err and "done: 5 steps" in ended.err
    records = [record for record in read_metrics(folder) if "loss" in record]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert records[-1]["loss"] < records[0]["loss"] - 0.1
    assert all(record.keys() >= PROMISED for record in records)
    assert (folder / "config.toml").is_file()
    assert (folder / "checkpoint" / "step-5" / "manifest.json").is_file()


def test_the_saved_configuration_is_a_recipe_that_resumes_the_run(
    trained: tuple[Path, Ended], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained[0], folder)
    argv = [f"--job.config_file={folder / 'config.toml'}", f"--job.dump_folder={folder}"]
    again = fork(tmp_path, argv)
    assert again.code == 0, again.err
    assert "nothing to train: the run is at step 5" in again.err
    longer = fork(tmp_path, [*argv, "--training.steps=7"])
    assert longer.code == 0, longer.err
    assert f"resumed from {folder / 'checkpoint' / 'step-5'}" in longer.err
    assert [record["step"] for record in read_metrics(folder) if "loss" in record] == [*range(1, 8)]


def test_torchrun_trains_on_two_ranks_what_one_trains(
    trained: tuple[Path, Ended], text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = [*recipe(text, folder), "--parallelism.tensor_parallel_degree=2"]
    ended = start(*launcher, "train.py", *flags)
    assert ended.code == 0, ended.err
    losses, expected = (
        [record["loss"] for record in read_metrics(run) if "loss" in record]
        for run in (folder, trained[0])
    )
    assert losses == pytest.approx(expected, rel=1e-2)  # in bf16
    assert (folder / "checkpoint" / "step-5" / "__1_0.distcp").is_file()


# --- it refuses ----------------------------------------------------------------------------------


def is_refused(ended: Ended, *words: str) -> None:
    """Exit code 2 and, below the log, one line that holds the words; no traceback."""
    assert ended.code == 2, ended.err
    assert "Traceback" not in ended.err and "ConfigError" not in ended.err, ended.err
    *log, line = ended.err.splitlines()
    assert all(word in line for word in words), ended.err
    assert not any(words[0] in above for above in log), ended.err


def untouched(folder: Path) -> bool:
    """Whether nothing but the text of the test itself is in `folder`."""
    return not (folder / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--training.sep_len=5"], ["training.sep_len", "seq_len"]),
        (["--training.stepps", "5"], ["training.stepps", "steps"]),
        (["--training.steps=many"], ["training.steps", "many"]),
        (["--parallelism.data_parallel_shard_degree=2"], ["shard_degree = 2", "dp_shard 2"]),
        (["--model.hf_assets_path=/nowhere"], ["hf_assets_path", "/nowhere"]),
        (["--training.dataset_path=/nowhere.txt"], ["training.dataset_path", "/nowhere.txt"]),
        (["--model.flavor=debug"], ["model.flavor", "debugmodel"]),
    ],
    ids=lambda value: value[0].partition("=")[0][2:] if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_and_writes_nothing(
    flags: list[str], words: list[str], text: Path, tmp_path: Path
) -> None:
    ended = fork(tmp_path, [*recipe(text, tmp_path / "run"), *flags])
    is_refused(ended, *words)
    assert untouched(tmp_path)


def test_a_mistake_ends_the_real_command_with_two_before_torch_is_loaded(tmp_path: Path) -> None:
    flags = [f"--job.dump_folder={tmp_path / 'run'}", "--training.dataset=synthetic"]
    ended = start(sys.executable, "-X", "importtime", "train.py", *flags, "--training.step=5")
    assert ended.code == 2
    imported = [line for line in ended.err.splitlines() if line.startswith("import time:")]
    assert imported and not any(line.split()[-1] == "torch" for line in imported)
    spoken = [line for line in ended.err.splitlines() if line not in imported]
    assert len(spoken) == 1 and "training.step" in spoken[0] and "training.steps" in spoken[0]
    assert untouched(tmp_path)


def test_an_empty_data_file_is_refused_by_name(text: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    ended = fork(tmp_path, [*recipe(text, tmp_path / "run"), f"--training.dataset_path={empty}"])
    is_refused(ended, "training.dataset_path", str(empty))
    assert untouched(tmp_path)


def test_too_little_text_for_a_single_row_is_refused_with_both_numbers(
    text: Path, tmp_path: Path
) -> None:
    little = tmp_path / "little.txt"
    little.write_text("A few words.\n")
    ended = fork(tmp_path, [*recipe(text, tmp_path / "run"), f"--training.dataset_path={little}"])
    is_refused(ended, "training.dataset_path", "the 33 of one row", "seq_len = 32")
    assert untouched(tmp_path)


def test_token_ids_outside_the_vocabulary_are_refused_with_the_largest(
    text: Path, tmp_path: Path
) -> None:
    shards = tmp_path / "shards"
    write_shards(shards, [([*range(100), 3000], [101])], vocab_size=4096, notes={})
    flags = [f"--training.dataset_path={shards}", "--training.dataset=tokens"]
    ended = fork(tmp_path, [*recipe(text, tmp_path / "run"), *flags])
    is_refused(ended, "3000", "2048")
    assert untouched(tmp_path)


# --- checkpoints that do not fit -----------------------------------------------------------------


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--checkpoint.load_step=3"], ["checkpoint.load_step = 3", "there are [5]"]),
        (
            ["--model.overrides.num_hidden_layers=3"],
            ["checkpoint of another model", "num_hidden_layers 2, not 3", "model.*"],
        ),
        (
            ["--model.overrides.hidden_size=48"],
            ["checkpoint of another model", "hidden_size 32, not 48"],
        ),
    ],
    ids=["absent-step", "more-layers", "wider"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_is_written_over(
    flags: list[str], words: list[str], trained: tuple[Path, Ended], text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained[0], folder)
    before = files(folder)
    ended = fork(tmp_path, [*recipe(text, folder), "--training.steps=6", *flags])
    is_refused(ended, *words)
    assert files(folder) == before


@pytest.mark.parametrize("flags", [[], ["--checkpoint.load_step=5"]], ids=["newest", "named"])
def test_a_damaged_checkpoint_is_refused_with_the_name_of_the_file(
    flags: list[str], trained: tuple[Path, Ended], text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained[0], folder)
    flip_a_byte(folder / "checkpoint" / "step-5" / "__0_0.distcp")
    before = files(folder)
    ended = fork(tmp_path, [*recipe(text, folder), "--training.steps=6", *flags])
    is_refused(ended, "checkpoint.load_step", "__0_0.distcp", "SHA-256")
    assert files(folder) == before


@pytest.mark.slow
def test_the_debug_recipe_falls_from_7_7_to_below_5(tmp_path: Path) -> None:
    """The whole of `make train`, as the README promises it: 600 steps, minutes."""
    recipe = ["--job.config_file", "train_configs/debug.toml", "--job.dump_folder", str(tmp_path)]
    command = [sys.executable, "train.py", *recipe, "--checkpoint.no_enable"]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=3600)
    records = read_metrics(tmp_path)
    losses = [record["loss"] for record in records if "loss" in record]
    assert 7.5 < losses[0] < 7.8
    assert all(loss < 5 for loss in losses[-10:])
    assert records[-1]["validation_loss"] < 5 or records[-2].get("validation_loss", 9) < 5

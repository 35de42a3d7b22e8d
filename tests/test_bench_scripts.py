"""The scripts that measure run, compare what is comparable, and say so where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts import bench_checkpoint, bench_gpu, bench_mesh, bench_train
from torchtitan_lite.config import load_and_check
from torchtitan_lite.models.families import model_of

SMALL = ["--model.overrides.num_hidden_layers", "2", "--training.seq_len", "32"]
SMALL += ["--model.overrides.hidden_size", "64", "--model.overrides.intermediate_size", "64"]
SMALL += ["--model.overrides.num_attention_heads", "4", "--model.overrides.head_dim", "16"]
SMALL += ["--model.overrides.num_key_value_heads", "2", "--training.dataset", "synthetic"]
ROUNDS = ["--rounds", "1", "--steps", "1"]


# --- meshes -------------------------------------------------------------------------------------


def test_meshes_take_turns_with_one_process_and_reach_its_loss(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["one", "zero1", "tp", "pp", "apart"]
    assert bench_mesh.main([*ROUNDS, "--of", ",".join(names), *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == names


def test_meshes_that_reach_another_loss_are_no_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = bench_mesh.Contestant(2, [*bench_mesh.FSDP, "1", "--optimizer.lr", "2e-3"])
    monkeypatch.setitem(bench_mesh.CONTESTANTS, "zero1", other)
    assert bench_mesh.main([*ROUNDS, "--of", "one,zero1", *SMALL]) == 1


def test_a_rank_that_fails_ends_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("out of luck")

    monkeypatch.setattr(bench_mesh, "run_rank", fail)
    with pytest.raises(RuntimeError, match="one: a rank failed:(.|\n)*out of luck"):
        bench_mesh.main([*ROUNDS, "--of", "one,tp", *SMALL])


def test_a_mesh_that_does_not_exist_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_mesh.main(["--of", "one,zero4"]) == 2
    assert "no zero4; there are one, zero0" in capsys.readouterr().err


# --- trainers -----------------------------------------------------------------------------------


def test_trainers_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_train.main([*ROUNDS, "--of", "bare,eager", *SMALL]) == 0
    bare, eager = (line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert (bare[0], eager[0]) == ("bare", "eager")
    assert float(bare[-1]) == pytest.approx(float(eager[-1]), abs=1e-4)


def test_float8_is_one_contestants_own() -> None:
    recipe = ["--quantize.linear.float8.recipe_name", "tensorwise"]
    for flags, expected in ([], "rowwise"), (recipe, "tensorwise"):
        argv = [*bench_train.DEBUG_RECIPE, *SMALL, *flags]
        config, _ = load_and_check(argv, world_size=1, resolve_model=model_of)
        made = {name: bench_train.config_of(name, config) for name in bench_train.CONTESTANTS}
        recipes = {name: own.quantize.linear.float8.recipe_name for name, own in made.items()}
        assert recipes.pop("float8") == expected and not any(recipes.values())
        compiled = [name for name, own in made.items() if own.compile.enable]
        assert compiled == ["compiled", "float8"]


# --- checkpoints --------------------------------------------------------------------------------


def test_checkpoints_are_saved_in_each_way_and_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    flags = ["--megabytes", "1", "--ranks", "1,2", "--rounds", "1", "--folder", str(folder)]
    assert bench_checkpoint.main(flags) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[2] for row in rows] == ["1", "2"] and not folder.exists()


def test_the_state_of_all_ranks_has_the_size_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_checkpoint, "init_device_mesh", lambda *_: None)
    state = bench_checkpoint.make_state(70, 1)
    assert sum(tensor.nbytes for tensor in state.values()) == pytest.approx(70e6, rel=0.01)
    assert torch.stack([tensor.std() for tensor in state.values()]).min() > 0.9


# --- an accelerator -----------------------------------------------------------------------------


def test_a_row_of_the_table_is_a_run_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    small = [*SMALL, "--model.overrides.vocab_size", "256", "--metrics.log_freq", "1"]
    small += ["--training.mixed_precision_param", "float32"]
    assert bench_gpu.main(["--of", "8B", "--modes", "eager", "--steps", "2", *small]) == 0
    _, row = capsys.readouterr().out.splitlines()
    shape, mode, speed, mfu, *_ = row.split()
    assert (shape, mode, mfu) == ("8B", "eager", "-") and float(speed.replace(",", "")) > 0


def test_a_run_that_fails_or_lasts_is_a_row_that_says_so() -> None:
    assert bench_gpu.run(["--nosuch.key", "1"], steps=1, limit_s=60).startswith("exit code 2: ")  # type: ignore[union-attr]
    assert bench_gpu.run([], steps=1, limit_s=0.05) == "not done in 0 s"


def test_a_run_out_of_memory_is_a_row_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising = "raise MemoryError('torch.OutOfMemoryError: CUDA out of memory')"
    (tmp_path / "train.py").write_text(raising)
    monkeypatch.setattr(bench_gpu, "ROOT", tmp_path)
    assert bench_gpu.run([], steps=1, limit_s=60) == "out of memory"


def test_a_shape_that_does_not_exist_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main(["--of", "2B"]) == 2
    assert "there are 1B, 8B and eager" in capsys.readouterr().err

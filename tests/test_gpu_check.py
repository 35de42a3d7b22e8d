"""scripts/gpu_check.sh says what holds and what does not, goes on after a failure, and ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from scripts import gpu_check, gpu_kernels

CPU = torch.device("cpu")


def run_checks(checks: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(gpu_kernels, "CHECKS", list(checks.items()))
    return gpu_kernels.run(CPU, only="", first=0, failed=False)


def raising(error: Exception) -> object:
    def check(device: torch.device) -> tuple[float, float]:
        raise error

    return check


def test_kernels_of_a_cpu_hold(capsys: pytest.CaptureFixture[str]) -> None:
    for only in ("sdpa float32", "cpu float32, dead, 44", "float8, rowwise, float32"):
        assert gpu_kernels.run(CPU, only=only, first=0, failed=False)
        assert capsys.readouterr().out.startswith("ok ")


def test_a_kernel_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: the log-sum-exp, of which nothing but backward and other blocks know, is off."""
    forward, backward = gpu_kernels.attention._KERNELS["cpu"]

    def wrong(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = forward(*arguments)
        return out, lse + 1e-3

    monkeypatch.setitem(gpu_kernels.attention._KERNELS, "cpu", (wrong, backward))
    assert not gpu_kernels.run(CPU, only="cpu float32, causal, 64", first=0, failed=False)


def test_after_a_failure_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = {
        "too far": lambda device: (2.0, 1.0),
        "no number": lambda device: (float("nan"), 1.0),
        "raises": raising(ValueError("a reason\nand more")),
        "absent": raising(gpu_kernels.Skipped("no such kernel here")),
        "right": lambda device: (0.5, 1.0),
    }
    assert not run_checks(checks, monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["FAILED", "FAILED", "FAILED", "-", "ok"]
    assert lines[2].endswith("ValueError: a reason")
    assert run_checks({"absent": checks["absent"], "right": checks["right"]}, monkeypatch)


def test_an_error_of_the_device_ends_the_process_and_not_the_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(gpu_kernels.os, "execv", lambda _, argv: started.append(argv[2:]))
    checks = {"a": raising(RuntimeError("an illegal access"))}
    run_checks(checks, monkeypatch)
    assert not started and gpu_kernels.still_works(CPU)
    monkeypatch.setattr(gpu_kernels, "still_works", lambda device: False)
    run_checks(checks, monkeypatch)
    assert started == [["--only", "", "--from", "1", "--failed"]]


def test_each_check_has_a_name_of_its_own() -> None:
    names = [name for name, _ in gpu_kernels.CHECKS]
    assert len(set(names)) == len(names) > 50


def test_without_an_accelerator_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "device_type", lambda: "cpu")
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def parts(commands: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands of parts, in Python; returns what to run them with."""
    monkeypatch.setattr(gpu_check, "command_of", lambda part, on_cpu: ["-c", commands[part]])
    return ["--device", "cpu", "--parts", ",".join(commands)]


def test_a_part_that_fails_or_lasts_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    hanging = "import subprocess, sys; print('a', flush=True)\n"
    hanging += "subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    commands = {"kernels": hanging, "training": "raise SystemExit(1)", "table": "print('b')"}
    begin = time.monotonic()
    argv = [*parts(commands, monkeypatch), "--seconds", "5"]
    assert gpu_check.main(argv) == 1
    assert time.monotonic() - begin < 10
    said = (tmp_path / "gpu_check.txt").read_text()
    assert said in capfd.readouterr().out
    for line in (
        "a",
        "kernels: ENDED: it took too long",
        "training: FAILED",
        "b",
        "table: all holds",
    ):
        assert f"{line}\n" in said or f"--- {line}, " in said
    assert gpu_check.main(parts({"table": "print('b')"}, monkeypatch)) == 0


def test_a_part_that_does_not_exist_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu", "--parts", "kernel"]) == 2
    assert "no kernel; there are kernels" in capsys.readouterr().err


@pytest.mark.slow
def test_the_debug_model_trains_alike() -> None:
    assert gpu_check.train(on_cpu=True)

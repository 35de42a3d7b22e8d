"""scripts/plot_run.py draws what the files hold, and says in one line why it cannot."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import plot_run

ROOT = Path(__file__).parent.parent


def write_run(folder: Path, *, steps: int = 20, offset: float = 0.0) -> Path:
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            loss = None if step == 7 else offset + 5 / step
            record = {"step": step, "loss": loss, "grad_norm": 1.0, "tokens_per_second": 900.0}
            file.write(json.dumps(record) + "\n")
            if step % 5 == 0:
                validation = {"step": step, "event": "validation", "validation_loss": 5.0 / step}
                file.write(json.dumps(validation) + "\n")
    return folder


def run_script(*arguments: str, python_options: tuple[str, ...] = ()):
    return subprocess.run(
        [sys.executable, *python_options, "scripts/plot_run.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_two_runs_become_one_png(tmp_path):
    pytest.importorskip("matplotlib")
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", offset=1.0)
    output = tmp_path / "pictures" / "run.png"
    done = run_script(
        str(tmp_path / "a"), str(tmp_path / "b" / "metrics.jsonl"), "--output", str(output)
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{output}\n", "")
    header = output.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", header[16:24])) > 800  # width and height in pixels


def test_the_panels_hold_the_values_of_each_run_with_gaps_for_null(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    runs = [str(write_run(tmp_path / "a")), str(write_run(tmp_path / "b", offset=1.0))]
    assert plot_run.main([*runs, "--output", str(tmp_path / "run.png")]) == 0
    loss, norm, speed = figures[0].axes
    lines = {line.get_label(): line for line in loss.get_lines()}
    assert list(lines) == ["a", "a, validation", "b", "b, validation"]
    for label, offset in (("a", 0.0), ("b", 1.0)):
        steps, losses = lines[label].get_data()
        assert list(steps) == list(range(1, 21))
        assert losses[6] != losses[6]  # step 7 is null in the file: not a number, a gap
        expected = [offset + 5 / step for step in range(1, 21) if step != 7]
        assert [value for value in losses if value == value] == expected
        assert list(lines[f"{label}, validation"].get_xdata()) == [5, 10, 15, 20]
    assert [len(axes.get_lines()) for axes in (norm, speed)] == [2, 2]
    assert len({line.get_color() for line in norm.get_lines()}) == 2


def test_runs_of_the_same_folder_name_are_told_apart_by_their_parents():
    assert plot_run.run_labels(["/x/a/outputs", "/x/b/outputs/metrics.jsonl"]) == [
        "a/outputs",
        "b/outputs",
    ]
    assert plot_run.run_labels(["/x/a", "/x/b"]) == ["a", "b"]


def refused(capsys, *arguments: str) -> str:
    assert plot_run.main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_missing_an_empty_and_a_damaged_run_are_each_one_line(tmp_path, capsys):
    assert "metrics.jsonl does not exist" in refused(capsys, str(tmp_path))
    assert "nowhere does not exist" in refused(capsys, str(tmp_path / "nowhere"))
    path = tmp_path / "metrics.jsonl"
    path.touch()
    assert "holds no records" in refused(capsys, str(tmp_path))
    path.write_text("loss: 3\n")
    assert "line 1: not a metrics record" in refused(capsys, str(tmp_path))


def test_the_same_run_twice_and_an_unknown_picture_format_are_each_one_line(tmp_path, capsys):
    run = str(write_run(tmp_path / "a"))
    assert "the same run is given twice" in refused(capsys, run, run)
    pytest.importorskip("matplotlib")
    assert "run.xyz cannot be written" in refused(capsys, run, "--output", f"{tmp_path}/run.xyz")


def test_without_matplotlib_the_script_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    run = str(write_run(tmp_path / "a"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what import makes of an absent module
    assert "pip install matplotlib" in refused(capsys, run)

"""What a run reports is what was measured, survives a crash and is read back exactly."""

from __future__ import annotations

import builtins
import json
import math
import os
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.config import ConfigError
from torchtitan_lite.observe.metrics import (
    METRICS_FILE,
    MetricsWriter,
    StepTimer,
    format_duration,
    format_line,
    read_metrics,
)

RECORD = {
    "step": 120,
    "loss": 4.91234,
    "loss_max": 5.5,
    "grad_norm": 1.2345678,
    "lr": 9.8e-4,
    "tokens_seen": 245760,
    "tokens_per_second": 12345.4,
    "tokens_per_second_per_device": 6172.7,
    "mfu": None,
    "tflops": 0.2,
    "data_seconds": 0.002,
    "step_seconds": 0.166,
    "memory_gib": 1.234,
    "skipped_steps": 0,
}


class Clock:
    """A clock that a test moves by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def make_timer(clock: Clock, **options) -> StepTimer:
    options = {"num_devices": 4, "flops_per_token": 2e9, "peak_flops": None, **options}
    return StepTimer(**options, clock=clock)


def train_steps(timer: StepTimer, clock: Clock, steps: int, *, seconds: float = 2.0) -> None:
    """Each step: a quarter of its time waiting for data, 800 tokens."""
    for _ in range(steps):
        with timer.waiting_for_data():
            clock.advance(seconds / 4)
        clock.advance(seconds * 3 / 4)
        timer.step(800)


# --- StepTimer ----------------------------------------------------------------------------------


def test_the_first_log_divides_by_the_first_step_alone():
    clock = Clock()
    timer = make_timer(clock)
    train_steps(timer, clock, 1)
    assert timer.read() == {
        "tokens_per_second": 400.0,
        "tokens_per_second_per_device": 100.0,
        "mfu": None,
        "tflops": 0.2,
        "data_seconds": 0.5,
        "step_seconds": 2.0,
    }


def test_each_log_covers_the_steps_since_the_log_before():
    clock = Clock()
    timer = make_timer(clock)
    train_steps(timer, clock, 1, seconds=50.0)  # slow: it compiles
    timer.read()
    train_steps(timer, clock, 9, seconds=4.0)
    timing = timer.read()
    assert timing["tokens_per_second"] == pytest.approx(200)
    assert timing["step_seconds"] == pytest.approx(4)
    assert timing["data_seconds"] == pytest.approx(1)


def test_validation_and_checkpoints_slow_the_eta_and_not_the_speed():
    clock = Clock()
    timer = make_timer(clock)
    train_steps(timer, clock, 1)
    timer.read()
    train_steps(timer, clock, 1)
    with timer.not_training():
        clock.advance(6)
    train_steps(timer, clock, 1)
    assert timer.read()["tokens_per_second"] == 400
    assert timer.eta_seconds(3) == 3 * (2 + 6 + 2) / 2


def test_time_that_is_not_declared_counts_against_the_speed():
    clock = Clock()
    timer = make_timer(clock)
    train_steps(timer, clock, 1)
    clock.advance(2)
    assert timer.read()["tokens_per_second"] == 200


def test_the_eta_leaves_the_slow_first_step_out_as_soon_as_there_is_another():
    clock = Clock()
    timer = make_timer(clock)
    train_steps(timer, clock, 1, seconds=60)
    assert timer.eta_seconds(10) == 600
    train_steps(timer, clock, 2)
    assert timer.eta_seconds(10) == 20


def test_waiting_that_ends_in_an_error_is_still_counted():
    clock = Clock()
    timer = make_timer(clock)
    with pytest.raises(StopIteration), timer.waiting_for_data():
        clock.advance(3)
        raise StopIteration
    clock.advance(1)
    timer.step(1)
    assert timer.read()["data_seconds"] == 3


def test_mfu_is_the_share_of_a_known_peak():
    clock = Clock()
    timer = make_timer(clock, peak_flops=1e12)
    train_steps(timer, clock, 1)
    assert timer.read()["mfu"] == pytest.approx(100 * 2e9 / 1e12)


# --- MetricsWriter and read_metrics -------------------------------------------------------------


def write_all(folder, *records, **options) -> None:
    writer = MetricsWriter(folder, enabled=True, **options)
    for record in records:
        writer.write(record)
    writer.close()


def test_every_bit_of_a_number_comes_back(tmp_path):
    record = {"step": 3, "loss": 0.1 + 0.2, "grad_norm": 1 / 3, "lr": 5e-324, "mfu": None}
    write_all(tmp_path, record)
    assert read_metrics(tmp_path) == [record]
    assert read_metrics(tmp_path / METRICS_FILE) == [record]


def test_a_written_record_is_on_disk_before_the_run_ends(tmp_path):
    writer = MetricsWriter(tmp_path, enabled=True)
    writer.write({"step": 1, "loss": 2.0})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]
    writer.close()
    writer.close()


def test_ranks_that_do_not_write_leave_nothing(tmp_path):
    writer = MetricsWriter(tmp_path / "run", enabled=False, tensorboard_folder="tb", wandb=True)
    writer.write({"step": 1})
    writer.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_number_is_null_in_valid_json_and_is_told(tmp_path, value):
    record = {"step": 1, "loss": value, "lr": 0.5}
    write_all(tmp_path, record, {"step": 2, "loss": value, "event": "skipped"})
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    refuse = {"parse_constant": lambda name: pytest.fail(f"{name} is not JSON")}
    assert [json.loads(line, **refuse) for line in lines] == [
        {"step": 1, "loss": None, "lr": 0.5, "event": "non-finite"},
        {"step": 2, "loss": None, "event": "skipped"},
    ]
    assert record == {"step": 1, "loss": value, "lr": 0.5}  # the caller's stays as it was


def test_a_resumed_run_appends_and_the_later_line_of_a_step_counts(tmp_path):
    write_all(tmp_path, {"step": 10, "loss": 5.0}, {"step": 20, "loss": 4.0})
    write_all(tmp_path, {"step": 20, "loss": 4.5}, {"step": 30, "loss": 3.0})
    assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == 4
    losses = [(record["step"], record["loss"]) for record in read_metrics(tmp_path)]
    assert losses == [(10, 5.0), (20, 4.5), (30, 3.0)]


def test_a_validation_record_stands_beside_the_training_record_of_its_step(tmp_path):
    train = {"step": 10, "loss": 5.0}
    validation = {"step": 10, "event": "validation", "validation_loss": 5.5}
    write_all(tmp_path, train, validation, {"step": 20, "loss": 4.0})
    assert read_metrics(tmp_path) == [train, validation, {"step": 20, "loss": 4.0}]


def test_a_half_written_last_line_is_cut_off_with_a_warning_and_the_file_stays_whole(
    tmp_path, caplog
):
    write_all(tmp_path, {"step": 1, "loss": 5.0})
    with open(tmp_path / METRICS_FILE, "a") as file:
        file.write('{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 5.0}]  # as while a run is writing
    write_all(tmp_path, {"step": 2, "loss": 4.0})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}]
    assert "half-written" in caplog.text and '{"step": 2, "lo' in caplog.text


def test_a_whole_record_that_only_lacks_its_line_break_is_kept(tmp_path, caplog):
    (tmp_path / METRICS_FILE).write_text('{"step": 1, "loss": 5.0}')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 5.0}]
    write_all(tmp_path, {"step": 2, "loss": 4.0})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    assert caplog.text == ""


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": 1.0}', '{"step": "x"}', ""])
def test_a_damaged_line_inside_the_file_is_named(tmp_path, line):
    path = tmp_path / METRICS_FILE
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_metrics(path)


def test_a_record_without_a_step_and_a_tensor_are_refused(tmp_path):
    writer = MetricsWriter(tmp_path, enabled=True)
    with pytest.raises(AssertionError):
        writer.write({"loss": 1.0})
    with pytest.raises(TypeError):
        writer.write({"step": 1, "loss": object()})
    writer.close()


def test_tensorboard_holds_the_same_numbers(tmp_path):
    write_all(tmp_path, {**RECORD, "event": "x"}, tensorboard_folder="tb")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(RECORD) - {"step", "mfu"}
    (point,) = events.Scalars("loss")
    assert (point.step, point.value) == (120, pytest.approx(4.91234))


def test_wandb_offline_holds_the_same_numbers(tmp_path):
    pytest.importorskip("wandb")
    # A process of its own: wandb starts a service and hooks the exit of its interpreter.
    program = (
        "import sys; from torchtitan_lite.observe.metrics import MetricsWriter\n"
        "w = MetricsWriter(sys.argv[1], enabled=True, wandb=True, run_config={'lr': 0.25})\n"
        "[w.write({'step': step, 'loss': 0.125 * step}) for step in (10, 20, 15)]\n"
        "w.close()\n"
    )
    environment = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": os.getcwd()}
    environment |= {"HOME": str(tmp_path), "WANDB_SILENT": "true"}
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, check=True, timeout=60
    )
    assert [record["step"] for record in read_metrics(tmp_path)] == [10, 15, 20]
    (run,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    logged = wandb_records(run)
    history = [
        {
            item.key or item.nested_key[0]: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in logged["history"]
    ]
    points = [(point["step"], point["loss"]) for point in history]
    assert points == [(10, 1.25), (20, 2.5), (15, 1.875)]  # none dropped, none moved
    assert [(it.metric.glob_name, it.metric.step_metric) for it in logged["metric"]][-1:] == [
        ("*", "step")
    ]
    config = {item.key: item.value_json for it in logged["run"] for item in it.run.config.update}
    assert config["lr"] == "0.25"


def wandb_records(run: Path) -> dict[str, list[Any]]:
    """The records of a small .wandb file by their type.

    The file is a 7-byte header and then records of the LevelDB log format: a checksum (4 bytes),
    a length (2), a type (1), a protobuf message; a file under 32 KiB holds only whole ones.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content = run.read_bytes()
    assert len(content) < 32 * 1024
    records = defaultdict(list)
    place = 7
    while place < len(content):
        _, length, kind = struct.unpack_from("<IHB", content, place)
        assert kind == 1, "not a whole record"
        record = Record.FromString(content[place + 7 : place + 7 + length])
        records[record.WhichOneof("record_type")].append(record)
        place += 7 + length
    return records


@pytest.mark.parametrize(
    ("module", "options", "key"),
    [
        ("torch.utils.tensorboard", {"tensorboard_folder": "tb"}, "metrics.enable_tensorboard"),
        ("wandb", {"wandb": True}, "metrics.enable_wandb"),
    ],
)
def test_a_tracker_that_is_not_installed_is_one_clear_error(
    tmp_path, monkeypatch, module, options, key
):
    original = builtins.__import__

    def without_module(name, *args, **kwargs):
        if name == module:
            raise ImportError(f"No module named {module!r}")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_module)
    with pytest.raises(ConfigError, match=f"{key} = true: .*pip install"):
        MetricsWriter(tmp_path, enabled=True, **options)


# --- format_line --------------------------------------------------------------------------------


def test_the_line_reads_like_this():
    assert format_line(RECORD, total_steps=1000, eta_seconds=723.4) == (
        "step  120/1000  loss 4.9123  grad 1.235  lr 9.80e-04  12,345 tok/s  data 1.2%"
        "  1.23 GiB  eta 0:12:03"
    )


def test_mfu_skipped_steps_and_z_loss_show_when_there_are_any():
    line = format_line(
        {**RECORD, "mfu": 0.4123, "skipped_steps": 2, "z_loss": 0.00125, "recompilations": 3},
        total_steps=1000,
    )
    assert "  recompiled 3" in line
    assert "  mfu 41.2%" in line and "  skipped 2" in line and "  z 0.00125" in line


def test_a_non_finite_loss_shows_as_nan_from_the_run_and_from_the_file():
    for loss in (math.nan, None):
        assert "loss nan" in format_line({"step": 1, "loss": loss}, total_steps=5)


def test_a_validation_record_has_a_line_of_its_own():
    record = {"step": 7, "event": "validation", "validation_loss": 3.25}
    assert format_line(record, total_steps=10) == "step  7/10  validation loss 3.2500"


def test_colours_add_nothing_but_colours():
    import re

    record = {**RECORD, "skipped_steps": 1}
    colored = format_line(record, total_steps=1000, color=True)
    plain = format_line(record, total_steps=1000)
    assert "\x1b[" in colored and "\x1b[" not in plain
    assert re.sub(r"\x1b\[\d*m", "", colored) == plain


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00:00"), (3723, "1:02:03"), (183845, "2d 03:04:05")]
)
def test_a_duration_reads_as_a_clock(seconds, text):
    assert format_duration(seconds) == text

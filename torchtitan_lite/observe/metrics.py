"""A run's numbers: measured between logged steps, written once, shown as one line.

    StepTimer     time and tokens since the last log -> tokens/s, MFU, share of waiting for data
    MetricsWriter one record a logged step -> metrics.jsonl, and TensorBoard and W&B on request
    format_line   the same record as one readable line
    read_metrics  metrics.jsonl -> records, one per step

A record is a plain dict with the names that the README lists. metrics.jsonl is only ever
appended to: a resumed run continues the file, a step that is trained again appears again, and
the later line counts. Each line is flushed, so a crash loses none that was shown.

Proven in tests/observe/test_metrics.py.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.config import ConfigError
from torchtitan_lite.observe.logging import logger, paint

Record = dict[str, Any]

METRICS_FILE = "metrics.jsonl"


@dataclass(kw_only=True)
class StepTimer:
    """Seconds, tokens and waiting for data, between one log and the next.

        timer = StepTimer(num_devices=8, flops_per_token=..., peak_flops=...)
        for step in ...:
            with timer.waiting_for_data():
                batch = next(batches)
            ...forward, backward, optimizer; read the loss, which waits for the device...
            timer.step(num_tokens)
            if logged:
                record |= timer.read()
            with timer.not_training():
                ...validation, checkpoint...

    The window opens when the timer is made, so make it right before the first step: then the
    first log, of step 1 or of the first step after a resume, divides by what it measured. A
    device works on after its launches return: `read` is exact once its results were read.
    """

    num_devices: int
    flops_per_token: float
    peak_flops: float | None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        # For the time left: the first step also compiles and fills caches, so it is left out.
        self._first_step_seconds = 0.0
        self._first_step_end = 0.0
        self._total_steps = 0
        self._open_window()

    def _open_window(self) -> None:
        self._start = self.clock()
        self._tokens = 0
        self._steps = 0
        self._spent = {"data": 0.0, "other": 0.0}

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Count the time inside as waiting for data; it stays part of the step."""
        return self._spending("data")

    def not_training(self) -> AbstractContextManager[None]:
        """Leave the time inside (validation, a checkpoint) out of the speed, not out of the ETA."""
        return self._spending("other")

    @contextmanager
    def _spending(self, what: str) -> Iterator[None]:
        begin = self.clock()
        try:
            yield
        finally:
            self._spent[what] += self.clock() - begin

    def step(self, num_tokens: int) -> None:
        """End a step that trained `num_tokens` tokens over all ranks."""
        self._tokens += num_tokens
        self._steps += 1
        self._total_steps += 1
        if self._total_steps == 1:
            self._first_step_end = self.clock()
            self._first_step_seconds = self._first_step_end - self._start

    def read(self) -> Record:
        """The timing part of a record, of the steps since the last call; opens the next window.

        step_seconds and data_seconds are means a step; tflops is a device's, in 1e12 FLOP/s; mfu
        is its share (0 to 1) of the peak, None where that is not known.
        """
        assert self._steps > 0, "read() needs a step() since the last read()"
        seconds = self.clock() - self._start - self._spent["other"]
        assert seconds > 0, seconds
        tokens_per_second = self._tokens / seconds
        per_device = tokens_per_second / self.num_devices
        flops = per_device * self.flops_per_token
        timing = {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": per_device,
            "mfu": None if self.peak_flops is None else flops / self.peak_flops,
            "tflops": flops / 1e12,
            "data_seconds": self._spent["data"] / self._steps,
            "step_seconds": seconds / self._steps,
        }
        self._open_window()
        return timing

    def eta_seconds(self, steps_left: int) -> float:
        """Seconds until `steps_left` more steps are done, validation and checkpoints included."""
        assert self._total_steps > 0, "eta_seconds() needs a step()"
        if self._total_steps == 1:
            return self._first_step_seconds * steps_left
        since_first = self.clock() - self._first_step_end
        return since_first / (self._total_steps - 1) * steps_left


# --- writing and reading ------------------------------------------------------------------------


class MetricsWriter:
    """Writes records to `<dump_folder>/metrics.jsonl`, and to TensorBoard and W&B on request.

    One rank of the world passes `enabled`; on the others every call does nothing.
    """

    def __init__(
        self,
        dump_folder: str | Path,
        *,
        enabled: bool,
        tensorboard_folder: str | None = None,
        wandb: bool = False,
        run_config: dict[str, Any] | None = None,
    ) -> None:
        """`tensorboard_folder` lies under `dump_folder`; `run_config` is what W&B shows as config.

        Raises ConfigError if a tracker is asked for that is not installed.
        """
        self._file: Any = None
        self._tensorboard: Any = None
        self._wandb: Any = None
        if not enabled:
            return
        folder = Path(dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        if tensorboard_folder is not None:
            self._tensorboard = _open_tensorboard(folder / tensorboard_folder)
        if wandb:
            self._wandb = _open_wandb(folder, run_config or {})
        _repair_last_line(folder / METRICS_FILE)
        self._file = open(folder / METRICS_FILE, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, record: Record) -> None:
        """Append `record`, which has a "step".

        JSON has no NaN and no infinity: such a value is written as null, and the record gets the
        event "non-finite" unless it already has an event of its own.
        """
        assert "step" in record, record
        if self._file is None:
            return
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        if finite != record:
            finite["event"] = record.get("event") or "non-finite"
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()
        scalars = {
            name: value
            for name, value in record.items()
            if isinstance(value, (int, float)) and name != "step"
        }
        if self._tensorboard is not None:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log({"step": record["step"], **scalars})

    def close(self) -> None:
        """Flush and close everything; a second call does nothing."""
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._file = self._tensorboard = self._wandb = None


def _open_tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise _not_installed("tensorboard", error) from error
    return SummaryWriter(str(folder))


def _open_wandb(folder: Path, run_config: dict[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise _not_installed("wandb", error) from error
    try:
        # Project, mode and run id are W&B's own settings: wandb reads WANDB_PROJECT, WANDB_MODE and
        # WANDB_RUN_ID (with which a resumed run goes on in the same W&B run).
        run = wandb.init(dir=str(folder), config=run_config, resume="allow")
    except wandb.errors.Error as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"metrics.enable_wandb = true: wandb does not start ({reason}); run `wandb login`, "
            "or set WANDB_MODE=offline, or switch the option off"
        ) from error
    # The run's step is the x axis. W&B's own step may only rise, and a resumed run goes back.
    run.define_metric("*", step_metric="step")
    return run


def _not_installed(tracker: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"metrics.enable_{tracker} = true: {tracker} cannot be imported ({error}); "
        f"install it (pip install {tracker}) or switch the option off"
    )


def _repair_last_line(path: Path) -> None:
    """Make the file end in a whole line, so that the next record begins one of its own.

    A crash in the middle of a write leaves a line without its end. A record that only lacks the
    line break gets it; a fragment is no record of anything and is cut off, with a warning.
    """
    content = path.read_bytes() if path.exists() else b""
    last = content.rpartition(b"\n")[2]
    if not last:
        return
    if _parse(last) is not None:
        with open(path, "ab") as file:
            file.write(b"\n")
        return
    with open(path, "r+b") as file:
        file.truncate(len(content) - len(last))
    logger.warning(f"{path}: the last line was half-written and is removed: {last[:80]!r}")


def _parse(line: bytes) -> Record | None:
    """The record of a line of metrics.jsonl; None if it is not one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def read_metrics(path: str | Path) -> list[Record]:
    """The records of a run (its folder or its metrics.jsonl) in the order of their steps.

    Of several lines for a step the last one counts; a validation record stands beside the
    training record of its step. A last line that is still being written is left out. Raises
    FileNotFoundError, or ValueError naming the line that is not a record.
    """
    path = Path(path)
    if path.is_dir():
        path = path / METRICS_FILE
    *lines, unfinished = path.read_bytes().split(b"\n")
    if _parse(unfinished) is not None:
        lines.append(unfinished)
    latest: dict[tuple[int, bool], Record] = {}
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is None:
            raise ValueError(f"{path}, line {number}: not a metrics record: {line[:80]!r}")
        latest[record["step"], "validation_loss" in record] = record
    return [latest[key] for key in sorted(latest)]


# --- showing ------------------------------------------------------------------------------------


# What a line shows after the step, in this order: a field, its form, its colour (an SGR number).
_PARTS = {
    "validation_loss": ("validation loss {:.4f}", "35"),
    "loss": ("loss {:.4f}", "36"),
    "z_loss": ("z {:.4g}", ""),
    "grad_norm": ("grad {:.4g}", ""),
    "lr": ("lr {:.2e}", ""),
    "tokens_per_second": ("{:,.0f} tok/s", ""),
    "data_share": ("data {:.1%}", ""),
    "memory_gib": ("{:.2f} GiB", ""),
    "mfu": ("mfu {:.1%}", ""),
    "eta": ("eta {}", ""),
    "recompilations": ("recompiled {}", "31"),
    "skipped_steps": ("skipped {}", "31"),
}
_NOTHING_TO_SAY = (("mfu", None), ("recompilations", 0), ("skipped_steps", 0))


def format_line(
    record: Record, *, total_steps: int, eta_seconds: float | None = None, color: bool = False
) -> str:
    """One readable line of a training or validation record.

        step   120/1000  loss 4.9123  grad 1.234  lr 9.80e-04  12,345 tok/s  data 1.2%  1.23 GiB
        eta 0:12:03

    (on one line); MFU is there where it is known, `skipped` once a step was skipped,
    `recompiled` once a graph was made after the first step. A field
    that the record lacks is left out; None, which stands for a non-finite value, shows as nan.
    """
    shown = {
        name: math.nan if value is None else value
        for name, value in record.items()
        if (name, value) not in _NOTHING_TO_SAY
    }
    if record.get("step_seconds"):
        shown["data_share"] = record["data_seconds"] / record["step_seconds"]
    if eta_seconds is not None and "validation_loss" not in record:
        shown["eta"] = format_duration(eta_seconds)
    step = f"step {record['step']:>{len(str(total_steps))}}/{total_steps}"
    parts = [paint(step, "1", color=color)]
    for name, (form, code) in _PARTS.items():
        if name in shown:
            parts.append(paint(form.format(shown[name]), code, color=color))
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """`1:02:03`, or `2d 03:04:05` from a day on."""
    days, rest = divmod(round(seconds), 24 * 3600)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}"

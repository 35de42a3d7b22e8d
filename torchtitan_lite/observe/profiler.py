"""Traces of where time goes (torch.profiler) and pictures of where memory goes (snapshots).

Both are a context around the training loop whose object gets a `step()` after each training
step; switched off, the step does nothing and the loop needs no `if`.

A trace covers `active` steps out of every `freq`, with `warmup` steps before them in which the
profiler runs and throws its events away (its first steps carry its own start-up):

    step      1  2  3  4  5  6 | 7  8  9 | 10 |  11 ...        freq 10, warmup 3, active 1
              wait             | warmup  | active -> iteration_10/rank0_trace.json

Steps are the run's: after a resume at step 14 the next trace is again iteration_20. A cycle that
a resume enters in its middle is left out if its warm-up would be cut short.

Proven in tests/observe/test_profiler.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerAction

from torchtitan_lite import device
from torchtitan_lite.config import ConfigError
from torchtitan_lite.observe.logging import logger, warn_once

# Allocations and frees that a snapshot looks back on; about 100 MB of pickle.
_MEMORY_HISTORY_ENTRIES = 100_000


class _Off:
    """A profiler that is switched off."""

    def step(self) -> None:
        """A step of which nothing is kept."""


@contextmanager
def profiling(
    *,
    enabled: bool,
    dump_folder: str | Path,
    traces_folder: str = "profile_traces",
    freq: int = 10,
    active: int = 1,
    warmup: int = 3,
    rank: int = 0,
    start_step: int = 0,
) -> Iterator[torch.profiler.profile | _Off]:
    """Profile the steps inside; `start_step` of them are already done.

    Each cycle writes `<dump_folder>/<traces_folder>/iteration_<step>/rank<rank>_trace.json` for
    chrome://tracing or https://ui.perfetto.dev. That `warmup` and `active` fit into `freq` is
    checked with the keys (config/checks.py). Raises ConfigError if there can be no such folder.
    """
    if not enabled:
        yield _Off()
        return
    folder = Path(dump_folder) / traces_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # while the profiler stops it would end the process
        raise ConfigError(
            f"profiling.save_traces_folder = {traces_folder!r}: {error.strerror}; name another"
        ) from None

    wait = freq - (warmup + active)
    cycle = torch.profiler.schedule(wait=wait, warmup=warmup, active=active)
    first_whole_warmup = start_step
    if start_step % freq > wait:
        first_whole_warmup = (start_step // freq + 1) * freq

    def action(n: int) -> ProfilerAction:
        """Of the n-th step after `start_step`, n from 0."""
        step = start_step + n
        return cycle(step) if step >= first_whole_warmup else ProfilerAction.NONE

    def write_trace(profiler: torch.profiler.profile) -> None:
        step = start_step + profiler.step_num
        if 0 < step % freq <= freq - active:
            return  # the run ended inside the first active step: there is nothing to see
        path = _file(folder, f"iteration_{step}", f"rank{rank}_trace.json")
        profiler.export_chrome_trace(str(path))
        logger.info(f"profiler trace: {path}")

    with torch.profiler.profile(
        activities=torch.profiler.supported_activities(),
        schedule=action,
        on_trace_ready=write_trace,
        record_shapes=True,
    ) as profiler:
        yield profiler


@contextmanager
def memory_snapshot(
    *,
    enabled: bool,
    dump_folder: str | Path,
    snapshot_folder: str = "memory_snapshot",
    freq: int = 10,
    rank: int = 0,
    start_step: int = 0,
) -> Iterator[_Snapshots | _Off]:
    """Record the allocations of the steps inside; `start_step` steps are already done.

    Writes `<dump_folder>/<snapshot_folder>/iteration_<step>/rank<rank>_memory_snapshot.pickle`
    every `freq` steps, and into `iteration_<step>_exit` when memory runs out in a step, for
    https://pytorch.org/memory_viz. On a device without such a history: one warning.
    """
    if enabled and not device.supports_memory_history():
        warn_once(
            "profiling.enable_memory_snapshot = true has no effect on the device type "
            f"{device.device_type()}: its allocator keeps no history"
        )
    if not enabled or not device.supports_memory_history():
        yield _Off()
        return
    snapshots = _Snapshots(Path(dump_folder) / snapshot_folder, freq, rank, num_steps=start_step)
    device.record_memory_history(_MEMORY_HISTORY_ENTRIES)
    try:
        yield snapshots
    except torch.OutOfMemoryError:
        snapshots.dump("_exit", step=snapshots.num_steps + 1)  # the step that did not end
        raise
    finally:
        device.record_memory_history(None)


@dataclass
class _Snapshots:
    folder: Path
    freq: int
    rank: int
    num_steps: int

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps % self.freq == 0:
            self.dump("", step=self.num_steps)

    def dump(self, suffix: str, *, step: int) -> None:
        name = f"rank{self.rank}_memory_snapshot.pickle"
        path = _file(self.folder, f"iteration_{step}{suffix}", name)
        device.dump_memory_history(str(path))
        logger.info(f"memory snapshot: {path}")


def _file(folder: Path, iteration: str, name: str) -> Path:
    (folder / iteration).mkdir(parents=True, exist_ok=True)
    return folder / iteration / name

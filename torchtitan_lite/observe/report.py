"""What a run says about itself: each record to the metrics file, to trackers and to the log."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from torchtitan_lite import device
from torchtitan_lite.config import Config, to_dict
from torchtitan_lite.observe.logging import logger, use_color
from torchtitan_lite.observe.metrics import MetricsWriter, Record, StepTimer, format_line
from torchtitan_lite.observe.profiler import memory_snapshot, profiling


@contextmanager
def instruments_of(
    config: Config, *, rank: int, start_step: int
) -> Iterator[Callable[[int], None]]:
    """What accompanies the loop: garbage collection, profiler, memory snapshots.

    Yields what is to be called with the number of each step when it has ended.
    """
    options, folder = config.profiling, config.job.dump_folder
    with (
        device.GarbageCollection(config.training.gc_freq) as garbage,
        profiling(
            enabled=options.enable_profiling,
            dump_folder=folder,
            traces_folder=options.save_traces_folder,
            freq=options.profile_freq,
            active=options.profiler_active,
            warmup=options.profiler_warmup,
            rank=rank,
            start_step=start_step,
        ) as profiler,
        memory_snapshot(
            enabled=options.enable_memory_snapshot,
            dump_folder=folder,
            snapshot_folder=options.save_memory_snapshot_folder,
            freq=options.profile_freq,
            rank=rank,
            start_step=start_step,
        ) as snapshot,
    ):

        def after_step(step: int) -> None:
            garbage.step(step)
            profiler.step()
            snapshot.step()

        yield after_step


class RunReport:
    """The records of one run; rank 0 writes them, every rank may call."""

    def __init__(
        self, config: Config, *, flops_per_token: float, rank: int, num_devices: int
    ) -> None:
        options = config.metrics
        self._total_steps = config.training.steps
        self._color = use_color(not options.disable_color_printing)
        dtype = getattr(torch, config.training.mixed_precision_param)
        self._make_timer = functools.partial(
            StepTimer,
            num_devices=num_devices,
            flops_per_token=flops_per_token,
            peak_flops=device.peak_flops(device.device_name(), dtype),
        )
        self._writer = MetricsWriter(
            config.job.dump_folder,
            enabled=rank == 0,
            tensorboard_folder=options.save_tb_folder if options.enable_tensorboard else None,
            wandb=options.enable_wandb,
            run_config=to_dict(config),
        )

    def start_timer(self) -> StepTimer:
        """A timer whose first window opens here: call it right before the first step."""
        self._timer = self._make_timer()
        return self._timer

    def write(self, record: Record) -> None:
        """Append `record` to the metrics and show it as one line."""
        self._writer.write(record)
        eta = self._timer.eta_seconds(self._total_steps - record["step"])
        line = format_line(
            record, total_steps=self._total_steps, eta_seconds=eta, color=self._color
        )
        logger.info(line)

    def close(self) -> None:
        """Flush and close the metrics file and the trackers."""
        self._writer.close()

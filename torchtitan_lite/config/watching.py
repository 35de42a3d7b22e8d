"""The keys of what watches a run and changes nothing of it: metrics, profiling, limits, debugging.

Sections as in keys.py, where all of them come together.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lite.config.bounds import Count, CountOrZero, Seed


@dataclass
class Metrics:
    """What is shown and where."""

    log_freq: Count = 10
    """Steps from one logged step to the next; the first is always logged."""
    enable_tensorboard: bool = False
    """Write TensorBoard events too."""
    save_tb_folder: str = "tb"
    """Folder under dump_folder for them."""
    enable_wandb: bool = False
    """Log to Weights & Biases too, set up by its own environment variables."""
    disable_color_printing: bool = False
    """No colours in the log; a log that is not a terminal never has them."""


@dataclass
class Profiling:
    """Traces of time and memory."""

    enable_profiling: bool = False
    """Write a trace of each rank every profile_freq steps."""
    save_traces_folder: str = "profile_traces"
    """Folder under dump_folder for traces."""
    profile_freq: Count = 10
    """Steps from one trace, or memory snapshot, to the next."""
    profiler_active: Count = 1
    """Steps in a trace."""
    profiler_warmup: CountOrZero = 3
    """Steps before them that the profiler watches without keeping."""
    enable_memory_snapshot: bool = False
    """Write the allocator's history every profile_freq steps and when memory runs out."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder under dump_folder for snapshots."""


@dataclass
class Comm:
    """How long a collective may wait for its slowest rank."""

    init_timeout_seconds: Count = 300
    """Limit up to the first step."""
    train_timeout_seconds: Count = 100
    """Limit after the first step."""


@dataclass
class Debug:
    """What makes runs comparable."""

    seed: Seed = 42
    """Seed of the weights and of the order of the data."""
    deterministic: bool = False
    """Let operators take only deterministic algorithms."""

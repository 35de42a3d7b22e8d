"""The keys of how a run is kept and watched: files, checkpoints, metrics. See keys.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

CheckpointPart = Literal["model", "optimizer", "dataloader", "train_state"]


@dataclass
class Job:
    """Where a run comes from and where its files go."""

    config_file: str = ""
    """TOML file whose values replace the defaults; the command line replaces both."""

    dump_folder: str = "./outputs"
    """Folder that receives every file of the run."""

    description: str = ""
    """One line about the run, for its log."""

    print_config: bool = False
    """Write the resolved configuration to the log as JSON."""

    save_config_file: str = "config.toml"
    """File under dump_folder that receives the resolved configuration; "" writes none."""


@dataclass
class Checkpoint:
    """What is saved, when, and what a run starts from."""

    enable: bool = False
    """Save, and resume from the newest valid step in folder."""

    folder: str = "checkpoint"
    """Folder under dump_folder with one folder a saved step."""

    interval: int = 500
    """Steps from one save to the next; the last step is always saved."""

    load_step: int = -1
    """Step to resume from; -1: the newest valid one."""

    keep_latest_k: int = 10
    """Newest checkpoints that stay; 0 keeps all, 1 is refused."""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write while training goes on: from a copy, or from a copy in pinned memory."""

    initial_load_path: str = ""
    """Step folder that a run starts from while its own folder holds no checkpoint."""

    initial_load_model_only: bool = True
    """Of initial_load_path take the weights alone."""

    last_save_model_only: bool = False
    """Save the last step as weights alone; by default it is whole, so that it can be extended."""

    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights that last_save_model_only saves."""

    exclude_from_loading: list[CheckpointPart] = field(default_factory=list)
    """Parts that a load leaves as they are."""


@dataclass
class Metrics:
    """What is shown and where."""

    log_freq: int = 10
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

    profile_freq: int = 10
    """Steps from one trace, or memory snapshot, to the next."""

    profiler_active: int = 1
    """Steps in a trace."""

    profiler_warmup: int = 3
    """Steps before them that the profiler watches without keeping."""

    enable_memory_snapshot: bool = False
    """Write the allocator's history every profile_freq steps and when memory runs out."""

    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder under dump_folder for snapshots."""


@dataclass
class Comm:
    """How long a collective may wait for its slowest rank."""

    init_timeout_seconds: int = 300
    """Limit up to the first step."""

    train_timeout_seconds: int = 100
    """Limit after the first step."""


@dataclass
class Debug:
    """What makes runs comparable."""

    seed: int = 42
    """Seed of the weights and of the order of the data."""

    deterministic: bool = False
    """Let operators take only deterministic algorithms."""

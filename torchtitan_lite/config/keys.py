"""Every key there is.

A section is a dataclass, a key is one of its fields, and the string below a field is its help.
Nothing else declares a key: the loader (load.py) takes names, types and defaults from here,
`--help` (text.py) reads the strings from the source, the saved TOML walks the fields. The
sections stand in keys_training.py (what is computed) and keys_run.py (how it is kept).

To add a key, add a field with its sentence, its bounds in bounds.py if it is a number, and, if it
acts only together with another key, a row in effects.py.

    --training.seq_len 512          Config().training.seq_len
    [training]                      the same, in TOML
    seq_len = 512

Proven in tests/config/test_keys.py: no key lacks its sentence, and no key disappears unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan_lite.config.keys_run import Checkpoint, Comm, Debug, Job, Metrics, Profiling
from torchtitan_lite.config.keys_training import (
    ActivationCheckpoint,
    DataLoader,
    Loss,
    LRScheduler,
    Model,
    Optimizer,
    Parallelism,
    Training,
    Validation,
)

__all__ = [
    "ActivationCheckpoint",
    "Checkpoint",
    "Comm",
    "Config",
    "ConfigError",
    "DataLoader",
    "Debug",
    "Job",
    "LRScheduler",
    "Loss",
    "Metrics",
    "Model",
    "Optimizer",
    "Parallelism",
    "Profiling",
    "Training",
    "Validation",
]


class ConfigError(ValueError):
    """A mistake of the user's, told one a line: key, value, reason, fix. Ends train.py with 2."""


@dataclass
class Config:
    """All sections, and which of their keys the user set."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    loss: Loss = field(default_factory=Loss)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
    validation: Validation = field(default_factory=Validation)

    # Not sections: where the values are from, for messages and warnings.
    sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The file or flag that set each key, by dotted name."""

    user_set: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Those that the user asked for: without defaults in a file, as a saved one holds every key."""

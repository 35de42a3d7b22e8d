"""The configuration: every option there is, where its value comes from, and what must hold.

    keys.py       the dataclasses: the only source of keys, types, bounds, defaults and help
    schema.py     the keys as a flat list; the saved TOML and the help
    load.py       defaults < TOML file < command line; foreign.py: keys that are refused by name
    derived.py    numbers that follow from others, for checks and trainer alike
    checks.py     what must hold between keys, model and world
    effects.py    warnings about what will not act as set

Read in this order. Nothing here imports torch: help and mistakes are told at once.
"""

from __future__ import annotations

from torchtitan_lite.config.checks import check_config, load_and_check
from torchtitan_lite.config.derived import (
    micro_batch_size,
    num_schedule_steps,
    num_stages,
    num_warmup_steps,
    resolve,
    validation_seq_len,
)
from torchtitan_lite.config.effects import config_warnings
from torchtitan_lite.config.keys import Config, ConfigError
from torchtitan_lite.config.load import changed_settings, help_for, load_config, save_config
from torchtitan_lite.config.schema import to_dict, to_toml

__all__ = [
    "Config",
    "ConfigError",
    "changed_settings",
    "check_config",
    "config_warnings",
    "help_for",
    "load_and_check",
    "load_config",
    "micro_batch_size",
    "num_schedule_steps",
    "num_stages",
    "num_warmup_steps",
    "resolve",
    "save_config",
    "to_dict",
    "to_toml",
    "validation_seq_len",
]

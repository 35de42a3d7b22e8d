"""The configuration: every option there is, where its value comes from, and what must hold.

    keys.py       the dataclasses: the only source of keys, types, defaults and help
    schema.py     the keys as a flat list
    values.py     text or TOML -> a value of the right type; bounds.py: within its bounds
    load.py       defaults < TOML file < command line; foreign.py: keys that are refused by name
    derived.py    numbers that follow from others, for checks and trainer alike
    checks.py     what must hold between keys, model and world; pipeline_checks.py, facts.py
    effects.py    warnings about what will not act as set
    text.py       the saved TOML and the help

Read in this order. Nothing here imports torch: help and mistakes are told at once.
"""

from __future__ import annotations

from torchtitan_lite.config.checks import check_config, load_and_check
from torchtitan_lite.config.derived import (
    global_batch_size,
    num_accumulation_steps,
    num_microbatches,
    num_schedule_steps,
    num_stages,
    num_warmup_steps,
    resolve,
    stages_per_rank,
    validation_seq_len,
)
from torchtitan_lite.config.effects import config_warnings
from torchtitan_lite.config.facts import ModelShape, Problem
from torchtitan_lite.config.keys import Config, ConfigError
from torchtitan_lite.config.load import help_for, load_config
from torchtitan_lite.config.schema import to_dict
from torchtitan_lite.config.text import help_text, to_toml

__all__ = [
    "Config",
    "ConfigError",
    "ModelShape",
    "Problem",
    "check_config",
    "config_warnings",
    "global_batch_size",
    "help_for",
    "help_text",
    "load_and_check",
    "load_config",
    "num_accumulation_steps",
    "num_microbatches",
    "num_schedule_steps",
    "num_stages",
    "num_warmup_steps",
    "resolve",
    "stages_per_rank",
    "to_dict",
    "to_toml",
    "validation_seq_len",
]

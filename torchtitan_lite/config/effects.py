"""Warnings: what the user set and what will not act as set.

`ACTS` names, for the keys that act only together with another, when they act. A key that the user
asked for (Config.user_set) and that does not act is one warning.

Proven in tests/config/test_effects.py: each row warns, and is silent when its condition holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from torchtitan_lite.config.derived import (
    num_schedule_steps,
    num_warmup_steps,
    validation_seq_len,
)
from torchtitan_lite.config.facts import ModelShape
from torchtitan_lite.config.keys import Config
from torchtitan_lite.config.load import problem_line
from torchtitan_lite.config.schema import all_keys, get_value


class Acts(NamedTuple):
    """Keys (shell patterns), when they act, and the words for when they do not."""

    keys: tuple[str, ...]
    acts: Callable[[Config], bool]
    otherwise: str


PP = "parallelism.pipeline_parallel"
READ_AS_TEXT = ("auto", "text", "jsonl", "hf")
WITH_COLUMNS = ("auto", "jsonl", "hf")

ACTS: tuple[Acts, ...] = (
    Acts(
        (f"{PP}_schedule", f"{PP}_microbatch_size", f"{PP}_layers_per_stage", "*.module_fqns_*"),
        lambda c: c.parallelism.pipeline_parallel_degree > 1,
        "parallelism.pipeline_parallel_degree is 1",
    ),
    Acts(
        (f"{PP}_layers_per_stage",),
        lambda c: c.parallelism.module_fqns_per_model_part is None,
        "parallelism.module_fqns_per_model_part says what each stage holds",
    ),
    Acts(
        ("parallelism.enable_sequence_parallel", "parallelism.disable_loss_parallel"),
        lambda c: c.parallelism.tensor_parallel_degree > 1,
        "parallelism.tensor_parallel_degree is 1",
    ),
    Acts(("parallelism.zero_stage",), lambda c: _zero_stage_acts(c), "there is one rank to share"),
    Acts(
        ("optimizer.momentum",),
        lambda c: c.optimizer.name == "SGD",
        "optimizer.name is not SGD",
    ),
    Acts(
        ("optimizer.beta1", "optimizer.beta2", "optimizer.eps"),
        lambda c: c.optimizer.name == "AdamW",
        "optimizer.name is not AdamW",
    ),
    Acts(
        ("optimizer.no_decay",),
        lambda c: c.optimizer.weight_decay > 0,
        "optimizer.weight_decay is 0",
    ),
    Acts(
        ("lr_scheduler.decay_ratio", "lr_scheduler.min_lr_factor"),
        lambda c: c.lr_scheduler.decay_type != "constant",
        "lr_scheduler.decay_type is constant",
    ),
    Acts(
        ("training.dataset_path",),
        lambda c: c.training.dataset != "synthetic",
        "training.dataset is synthetic",
    ),
    Acts(
        ("training.token_cache",),
        lambda c: any(kind in READ_AS_TEXT for kind in _datasets(c)),
        "no dataset is text to be tokenised",
    ),
    Acts(
        ("training.dataset_text_column",),
        lambda c: any(kind in WITH_COLUMNS for kind in _datasets(c)),
        "no dataset has columns",
    ),
    Acts(
        ("training.dataloader.prefetch_factor",),
        lambda c: c.training.dataloader.num_workers > 0,
        "training.dataloader.num_workers is 0",
    ),
    Acts(
        ("checkpoint.[!e]*", "checkpoint.export_dtype", "checkpoint.exclude_from_loading"),
        lambda c: c.checkpoint.enable,
        "checkpoint.enable is false",
    ),
    Acts(
        ("checkpoint.initial_load_model_only",),
        lambda c: c.checkpoint.initial_load_path != "",
        "checkpoint.initial_load_path is not set",
    ),
    Acts(
        ("checkpoint.export_dtype",),
        lambda c: c.checkpoint.last_save_model_only,
        "checkpoint.last_save_model_only is false",
    ),
    Acts(
        ("activation_checkpoint.selective_ac_option",),
        lambda c: c.activation_checkpoint.mode == "selective",
        "activation_checkpoint.mode is not selective",
    ),
    Acts(
        ("metrics.save_tb_folder",),
        lambda c: c.metrics.enable_tensorboard,
        "metrics.enable_tensorboard is false",
    ),
    Acts(
        ("profiling.save_traces_folder", "profiling.profiler_*"),
        lambda c: c.profiling.enable_profiling,
        "profiling.enable_profiling is false",
    ),
    Acts(
        ("profiling.save_memory_snapshot_folder",),
        lambda c: c.profiling.enable_memory_snapshot,
        "profiling.enable_memory_snapshot is false",
    ),
    Acts(
        ("profiling.profile_freq",),
        lambda c: c.profiling.enable_profiling or c.profiling.enable_memory_snapshot,
        "neither traces nor memory snapshots are enabled",
    ),
    Acts(
        ("validation.[!e]*",),
        lambda c: c.validation.enable,
        "validation.enable is false",
    ),
    Acts(
        ("validation.dataset_path",),
        lambda c: c.validation.dataset != "synthetic",
        "validation.dataset is synthetic",
    ),
)


def config_warnings(config: Config, model: ModelShape | None = None) -> list[str]:
    """One line for each thing that will not act as set; `config` is resolved, `model` its own."""
    ineffective = [
        problem_line(
            name,
            get_value(config, name),
            config.user_set[name],
            reason="has no effect",
            fix=row.otherwise,
        )
        for name in all_keys()
        if name in config.user_set and (row := _silenced_by(config, name)) is not None
    ]
    return [*ineffective, *_schedule_warnings(config), *_length_warnings(config, model)]


def _silenced_by(config: Config, name: str) -> Acts | None:
    for row in ACTS:
        if any(fnmatchcase(name, key) for key in row.keys) and not row.acts(config):
            return row
    return None


def _zero_stage_acts(config: Config) -> bool:
    parallelism = config.parallelism
    if parallelism.zero_stage == 0:
        return parallelism.data_parallel_replicate_degree > 1
    return parallelism.data_parallel_shard_degree != 1


def _datasets(config: Config) -> list[str]:
    validated: list[str] = [config.validation.dataset] if config.validation.enable else []
    return [config.training.dataset, *validated]


def _schedule_warnings(config: Config) -> Iterator[str]:
    schedule, total = config.lr_scheduler, num_schedule_steps(config)
    warmup = num_warmup_steps(config)

    def line(name: str, reason: str, fix: str) -> str:
        source = config.sources.get(name, "the defaults")
        return problem_line(name, get_value(config, name), source, reason=reason, fix=fix)

    if warmup < schedule.warmup_steps:
        yield line(
            "lr_scheduler.warmup_steps", f"the schedule has {total} steps", f"cut to {total}"
        )
    if schedule.decay_type == "constant":
        return
    if schedule.decay_ratio is not None and round(total * schedule.decay_ratio) > total - warmup:
        yield line(
            "lr_scheduler.decay_ratio",
            f"{warmup} of {total} steps are warm-up",
            f"the decay is cut to the other {total - warmup}",
        )
    if total < config.training.steps:
        yield line(
            "lr_scheduler.total_steps",
            f"training.steps is {config.training.steps}",
            f"the steps after {total} train at {schedule.min_lr_factor} x optimizer.lr",
        )


def _length_warnings(config: Config, model: ModelShape | None) -> Iterator[str]:
    if model is None:
        return
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable and config.validation.seq_len != -1:
        lengths["validation.seq_len"] = validation_seq_len(config)
    for name, length in lengths.items():
        if length > model.max_position_embeddings:
            yield problem_line(
                name,
                length,
                config.sources.get(name, "the defaults"),
                reason=f"longer than the model's max_position_embeddings "
                f"{model.max_position_embeddings}",
                fix="positions beyond it are extrapolated",
            )

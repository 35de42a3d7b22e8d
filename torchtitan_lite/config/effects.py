"""Warnings: what the user set and what will not act as set.

A row of `SILENT` names keys by shell pattern, and the values of other keys under which they do
nothing. A key that the user asked for (Config.user_set) and that does nothing is one warning.

Proven in tests/config/test_effects.py: each row warns, and is silent when its condition holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from torchtitan_lite.config.derived import (
    SPLIT_BACKWARD_SCHEDULES,
    ZERO_STAGE,
    num_schedule_steps,
    num_warmup_steps,
)
from torchtitan_lite.config.facts import (
    BY_HAND,
    CONTEXT,
    LAYERS_PER_STAGE,
    PIPELINE,
    REPLICATE,
    SCHEDULE,
    SHARD,
    TENSOR,
    ModelShape,
    row_lengths,
)
from torchtitan_lite.config.keys import Config
from torchtitan_lite.config.schema import all_keys, get_value, told, toml_value

OFF = (False,)
AC_MODE = "activation_checkpoint.mode"
NO_TEXT = ("tokens", "synthetic")
TRACES, SNAPSHOTS = "profiling.enable_profiling", "profiling.enable_memory_snapshot"

SILENT: tuple[tuple[str, dict[str, tuple[Any, ...]]], ...] = (
    ("parallelism.pipeline_parallel_[!d]*", {PIPELINE: (1,)}),
    (BY_HAND, {PIPELINE: (1,)}),
    (
        "training.mixed_precision_reduce",  # there is nothing to reduce over
        {REPLICATE: (1,), SHARD: (1,), CONTEXT: (1,), "training.enable_cpu_offload": OFF},
    ),
    ("parallelism.context_parallel_[!d]*", {CONTEXT: (1,)}),
    ("parallelism.enable_sequence_parallel", {TENSOR: (1,)}),
    ("parallelism.disable_loss_parallel", {TENSOR: (1,)}),
    ("moe.aux_loss_form", {"moe.aux_loss_weight": (0,)}),
    ("optimizer.momentum", {"optimizer.name": ("AdamW",)}),
    ("optimizer.beta?", {"optimizer.name": ("SGD",)}),
    ("optimizer.eps", {"optimizer.name": ("SGD",)}),
    ("optimizer.state_dtype", {"optimizer.name": ("SGD",)}),
    (
        "optimizer.implementation",
        {"optimizer.state_dtype": ("bfloat16",), "optimizer.name": ("AdamW",)},
    ),
    ("optimizer.no_decay", {"optimizer.weight_decay": (0,)}),
    ("lr_scheduler.decay_ratio", {"lr_scheduler.decay_type": ("constant",)}),
    ("lr_scheduler.min_lr_factor", {"lr_scheduler.decay_type": ("constant",)}),
    ("training.dataset_path", {"training.dataset": ("synthetic",)}),
    ("training.token_cache", {"training.dataset": NO_TEXT, "validation.enable": OFF}),
    ("*.dataset_text_column", {"training.dataset": ("text", *NO_TEXT), "validation.enable": OFF}),
    ("training.packing", {"training.dataset": ("synthetic",), "validation.enable": OFF}),
    (
        "training.packing",
        {"training.dataset": ("synthetic",), "validation.dataset": ("synthetic",)},
    ),
    ("training.dataloader.prefetch_factor", {"training.dataloader.num_workers": (0,)}),
    ("checkpoint.*", {"checkpoint.enable": OFF}),
    ("checkpoint.initial_load_*", {"checkpoint.initial_load_path": ("",)}),
    (
        "checkpoint.export_dtype",
        {"checkpoint.last_save_model_only": OFF, "checkpoint.last_save_in_hf": OFF},
    ),
    ("model.flavor", {"model.name": ("auto",)}),
    ("*.selective_ac_option", {AC_MODE: ("none", "full", "memory_budget")}),
    ("*.memory_budget", {AC_MODE: ("none", "full", "selective")}),
    ("compile.*", {"compile.enable": OFF}),
    ("metrics.save_tb_folder", {"metrics.enable_tensorboard": OFF}),
    ("profiling.save_traces_folder", {TRACES: OFF}),
    ("profiling.profiler_*", {TRACES: OFF}),
    ("profiling.save_memory_snapshot_folder", {SNAPSHOTS: OFF}),
    ("profiling.profile_freq", {TRACES: OFF, SNAPSHOTS: OFF}),
    ("validation.*", {"validation.enable": OFF}),
    ("validation.dataset_path", {"validation.dataset": ("synthetic",)}),
    ("quantize.linear.float8.*", {"quantize.linear.float8.recipe_name": ("",)}),
    ("*.amax_history_length", {"quantize.linear.float8.scaling": ("dynamic",)}),
    ("*.enable_fsdp_float8_all_gather", {SHARD: (1,), CONTEXT: (1,)}),
    ("*.enable_fsdp_float8_all_gather", {ZERO_STAGE: (0,)}),
    ("*.enable_tp_float8_all_gather", {TENSOR: (1,)}),
    ("*.enable_tp_float8_all_gather", {"parallelism.enable_sequence_parallel": OFF}),
)


def config_warnings(config: Config, model: ModelShape | None = None) -> list[str]:
    """One line for each thing that will not act as set; `config` is resolved, `model` its own."""
    found = [*_silent(config), *_parallelism(config, model), *_schedule(config)]
    optimizer, moments = config.optimizer, "optimizer.state_dtype"
    in_fp32 = optimizer.name == "AdamW" and optimizer.state_dtype == "float32"
    if in_fp32 and config.training.dtype == "bfloat16" and moments in config.user_set:
        reason = 'training.dtype is "bfloat16", and moments are stored as parameters are'
        found.append((moments, "has no effect", reason))
    if model is not None:
        found += [*_lengths(config, model), *_experts(config, model)]
    return [told(config, (name,), reason, fix).line for name, reason, fix in found]


def _silent(config: Config) -> Iterator[tuple[str, str, str]]:
    for name in (name for name in all_keys() if name in config.user_set):
        for pattern, others in SILENT:
            values = {other: get_value(config, other) for other in others}
            silent = all(values[other] in silencing for other, silencing in others.items())
            if silent and name not in others and fnmatchcase(name, pattern):
                why = " and ".join(f"{other} is {toml_value(values[other])}" for other in others)
                yield name, "has no effect", why
                break


def _parallelism(config: Config, model: ModelShape | None) -> Iterator[tuple[str, str, str]]:
    parallelism, asked = config.parallelism, config.user_set
    pipelined = parallelism.pipeline_parallel_degree > 1
    if pipelined and LAYERS_PER_STAGE in asked and BY_HAND in asked:
        yield LAYERS_PER_STAGE, "has no effect", f"{BY_HAND} says what each stage holds"
    split = parallelism.pipeline_parallel_schedule in SPLIT_BACKWARD_SCHEDULES
    if pipelined and split and config.compile.enable and "model" in config.compile.components:
        once = "1F1B and Interleaved1F1B run it once"
        yield SCHEDULE, "splits the backward, which a compiled layer then runs twice", once
    replicas = parallelism.zero_stage == 0 and parallelism.data_parallel_replicate_degree > 1
    sharing = parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
    if model is not None and model.num_experts:  # tensor-parallel ranks share those, too
        sharing *= parallelism.tensor_parallel_degree
    if sharing == 1 and not replicas and ZERO_STAGE in asked:
        yield ZERO_STAGE, "has no effect", "there is one rank to share"
    elif parallelism.zero_stage == 3 and pipelined:
        yield ZERO_STAGE, "gathers the parameters anew for every micro-batch", "2 keeps them"


def _schedule(config: Config) -> Iterator[tuple[str, str, str]]:
    schedule, total = config.lr_scheduler, num_schedule_steps(config)
    warmup = num_warmup_steps(config)
    if warmup < schedule.warmup_steps:
        yield "lr_scheduler.warmup_steps", f"the schedule has {total} steps", f"cut to {total}"
    if schedule.decay_type == "constant":
        return
    rest = total - warmup
    decay = rest if schedule.decay_ratio is None else round(total * schedule.decay_ratio)
    if decay > rest:
        reason = f"{warmup} of {total} steps are warm-up"
        yield "lr_scheduler.decay_ratio", reason, f"the decay is cut to the other {rest}"
    if total < config.training.steps and min(decay, rest) > 0:
        fix = f"the steps after {total} train at {schedule.min_lr_factor} x optimizer.lr"
        yield "lr_scheduler.total_steps", f"training.steps is {config.training.steps}", fix


def _experts(config: Config, model: ModelShape) -> Iterator[tuple[str, str, str]]:
    for name in (name for name in all_keys() if name in config.user_set):
        if name.startswith("moe.") and not model.num_experts:
            yield name, "has no effect", "the model has no experts"
        elif name == "moe.bias_update_speed" and not model.router_bias:
            yield name, "has no effect", "the model's routers have no bias"


def _lengths(config: Config, model: ModelShape) -> Iterator[tuple[str, str, str]]:
    if model.layer_type != "attention":
        return
    longest, then = model.max_position_embeddings, "positions beyond it are extrapolated"
    if model.rope_follows_length:
        then = "the base of its rotation follows the length"
    for name, length in row_lengths(config).items():
        if length > longest:
            yield name, f"longer than the model's max_position_embeddings {longest}", then

"""Keys of torchtitan's TOML files that are not keys here: each is refused by name, with the fix.

A value that asks for nothing (compile.enable = false) is accepted, so that a file written for
torchtitan runs when it uses only what exists here. `RENAMED` holds the older names of keys that
exist; `ABSENT` holds what does not, by shell pattern, with the values that ask for nothing.

Proven in tests/config/test_foreign.py: each row is refused, and accepted with each neutral value.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, NamedTuple


class Absent(NamedTuple):
    """The values that ask for nothing, and what to do instead of any other."""

    neutral: tuple[Any, ...]
    instead: str


RENAMED: dict[str, str] = {
    "job.print_args": "job.print_config",
    "model.tokenizer_path": "model.hf_assets_path",
    "training.batch_size": "training.local_batch_size",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "parallelism.pipeline_parallel_split_points": "parallelism.module_fqns_per_model_part",
}

OFF: tuple[Any, ...] = (False, "", None, [], {})

NO_COMPILE = "this version has no torch.compile; remove the key"
NO_FLOAT8 = "this version has no quantized training; remove the key"
NO_CONTEXT = "this version has no context parallelism; remove the key"
NO_EXPERTS = "this version has no experts and no expert parallelism; remove the key"
NO_HUGGING_FACE = (
    "this version neither reads nor writes Hugging Face weights; "
    "start from a saved step with checkpoint.initial_load_path"
)
NO_DEBUG = "this version has no such diagnostic; remove the key"
NO_EXTENSION = "this version imports no code by configuration; add a field to a section instead"
BALANCED = (
    "this version balances the stages by cost, the ends included; "
    "to cut by hand, use parallelism.module_fqns_per_model_part"
)

ABSENT: dict[str, Absent] = {
    # Extension points
    "job.custom_config_module": Absent(OFF, NO_EXTENSION),
    "experimental.*": Absent(OFF, NO_EXTENSION),
    "model.converters": Absent(OFF, NO_FLOAT8),
    "model.print_after_conversion": Absent(OFF, NO_FLOAT8),
    # Training
    "training.compile": Absent(OFF, NO_COMPILE),
    "training.gc_debug": Absent(OFF, NO_DEBUG),
    "*.dataloader.persistent_workers": Absent(
        (False, True), "this version keeps its workers alive for the whole run; remove the key"
    ),
    "*.dataloader.pin_memory": Absent(
        (False, True), "this version pins memory wherever the device gains by it; remove the key"
    ),
    "validation.dataloader.*": Absent(
        (*OFF, 0), "this version validates with the workers of training.dataloader; remove the key"
    ),
    "optimizer.early_step_in_backward": Absent(
        OFF, "this version steps after backward, as clipping needs the whole norm; remove the key"
    ),
    "metrics.save_for_all_ranks": Absent(
        OFF, "this version writes metrics from one rank, reduced over all; remove the key"
    ),
    # Parallelism
    "parallelism.enable_async_tensor_parallel": Absent(
        OFF, "this version has no asynchronous tensor parallelism; remove the key"
    ),
    "parallelism.pipeline_parallel_schedule_csv": Absent(
        OFF,
        "this version reads no schedule from a file; use parallelism.pipeline_parallel_schedule",
    ),
    "parallelism.pipeline_parallel_first_stage_less_layers": Absent((1,), BALANCED),
    "parallelism.pipeline_parallel_last_stage_less_layers": Absent((1,), BALANCED),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Absent((True, False), NO_EXPERTS),
    "parallelism.context_parallel_load_balancer": Absent((*OFF, "headtail"), NO_CONTEXT),
    "parallelism.context_parallel_rotate_method": Absent((*OFF, "allgather"), NO_CONTEXT),
    "parallelism.expert_parallel_degree": Absent((1,), NO_EXPERTS),
    "parallelism.expert_tensor_parallel_degree": Absent((1,), NO_EXPERTS),
    "parallelism.expert_parallel_comm_backend": Absent(("standard",), NO_EXPERTS),
    # Checkpoints
    "checkpoint.initial_load_in_hf": Absent(OFF, NO_HUGGING_FACE),
    "checkpoint.initial_load_in_hf_quantized": Absent(OFF, NO_HUGGING_FACE),
    "checkpoint.last_save_in_hf": Absent(OFF, NO_HUGGING_FACE),
    "checkpoint.enable_first_step_checkpoint": Absent(
        OFF, "this version saves every checkpoint.interval steps; set that to 1 for a trial"
    ),
    "checkpoint.create_seed_checkpoint": Absent(
        OFF, "the same debug.seed gives the same weights on any mesh; remove the key"
    ),
    "checkpoint.load_only": Absent(
        OFF, "to load without saving over it, use checkpoint.initial_load_path"
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": Absent(
        (True, False), "this version has no torchft; remove the key"
    ),
    # Activation checkpointing
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Absent(
        ([], ["moe.router.gate"]), NO_EXPERTS
    ),
    "activation_checkpoint.early_stop": Absent(
        OFF, "this version leaves early stopping to torch; remove the key"
    ),
    "activation_checkpoint.memory_budget": Absent(
        (0.5,), "this version has no memory budget; use activation_checkpoint.mode"
    ),
    "activation_checkpoint.visualize_memory_budget_pareto": Absent(
        OFF, "this version has no memory budget; remove the key"
    ),
    "activation_checkpoint.preserve_rng_state": Absent(
        (True, False), "no layer here draws random numbers in forward; remove the key"
    ),
    "activation_checkpoint.determinism_check": Absent(("default",), NO_DEBUG),
    "activation_checkpoint.debug": Absent(OFF, NO_DEBUG),
    # Sections that do not exist here
    "compile.enable": Absent(OFF, NO_COMPILE),
    "compile.components": Absent(([], ["model", "loss"]), NO_COMPILE),
    "compile.backend": Absent(("inductor",), NO_COMPILE),
    "quantize.*": Absent((*OFF, ["output"]), NO_FLOAT8),
    "float8.*": Absent(OFF, NO_FLOAT8),
    "mx.*": Absent(OFF, NO_FLOAT8),
    "comm.trace_buf_size": Absent((0, 20000), NO_DEBUG),
    "comm.save_traces_folder": Absent(("comm_traces",), NO_DEBUG),
    "comm.save_traces_file_prefix": Absent(("rank_",), NO_DEBUG),
    "comm.mode": Absent(
        ("default",), "this version has no dry run in a fake world; remove the key"
    ),
    "memory_estimation.*": Absent(OFF, "this version estimates no memory; remove the key"),
    "fault_tolerance.*": Absent(OFF, "this version has no torchft; remove the key"),
    # Debugging
    "debug.deterministic_warn_only": Absent(
        OFF, "use debug.deterministic = true or remove the key"
    ),
    "debug.moe_force_load_balance": Absent(OFF, NO_EXPERTS),
}


def absent(name: str) -> Absent | None:
    """The row of a key that torchtitan has and this version has not; None for any other key."""
    for pattern, row in ABSENT.items():
        if fnmatchcase(name, pattern):
            return row
    return None


def asks_for_nothing(row: Absent, value: Any) -> bool:
    """Whether a value is neutral. A boolean is no number here: 1 is not true."""
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in row.neutral
    )


def is_absent_table(name: str) -> bool:
    """Whether a dotted table name holds nothing but absent keys, as `quantize.linear` does."""
    return any(
        pattern.startswith(name + ".") or fnmatchcase(f"{name}.x", pattern) for pattern in ABSENT
    )

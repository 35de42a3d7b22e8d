"""Keys of torchtitan's TOML files that are not keys here: each is refused by name, with the fix.

A value that asks for nothing (training.compile = false) is accepted, so that a file written for
torchtitan runs when it uses only what exists here. A key that another name replaced is refused
whatever its value. Proven in tests/config/test_foreign.py, row by row.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, NamedTuple


class Foreign(NamedTuple):
    """Keys by shell pattern, the values that ask for nothing, what to do instead of any other."""

    keys: str
    neutral: tuple[Any, ...]
    instead: str


OFF: tuple[Any, ...] = (False, "", [], {})
BOTH: tuple[Any, ...] = (False, True)
RECIPE = "quantize.linear.float8.recipe_name"
NO_FLOAT8 = f"of quantized training there is {RECIPE} alone; remove the key"
EXPERTS_WHOLE = "an expert is never cut and its tokens go by all-to-all; remove the key"
NO_DEBUG = "this version has no such diagnostic; remove the key"
NO_TORCHFT = "this version has no torchft; remove the key"
NO_EXTENSION = "this version imports no code by configuration; add a field to a section instead"
BUILT_IN = "this version decides it by itself; remove the key"
NO_QUANTIZED = "no quantized weights are read in this version; convert them first"
BALANCED = "stages are balanced by cost; to cut by hand: parallelism.module_fqns_per_model_part"
ONE_WRITER = "this version writes metrics from one rank, reduced over all; remove the key"
SAME_WEIGHTS = "the same debug.seed gives the same weights on any mesh; remove the key"

ROWS: tuple[Foreign, ...] = (
    # Renamed
    Foreign("job.print_args", (), "use job.print_config"),
    Foreign("model.tokenizer_path", (), "use model.hf_assets_path"),
    Foreign("training.batch_size", (), "use training.local_batch_size"),
    Foreign("training.seed", (), "use debug.seed"),
    Foreign("training.deterministic", (), "use debug.deterministic"),
    Foreign("lr_scheduler.lr_min", (), "use lr_scheduler.min_lr_factor"),
    Foreign("checkpoint.enable_checkpoint", (), "use checkpoint.enable"),
    Foreign("checkpoint.last_save_model_weights_only", (), "use checkpoint.last_save_model_only"),
    Foreign("*.pipeline_parallel_split_points", (), "use parallelism.module_fqns_per_model_part"),
    # Training
    Foreign("job.custom_config_module", OFF, NO_EXTENSION),
    Foreign("experimental*", OFF, NO_EXTENSION),
    Foreign("training.compile*", OFF, "use compile.enable"),
    Foreign("model.*conver*", OFF, f"set {RECIPE}"),
    Foreign("quantize.linear.float8.precompute*", OFF, "no scale is made ahead; remove the key"),
    Foreign("quantize.linear.mx.*", (*OFF, ["output"]), NO_FLOAT8),
    Foreign("quantize.grouped_mm.mx*", OFF, NO_FLOAT8),
    Foreign("float8*", OFF, "use the keys of quantize.linear.float8"),
    Foreign("mx.*", OFF, NO_FLOAT8),
    Foreign("*.dataloader.persistent_workers", BOTH, BUILT_IN),
    Foreign("*.dataloader.pin_memory", BOTH, BUILT_IN),
    Foreign("validation.dataloader*", (*OFF, 0), "use the workers of training.dataloader"),
    Foreign("optimizer.early_step_in_backward", OFF, "clipping needs the whole norm; remove it"),
    Foreign("metrics.save_for_all_ranks", OFF, ONE_WRITER),
    # Parallelism
    Foreign("*.enable_async_tensor_parallel", OFF, "not in this version; remove the key"),
    Foreign("*.pipeline_parallel_schedule_csv", OFF, "use parallelism.pipeline_parallel_schedule"),
    Foreign("parallelism.pipeline_parallel_*_stage_less_layers", (1,), BALANCED),
    Foreign("parallelism.pipeline_parallel_expert_parallel_overlap", BOTH, BUILT_IN),
    Foreign("parallelism.expert_tensor_parallel_degree", (1,), EXPERTS_WHOLE),
    Foreign("parallelism.expert_parallel_comm_backend", ("standard",), EXPERTS_WHOLE),
    # Checkpoints
    Foreign("checkpoint.*_in_hf_*", OFF, NO_QUANTIZED),
    Foreign("checkpoint.enable_first_step_checkpoint", OFF, "set checkpoint.interval to 1"),
    Foreign("checkpoint.create_seed_checkpoint", OFF, SAME_WEIGHTS),
    Foreign("checkpoint.load_only", OFF, "use checkpoint.initial_load_path"),
    Foreign("checkpoint.enable_ft_dataloader_checkpoints", BOTH, NO_TORCHFT),
    Foreign("fault_tolerance*", OFF, NO_TORCHFT),
    # Activation checkpointing
    Foreign("activation_checkpoint.per_op_sac_*", ([], ["moe.router.gate"]), BUILT_IN),
    Foreign("activation_checkpoint.early_stop", OFF, BUILT_IN),
    Foreign("activation_checkpoint.preserve_rng_state", BOTH, BUILT_IN),
    Foreign("activation_checkpoint.visualize_memory_budget_pareto", OFF, NO_DEBUG),
    Foreign("activation_checkpoint.determinism_check", ("default",), NO_DEBUG),
    Foreign("activation_checkpoint.debug", OFF, NO_DEBUG),
    # Diagnostics
    Foreign("training.gc_debug", OFF, NO_DEBUG),
    Foreign("comm.trace_buf_size", (0, 20000), NO_DEBUG),
    Foreign("comm.save_traces_*", ("comm_traces", "rank_"), NO_DEBUG),
    Foreign("comm.mode", ("default",), NO_DEBUG),
    Foreign("memory_estimation*", OFF, NO_DEBUG),
    Foreign("debug.deterministic_warn_only", OFF, "use debug.deterministic"),
    Foreign("debug.moe_force_load_balance", OFF, NO_DEBUG),
)


def foreign_row(name: str) -> Foreign | None:
    """The row of a key that torchtitan has and this project has not; None for any other key."""
    return next((row for row in ROWS if fnmatchcase(name, row.keys)), None)

"""Keys of torchtitan that are not keys here: refused by name, unless they ask for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.config import ConfigError, load_config
from torchtitan_lite.config.foreign import ROWS, Foreign, foreign_row
from torchtitan_lite.config.schema import all_keys, toml_value

LLAMA3_8B = """
[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"
[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100
[metrics]
log_freq = 10
enable_tensorboard = true
save_tb_folder = "tb"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = []
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1
expert_parallel_degree = 1
[checkpoint]
enable = false
folder = "checkpoint"
interval = 500
last_save_model_only = true
export_dtype = "float32"
async_mode = "disabled"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = false
components = ["model", "loss"]
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]
[validation]
enable = false
freq = 500
steps = 1200
[experimental]
"""

# Every key of v0.2.2 that is not one of ours, and the older names.
ABSENT = """
activation_checkpoint: early_stop visualize_memory_budget_pareto preserve_rng_state
activation_checkpoint: determinism_check debug per_op_sac_force_recompute_mm_shapes_by_fqns
checkpoint: initial_load_in_hf_quantized load_only
checkpoint: enable_first_step_checkpoint create_seed_checkpoint enable_ft_dataloader_checkpoints
comm: trace_buf_size save_traces_folder save_traces_file_prefix mode
debug: deterministic_warn_only moe_force_load_balance
experimental: custom_import custom_args_module
fault_tolerance: enable process_group process_group_timeout_ms replica_id group_size
float8: recipe_name
job: custom_config_module
memory_estimation: enable disable_fake_mode
metrics: save_for_all_ranks
model: converters print_after_conversion
mx: recipe_name
optimizer: early_step_in_backward
parallelism: enable_async_tensor_parallel pipeline_parallel_schedule_csv
parallelism: pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers
parallelism: pipeline_parallel_expert_parallel_overlap expert_tensor_parallel_degree
parallelism: expert_parallel_comm_backend
quantize.grouped_mm.mx: recipe_name fqns
quantize.linear.float8: precompute_float8_dynamic_scale_for_fsdp
quantize.linear.mx: mxfp8_dim1_cast_kernel_choice
training: compile gc_debug
training.dataloader: persistent_workers pin_memory
validation.dataloader: num_workers pin_memory
"""


def _refusal(name: str, value: Any, folder: Path) -> list[str]:
    table, _, key = name.rpartition(".")
    path = folder / "old.toml"
    path.write_text(f"[{table}]\n{key} = {toml_value(value)}\n")
    try:
        load_config(["--job.config_file", str(path)])
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _names() -> list[str]:
    lines = [line.split(": ") for line in ABSENT.strip().splitlines()]
    return [f"{table}.{name}" for table, names in lines for name in names.split()]


@pytest.mark.parametrize("name", _names())
def test_each_key_of_torchtitan_is_refused_and_its_neutral_values_are_taken(
    name: str, tmp_path: Path
) -> None:
    row = foreign_row(name)
    assert row is not None
    (line,) = _refusal(name, "some other value", tmp_path)
    assert line.startswith(f"{name} = ")
    assert line.endswith(f": not in this project; {row.instead}")
    for neutral in row.neutral:
        assert _refusal(name, neutral, tmp_path) == []


@pytest.mark.parametrize("row", [row for row in ROWS if not row.neutral], ids=lambda row: row.keys)
def test_each_renamed_key_names_its_successor_whatever_its_value(
    row: Foreign, tmp_path: Path
) -> None:
    successor = row.instead.removeprefix("use ")
    assert successor in all_keys()
    name = row.keys.replace("*", "parallelism")
    for value in (1, False, ""):
        (line,) = _refusal(name, value, tmp_path)
        assert line.endswith(f"use {successor}")


def test_no_row_hides_a_key_that_exists_and_each_row_is_about_some_key() -> None:
    assert not [name for name in all_keys() if foreign_row(name)]
    used = [foreign_row(name) for name in _names()]
    assert [row.keys for row in ROWS if row.neutral and row not in used] == []


@pytest.mark.parametrize(
    "argv",
    [
        ["--training.compile", "false"],
        ["--training.compile=False"],
        ["--model.converters", ""],
        ["--parallelism.expert_tensor_parallel_degree", "1"],
        ["--parallelism.expert-tensor-parallel-degree=1"],
    ],
)
def test_on_the_command_line_too_a_neutral_value_is_taken(argv: list[str]) -> None:
    assert load_config(argv).sources == {}


@pytest.mark.parametrize(
    "argv",
    [
        ["--training.compile"],
        ["--training.compile=true"],
        ["--parallelism.expert_tensor_parallel_degree", "2"],
        ["--parallelism.expert_tensor_parallel_degree", "true"],
        ["--model.converters", "quantize.linear.float8"],
        ["--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"],
    ],
)
def test_on_the_command_line_too_a_value_that_asks_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="not in this project; "):
        load_config(argv)


def test_a_file_written_for_torchtitan_loads_if_it_asks_for_what_exists(tmp_path: Path) -> None:
    path = tmp_path / "llama3_8b.toml"
    path.write_text(LLAMA3_8B)
    config = load_config(["--job.config_file", str(path)])
    assert (config.model.flavor, config.training.seq_len, config.optimizer.lr) == ("8B", 8192, 3e-4)

"""Keys of torchtitan that are not keys here: refused by name, unless they ask for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.config import ConfigError, load_config
from torchtitan_lite.config.foreign import ABSENT, RENAMED
from torchtitan_lite.config.schema import all_keys
from torchtitan_lite.config.text import toml_value

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


@pytest.mark.parametrize("pattern", ABSENT)
def test_each_row_is_refused_by_name_and_its_neutral_values_are_taken(
    pattern: str, tmp_path: Path
) -> None:
    name = pattern.replace("*.dataloader", "training.dataloader").replace("*", "linear.anything")
    row = ABSENT[pattern]
    (line,) = _refusal(name, "some other value", tmp_path)
    assert line.startswith(f"{name} = ") and line.endswith(row.instead)
    for neutral in row.neutral:
        if neutral is not None:
            assert _refusal(name, neutral, tmp_path) == []


@pytest.mark.parametrize("old", RENAMED)
def test_each_renamed_key_names_its_successor(old: str, tmp_path: Path) -> None:
    assert RENAMED[old] in all_keys()
    (line,) = _refusal(old, 1, tmp_path)
    assert line.endswith(f"renamed; use {RENAMED[old]}")


def test_no_row_hides_a_key_that_exists() -> None:
    from torchtitan_lite.config.foreign import absent

    assert not [name for name in all_keys() if absent(name) or name in RENAMED]


@pytest.mark.parametrize(
    "argv",
    [
        ["--compile.enable", "false"],
        ["--compile.no_enable"],
        ["--compile.enable=False"],
        ["--compile.components=model,loss"],
        ["--compile.components", "[]"],
        ["--model.converters", ""],
        ["--parallelism.expert_parallel_degree", "1"],
        ["--parallelism.expert-parallel-degree=1"],
        ["--parallelism.context_parallel_load_balancer", "none"],
        ["--quantize.linear.float8.no_emulate"],
    ],
)
def test_on_the_command_line_too_a_neutral_value_is_taken(argv: list[str]) -> None:
    assert load_config(argv).sources == {}


@pytest.mark.parametrize(
    "argv",
    [
        ["--compile.enable"],
        ["--compile.enable=true"],
        ["--parallelism.expert_parallel_degree", "2"],
        ["--parallelism.expert_parallel_degree", "true"],
        ["--model.converters", "quantize.linear.float8"],
        ["--quantize.linear.float8.recipe_name", "rowwise"],
    ],
)
def test_on_the_command_line_too_a_value_that_asks_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="not in this project; this version has no"):
        load_config(argv)


def test_a_file_written_for_torchtitan_loads_if_it_asks_for_what_exists(tmp_path: Path) -> None:
    path = tmp_path / "llama3_8b.toml"
    path.write_text(LLAMA3_8B)
    config = load_config(["--job.config_file", str(path)])
    assert (config.model.flavor, config.training.seq_len, config.optimizer.lr) == ("8B", 8192, 3e-4)

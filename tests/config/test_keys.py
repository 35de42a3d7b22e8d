"""The list of keys itself: frozen, explained, bounded."""

from __future__ import annotations

import math
import subprocess
import sys
import typing

import pytest

from tests.config.cases import problems
from torchtitan_lite.config import Config, load_config, to_dict
from torchtitan_lite.config.load import convert
from torchtitan_lite.config.schema import all_keys, get_value, meanings, sections, set_value

# A user's file may hold any of these. To add a key, add it here; one goes only together with a row
# in foreign.py that tells the key's users what to do instead.
FROZEN = """
job: config_file dump_folder description print_config save_config_file
model: name flavor hf_assets_path overrides attention_backend
training: seq_len local_batch_size global_batch_size steps max_norm norm_type dtype
training: mixed_precision_param mixed_precision_reduce dataset dataset_path dataset_text_column
training: token_cache document_mask packing enable_cpu_offload gc_freq max_skipped_steps
training.dataloader: num_workers prefetch_factor
loss: num_chunks z_loss_weight
moe: aux_loss_weight aux_loss_form z_loss_weight bias_update_speed kernel
optimizer: name lr beta1 beta2 eps weight_decay momentum implementation state_dtype no_decay
optimizer: lr_multipliers
lr_scheduler: warmup_steps total_steps decay_ratio decay_type min_lr_factor
parallelism: pipeline_parallel_degree pipeline_parallel_schedule pipeline_parallel_microbatch_size
parallelism: pipeline_parallel_layers_per_stage module_fqns_per_model_part
parallelism: data_parallel_replicate_degree data_parallel_shard_degree zero_stage
parallelism: fsdp_reshard_after_forward context_parallel_degree context_parallel_method
parallelism: context_parallel_load_balancer context_parallel_rotate_method tensor_parallel_degree
parallelism: enable_sequence_parallel disable_loss_parallel expert_parallel_degree
checkpoint: enable folder interval load_step keep_latest_k async_mode initial_load_path
checkpoint: initial_load_model_only initial_load_in_hf last_save_model_only last_save_in_hf
checkpoint: export_dtype exclude_from_loading
activation_checkpoint: mode selective_ac_option memory_budget
compile: enable components backend
metrics: log_freq enable_tensorboard save_tb_folder enable_wandb disable_color_printing
profiling: enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup
profiling: enable_memory_snapshot save_memory_snapshot_folder
comm: init_timeout_seconds train_timeout_seconds
debug: seed deterministic
validation: enable dataset dataset_path freq steps local_batch_size seq_len
quantize.linear.float8: recipe_name filter_fqns include_fqns round_scales_to_power_of_2
quantize.linear.float8: scaling amax_history_length enable_fsdp_float8_all_gather
quantize.linear.float8: enable_tp_float8_all_gather emulate
quantize.grouped_mm.float8: fqns
"""

# What lies outside a key's bounds, and on them. Keys that are not named are counts: 1 and no less.
OUTSIDE_AND_ON = {
    "job.dump_folder": ([""], ["x"]),
    "model.name": ([""], ["x"]),
    "model.flavor": ([""], ["x"]),
    "checkpoint.folder": ([""], ["x"]),
    "compile.backend": ([""], ["x"]),
    "training.global_batch_size": (["0", "-2"], ["1", "-1"]),
    "parallelism.data_parallel_shard_degree": (["0", "-2"], ["1", "-1"]),
    "validation.steps": (["0", "-2"], ["1", "-1"]),
    "validation.seq_len": (["0", "-2"], ["1", "-1"]),
    "training.max_norm": (["-1", "inf"], ["0"]),
    "training.norm_type": (["0", "3", "1.5", "-inf"], ["1", "2", "inf"]),
    "training.dataloader.num_workers": (["-1"], ["0"]),
    "loss.z_loss_weight": (["-0.1", "inf"], ["0"]),
    "moe.aux_loss_weight": (["-0.1", "inf"], ["0"]),
    "moe.z_loss_weight": (["-0.1", "inf"], ["0"]),
    "moe.bias_update_speed": (["-0.1", "inf"], ["0"]),
    "optimizer.lr": (["0", "-1e-3", "inf"], ["1e-9", ".5"]),
    "training.local_batch_size": (["0", "-2"], ["1"]),
    "optimizer.beta1": (["1", "-0.1"], ["0"]),
    "optimizer.beta2": (["1.0", "-0.1"], ["0"]),
    "optimizer.eps": (["0"], ["1e-9"]),
    "optimizer.weight_decay": (["-0.1"], ["0"]),
    "optimizer.momentum": (["1"], ["0.9"]),
    "optimizer.lr_multipliers": (["{ a = -1.0 }", "{ a = inf }"], ["{ a = 0 }"]),
    "lr_scheduler.warmup_steps": (["-1"], ["0"]),
    "lr_scheduler.total_steps": (["0", "-1"], ["1", "none"]),
    "lr_scheduler.decay_ratio": (["1.1", "-0.1"], ["0", "1", "none"]),
    "lr_scheduler.min_lr_factor": (["1.1", "-0.1"], ["0", "1"]),
    "parallelism.zero_stage": (["-1", "4"], ["0", "3"]),
    "checkpoint.load_step": (["-2"], ["-1", "0", "7"]),
    "checkpoint.keep_latest_k": (["1", "-1"], ["0", "2"]),
    "activation_checkpoint.selective_ac_option": (["0", "all", "-1", "1.5", ""], ["op", "1", "10"]),
    "activation_checkpoint.memory_budget": (["-0.1", "1.1"], ["0", "1"]),
    "profiling.profiler_warmup": (["-1"], ["0"]),
    "debug.seed": (["-1", str(2**63)], ["0", str(2**63 - 1)]),
}


def _bounded() -> list[str]:
    def has_bound(kind: object) -> bool:
        inner = typing.get_args(kind)
        return typing.get_origin(kind) is typing.Annotated or any(map(has_bound, inner))

    return [name for name, key in all_keys().items() if has_bound(key.kind)]


def test_no_key_disappears_or_appears_unnoticed() -> None:
    tables = [line.split(": ") for line in FROZEN.strip().splitlines()]
    frozen = [f"{table}.{name}" for table, names in tables for name in names.split()]
    assert list(all_keys()) == frozen


def test_every_section_and_every_key_has_its_sentence() -> None:
    for key in all_keys().values():
        meaning = meanings()[f"{key.owner.__name__}.{key.name.split('.')[-1]}"]
        assert (meaning[0].isupper() or meaning[0].isdigit()) and meaning.endswith("."), key.name
    for section in sections():
        assert (getattr(Config(), section).__doc__ or "").endswith("."), section


def test_every_number_has_bounds_and_each_default_is_within_them() -> None:
    for name, key in all_keys().items():
        assert key.kind not in (int, float), f"{name} has no bounds"
        assert key.default is None or convert(key.kind, key.default) == key.default
    assert set(OUTSIDE_AND_ON) <= set(_bounded())


@pytest.mark.parametrize("name", _bounded())
def test_values_outside_the_bounds_are_refused_and_those_on_them_taken(name: str) -> None:
    outside, on = OUTSIDE_AND_ON.get(name, (["0", "-1"], ["1"]))
    for text in outside:
        (line,) = problems([f"--{name}={text}"])
        assert line.startswith(f"{name} = ") and f"(from --{name}): out of bounds; must be " in line
    for text in on:
        load_config([f"--{name}={text}"])


def test_infinity_is_a_norm() -> None:
    assert load_config(["--training.norm_type", "inf"]).training.norm_type == math.inf


def test_a_key_that_may_be_none_is_none_by_default() -> None:
    # Otherwise a saved file, which leaves None out, would load to something else.
    for key in all_keys().values():
        assert (key.default is None) == (type(None) in typing.get_args(key.kind)), key.name


def test_values_are_read_and_set_by_dotted_name() -> None:
    config = Config()
    set_value(config, "training.dataloader.num_workers", 3)
    assert get_value(config, "training.dataloader.num_workers") == 3
    assert to_dict(config)["training"]["dataloader"] == {"num_workers": 3, "prefetch_factor": 2}
    assert list(to_dict(config)) == sections()


def test_defaults_are_not_shared_between_configs() -> None:
    Config().optimizer.no_decay.append("x")
    assert "x" not in Config().optimizer.no_decay


def test_the_room_imports_neither_torch_nor_numpy_and_is_quick() -> None:
    code = (
        "import sys, time; started = time.process_time(); import torchtitan_lite.config; "
        "assert not {'torch', 'numpy'} & set(sys.modules); "
        "assert time.process_time() - started < 0.3"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

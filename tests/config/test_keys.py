"""The list of keys itself: frozen, explained, bounded."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

from torchtitan_lite.config import Config, to_dict
from torchtitan_lite.config.bounds import BOUNDS, check_bounds
from torchtitan_lite.config.schema import (
    all_keys,
    get_value,
    is_optional,
    sections,
    set_value,
    without_none,
)
from torchtitan_lite.config.text import docstrings

# A user's file may hold any of these. To add a key, add a line; a line goes only together with a
# row in foreign.py that tells the key's users what to do instead.
FROZEN = [
    "job.config_file",
    "job.dump_folder",
    "job.description",
    "job.print_config",
    "job.save_config_file",
    "model.name",
    "model.flavor",
    "model.hf_assets_path",
    "model.overrides",
    "training.seq_len",
    "training.local_batch_size",
    "training.global_batch_size",
    "training.steps",
    "training.max_norm",
    "training.norm_type",
    "training.dtype",
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
    "training.dataset",
    "training.dataset_path",
    "training.dataset_text_column",
    "training.token_cache",
    "training.enable_cpu_offload",
    "training.gc_freq",
    "training.max_skipped_steps",
    "training.dataloader.num_workers",
    "training.dataloader.prefetch_factor",
    "loss.num_chunks",
    "loss.z_loss_weight",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.momentum",
    "optimizer.implementation",
    "optimizer.no_decay",
    "optimizer.lr_multipliers",
    "lr_scheduler.warmup_steps",
    "lr_scheduler.total_steps",
    "lr_scheduler.decay_ratio",
    "lr_scheduler.decay_type",
    "lr_scheduler.min_lr_factor",
    "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_schedule",
    "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.pipeline_parallel_layers_per_stage",
    "parallelism.module_fqns_per_model_part",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.zero_stage",
    "parallelism.fsdp_reshard_after_forward",
    "parallelism.context_parallel_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.enable_sequence_parallel",
    "parallelism.disable_loss_parallel",
    "checkpoint.enable",
    "checkpoint.folder",
    "checkpoint.interval",
    "checkpoint.load_step",
    "checkpoint.keep_latest_k",
    "checkpoint.async_mode",
    "checkpoint.initial_load_path",
    "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_only",
    "checkpoint.export_dtype",
    "checkpoint.exclude_from_loading",
    "activation_checkpoint.mode",
    "activation_checkpoint.selective_ac_option",
    "metrics.log_freq",
    "metrics.enable_tensorboard",
    "metrics.save_tb_folder",
    "metrics.enable_wandb",
    "metrics.disable_color_printing",
    "profiling.enable_profiling",
    "profiling.save_traces_folder",
    "profiling.profile_freq",
    "profiling.profiler_active",
    "profiling.profiler_warmup",
    "profiling.enable_memory_snapshot",
    "profiling.save_memory_snapshot_folder",
    "comm.init_timeout_seconds",
    "comm.train_timeout_seconds",
    "debug.seed",
    "debug.deterministic",
    "validation.enable",
    "validation.dataset",
    "validation.dataset_path",
    "validation.freq",
    "validation.steps",
    "validation.local_batch_size",
    "validation.seq_len",
]


def test_no_key_disappears_or_appears_unnoticed() -> None:
    assert list(all_keys()) == FROZEN


def test_every_section_and_every_key_has_its_sentence() -> None:
    meanings = docstrings()

    def walk(table: object) -> None:
        assert meanings[type(table).__name__].endswith(".")
        for field in dataclasses.fields(table):  # type: ignore[arg-type]
            meaning = meanings[f"{type(table).__name__}.{field.name}"]
            assert meaning[0].isupper() or meaning[0].isdigit()
            assert meaning.endswith(".")
            value = getattr(table, field.name)
            if dataclasses.is_dataclass(value):
                walk(value)

    for name in sections():
        walk(getattr(Config(), name))


def test_every_number_has_bounds_and_every_bound_a_key() -> None:
    numbers = {name for name, key in all_keys().items() if without_none(key.kind) in (int, float)}
    assert numbers <= set(BOUNDS) <= set(all_keys())


def test_each_default_is_within_its_bounds() -> None:
    for name, key in all_keys().items():
        check_bounds(name, key.default)


def test_a_key_that_may_be_none_is_none_by_default() -> None:
    # Otherwise a saved file, which leaves None out, would load to something else.
    for key in all_keys().values():
        assert (key.default is None) == is_optional(key.kind), key.name


def test_values_are_read_and_set_by_dotted_name() -> None:
    config = Config()
    set_value(config, "training.dataloader.num_workers", 3)
    assert get_value(config, "training.dataloader.num_workers") == 3
    assert to_dict(config)["training"]["dataloader"] == {"num_workers": 3, "prefetch_factor": 2}
    assert list(to_dict(config)) == list(sections())


def test_defaults_are_not_shared_between_configs() -> None:
    Config().optimizer.no_decay.append("x")
    assert "x" not in Config().optimizer.no_decay


def test_the_room_imports_neither_torch_nor_numpy_and_is_quick() -> None:
    code = (
        "import sys, time; started = time.process_time(); import torchtitan_lite.config; "
        "assert not {'torch', 'numpy', 'tomllib'} & set(sys.modules); "
        "assert time.process_time() - started < 0.3"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

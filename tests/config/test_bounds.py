"""Each key refuses what lies outside its bounds and takes what lies on them."""

from __future__ import annotations

import math

import pytest

from tests.config.cases import problems
from torchtitan_lite.config import load_config
from torchtitan_lite.config.bounds import BOUNDS
from torchtitan_lite.config.schema import all_keys, get_value

OUTSIDE = {
    "job.dump_folder": [""],
    "model.name": [""],
    "model.flavor": [""],
    "training.max_norm": ["-1", "inf"],
    "training.norm_type": ["0", "3", "1.5", "-inf"],
    "training.dataloader.num_workers": ["-1"],
    "loss.z_loss_weight": ["-0.1", "inf"],
    "optimizer.lr": ["0", "-1e-3", "inf"],
    "optimizer.beta1": ["1", "-0.1"],
    "optimizer.beta2": ["1.0", "-0.1"],
    "optimizer.eps": ["0"],
    "optimizer.weight_decay": ["-0.1"],
    "optimizer.momentum": ["1"],
    "optimizer.lr_multipliers": ["{ a = -1.0 }", "{ a = inf }"],
    "lr_scheduler.warmup_steps": ["-1"],
    "lr_scheduler.decay_ratio": ["1.1", "-0.1"],
    "lr_scheduler.min_lr_factor": ["1.1", "-0.1"],
    "parallelism.zero_stage": ["-1", "4"],
    "checkpoint.folder": [""],
    "checkpoint.load_step": ["-2"],
    "checkpoint.keep_latest_k": ["1", "-1"],
    "activation_checkpoint.selective_ac_option": ["0", "all", "-1", "1.5", ""],
    "profiling.profiler_warmup": ["-1"],
    "debug.seed": ["-1", str(2**63)],
}
AUTO = [
    "training.global_batch_size",
    "parallelism.data_parallel_shard_degree",
    "validation.steps",
    "validation.seq_len",
]

INSIDE = {
    "training.max_norm": ["0"],
    "training.norm_type": ["1", "2", "inf"],
    "training.dataloader.num_workers": ["0"],
    "optimizer.beta1": ["0"],
    "optimizer.beta2": ["0"],
    "optimizer.momentum": ["0.9"],
    "optimizer.lr_multipliers": ["{ a = 0 }"],
    "lr_scheduler.warmup_steps": ["0"],
    "lr_scheduler.decay_ratio": ["0", "1", "none"],
    "lr_scheduler.total_steps": ["1", "none"],
    "lr_scheduler.min_lr_factor": ["1"],
    "parallelism.zero_stage": ["0", "3"],
    "checkpoint.load_step": ["-1", "7"],
    "checkpoint.keep_latest_k": ["0", "2"],
    "activation_checkpoint.selective_ac_option": ["op", "1"],
    "debug.seed": ["0", str(2**63 - 1)],
}


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_values_outside_the_bounds_are_one_line_each(name: str) -> None:
    # Keys without a row are counts: 0 is refused, and -1 too unless it means "the rest".
    for text in OUTSIDE.get(name, ["0", "-2" if name in AUTO else "-1"]):
        (line,) = problems([f"--{name}={text}"])
        assert line.startswith(f"{name} = ")
        assert f"(from --{name}): out of bounds; must be {BOUNDS[name].sentence}" in line


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_values_on_the_bounds_are_taken(name: str) -> None:
    if all_keys()[name].kind is str and name not in INSIDE:
        return
    for text in INSIDE.get(name, ["1", "-1"] if name in AUTO else ["1"]):
        load_config([f"--{name}={text}"])


def test_infinity_is_a_norm() -> None:
    assert load_config(["--training.norm_type", "inf"]).training.norm_type == math.inf
    assert get_value(load_config([]), "training.norm_type") == 2.0

"""Numbers that follow from others."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from tests.config.cases import checked, degrees
from torchtitan_lite.config import (
    Config,
    load_config,
    num_schedule_steps,
    num_stages,
    num_warmup_steps,
    resolve,
    validation_seq_len,
)
from torchtitan_lite.config.derived import divisors, schedule_needs


def test_the_rest_of_the_world_shards() -> None:
    config = checked(degrees(dr=2, tp=2), world=16)
    assert config.parallelism.data_parallel_shard_degree == 4
    assert config.parallelism.batch_ranks == 8
    assert config.training.global_batch_size == 8 * 8


def test_batch_ranks_of_an_unresolved_configuration_are_an_error_of_ours() -> None:
    with pytest.raises(AssertionError, match="resolve the configuration first"):
        _ = Config().parallelism.batch_ranks


def test_zero_stage_0_leaves_the_degrees_as_they_are_written() -> None:
    """Experts are shared out over shard ranks also where nothing is sharded."""
    config = checked([*degrees(dr=2, tp=2), "--parallelism.zero_stage=0"], world=16)
    assert config.parallelism.data_parallel_replicate_degree == 2
    assert config.parallelism.data_parallel_shard_degree == 4
    assert config.parallelism.batch_ranks == 8


@pytest.mark.parametrize(("alias", "stage"), [("always", 3), ("never", 2), ("default", 3)])
def test_reshard_after_forward_is_a_name_of_zero_stage(alias: str, stage: int) -> None:
    config = checked(["--parallelism.fsdp_reshard_after_forward", alias])
    assert config.parallelism.zero_stage == stage
    assert config.parallelism.fsdp_reshard_after_forward == "default"


def test_resolving_twice_changes_nothing() -> None:
    for stage in range(4):
        config = checked([*degrees(dr=2), f"--parallelism.zero_stage={stage}"], world=8)
        once = checked([*degrees(dr=2), f"--parallelism.zero_stage={stage}"], world=8)
        resolve(config, 8)
        assert config == once


@pytest.mark.parametrize(
    ("argv", "stage"),
    [
        ([], 2),
        (["--parallelism.zero_stage=3"], 3),
        (["--parallelism.zero_stage=1"], 1),
        (["--parallelism.zero_stage=0"], 0),
        (["--parallelism.fsdp_reshard_after_forward=always"], 3),
        (["--parallelism.fsdp_reshard_after_forward=never"], 2),
    ],
)
def test_under_a_pipeline_parameters_stay_gathered_unless_the_user_says_otherwise(
    argv: list[str], stage: int
) -> None:
    config = checked([*degrees(pp=2), *argv], world=4)
    assert config.parallelism.zero_stage == stage
    resolve(config, 4)
    assert config.parallelism.zero_stage == stage
    # Without a pipeline 3 is the default.
    assert checked([], world=4).parallelism.zero_stage == 3


def test_a_zero_stage_in_a_file_is_kept_even_if_it_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[parallelism]\nzero_stage = 3\n")
    config = checked(["--job.config_file", str(path), *degrees(pp=2)], world=4)
    assert config.parallelism.zero_stage == 3


def test_a_configuration_built_in_code_is_resolved_alike() -> None:
    config = Config()
    config.parallelism.pipeline_parallel_degree = 2
    resolve(config, 4)
    assert config.parallelism.zero_stage == 2
    config = Config()
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.fsdp_reshard_after_forward = "always"
    for _ in range(2):
        resolve(config, 4)
        assert config.parallelism.zero_stage == 3


@pytest.mark.parametrize(
    ("argv", "stages"),
    [
        ([], 1),
        (degrees(pp=2), 2),
        ([*degrees(pp=2), "--parallelism.pipeline_parallel_schedule=LoopedBFS"], 4),
        (
            [
                *degrees(pp=2),
                "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
                "--parallelism.pipeline_parallel_layers_per_stage=1",
            ],
            6,
        ),
        ([*degrees(pp=2), "--parallelism.pipeline_parallel_layers_per_stage=4"], 2),
        ([*degrees(pp=2), '--parallelism.module_fqns_per_model_part=[["a"],["b"],["c"]]'], 3),
    ],
)
def test_the_number_of_stages_of_six_layers(argv: list[str], stages: int) -> None:
    assert num_stages(load_config(argv), 6) == stages


def test_lengths_left_open_follow_training() -> None:
    config = load_config(["--training.seq_len=64", "--training.steps=50"])
    assert (validation_seq_len(config), num_schedule_steps(config)) == (64, 50)
    assert num_warmup_steps(config) == 50
    config = load_config(
        ["--validation.seq_len=32", "--lr_scheduler.total_steps=9", "--lr_scheduler.warmup_steps=3"]
    )
    assert validation_seq_len(config) == 32
    assert (num_schedule_steps(config), num_warmup_steps(config)) == (9, 3)


def test_divisors_are_all_of_them() -> None:
    for number in range(1, 200):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


@pytest.mark.parametrize("world", [1, 6, 8, 12, 16])
def test_every_factorisation_of_the_world_passes_and_nothing_else_does(world: int) -> None:
    from tests.config.cases import Shape, problems

    shape = Shape(*(16 * 3,) * 6)  # divisible by whatever divides a world of up to 16
    rows = ["--training.local_batch_size=16", "--training.seq_len=48"]
    passed = 0
    for pp, dr, ds, tp in itertools.product(divisors(world), repeat=4):
        argv = [*rows, *degrees(pp=pp, dr=dr, ds=ds, tp=tp)]
        lines = problems(argv, world=world, shape=shape)
        fits = pp * dr * ds * tp == world
        assert (lines == []) == fits, (pp, dr, ds, tp, lines)
        assert len(lines) <= 1
        passed += fits
    exponents = {1: [], 6: [1, 1], 8: [3], 12: [2, 1], 16: [4]}[world]
    assert passed == math.prod(math.comb(exponent + 3, 3) for exponent in exponents)


def _against_torch() -> list[Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def accepted_by_torch(name: str, pipeline: int, count: int) -> bool:
        stages = 1 if name in ("GPipe", "1F1B") else 2
        second = 2 * pipeline - 1 if name in ("ZBVZeroBubble", "DualPipeV") else pipeline
        row = torch.zeros(1, 2)
        parts = [
            PipelineStage(
                torch.nn.Linear(2, 2),
                index,
                stages * pipeline,
                torch.device("cpu"),
                input_args=(row,),
                output_args=(row,),
            )
            for index in (0, second)[:stages]
        ]
        schedule = get_schedule_class(name)
        try:
            schedule(parts[0] if stages == 1 else parts, count, loss_fn=lambda out, _: out.sum())
        except ValueError:
            return False
        return True

    differences = []
    for pipeline in (2, 4):
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=pipeline)
        for name, count in itertools.product(SCHEDULES, range(1, 14)):
            stages = pipeline * (1 if name in ("GPipe", "1F1B") else 2)
            ours = schedule_needs(name, count, stages=stages, degree=pipeline) is None
            if ours != accepted_by_torch(name, pipeline, count):
                differences.append((name, pipeline, count, ours))
    return differences


SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)


def test_micro_batches_are_accepted_exactly_where_torchs_schedules_accept_them() -> None:
    from tests.world import run_ranks

    assert run_ranks(_against_torch, 1) == [[]]

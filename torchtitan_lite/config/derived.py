"""Numbers that follow from others, each computed in one place for checks and trainer alike.

    batch ranks       dp_replicate x dp_shard: the ranks that read rows of their own
    global batch      rows in a step = local_batch_size x batch ranks x accumulation steps
    micro-batches     without pp: accumulation steps of local_batch_size rows
                      with pp: a rank's whole share of the global batch is one schedule call,
                      cut into pieces of pipeline_parallel_microbatch_size rows
    stages            pp for GPipe and 1F1B, 2 x pp for the schedules that put two on a rank

`resolve` replaces every -1 by its number. Proven in tests/config/test_derived.py.
"""

from __future__ import annotations

import math
from typing import Any

from torchtitan_lite.config.keys import Config, Parallelism
from torchtitan_lite.config.schema import get_value, set_value

SINGLE_STAGE_SCHEDULES = ("GPipe", "1F1B")
# The last stage sits on the first rank, so a rank holds exactly two stages.
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
# The gradients of inputs and of weights are computed at different times. torch looks up the
# parameters of the second before FSDP has gathered them again: measured, wrong gradients.
SPLIT_BACKWARD_SCHEDULES = ("InterleavedZeroBubble", *V_SCHEDULES)

ZERO_STAGE = "parallelism.zero_stage"
ZERO_STAGE_ALIAS = "parallelism.fsdp_reshard_after_forward"
ROTATE_METHOD = "parallelism.context_parallel_rotate_method"
CONTEXT_METHOD = "parallelism.context_parallel_method"
ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    ZERO_STAGE: (ZERO_STAGE_ALIAS, {"always": 3, "never": 2}),
    CONTEXT_METHOD: (ROTATE_METHOD, {"allgather": "allgather", "alltoall": "ring"}),
}
"""Of a key: its other name, and what each value of that means here."""


def resolve(config: Config, world_size: int) -> None:
    """Replace, in place, what the configuration leaves open; it must have passed the checks.

    data_parallel_shard_degree, the batch sizes and zero_stage get their numbers. Doing it twice
    changes nothing.
    """
    parallelism = config.parallelism
    parallelism.zero_stage = zero_stage(config)
    for key, (alias, means) in ALIASES.items():
        if get_value(config, alias) in means:
            set_value(config, key, in_force(config, key))
            set_value(config, alias, "default")
            config.user_set[key] = config.user_set.pop(alias, alias)
    shard = shard_degree(parallelism, world_size)
    assert shard is not None, "the degrees do not fit the world: check the configuration first"
    parallelism.data_parallel_shard_degree = shard
    ranks, training = parallelism.batch_ranks, config.training
    training.global_batch_size = global_batch_size(config, ranks)
    training.local_batch_size = local_batch_size(config, ranks)


def in_force(config: Config, key: str) -> Any:
    """What the user said of a key of ALIASES, under whichever of its names."""
    alias, means = ALIASES[key]
    return means.get(get_value(config, alias), get_value(config, key))


def zero_stage(config: Config) -> int:
    """The zero_stage in force, also where the user leaves it open."""
    parallelism, stage = config.parallelism, in_force(config, ZERO_STAGE)
    said = ZERO_STAGE in config.user_set or ZERO_STAGE in config.sources
    open_to_us = parallelism.fsdp_reshard_after_forward == "default" and not said
    return min(stage, 2) if open_to_us and parallelism.pipeline_parallel_degree > 1 else stage


def shard_degree(parallelism: Parallelism, world_size: int) -> int | None:
    """dp_shard with -1 filled in; None if the degrees do not multiply to the world size."""
    others = degrees_but_shard(parallelism)
    shard = parallelism.data_parallel_shard_degree
    if shard == -1:
        shard = world_size // others
    return shard if shard >= 1 and shard * others == world_size else None


def degrees_but_shard(parallelism: Parallelism) -> int:
    """The product of all degrees but dp_shard."""
    return (
        parallelism.pipeline_parallel_degree
        * parallelism.data_parallel_replicate_degree
        * parallelism.context_parallel_degree
        * parallelism.tensor_parallel_degree
    )


def global_batch_size(config: Config, batch_ranks: int) -> int:
    """Rows in a step over all ranks, with -1 filled in."""
    training = config.training
    if training.global_batch_size == -1:
        return training.local_batch_size * batch_ranks
    return training.global_batch_size


def local_batch_size(config: Config, batch_ranks: int) -> int:
    """Rows of a rank's forward, with -1 filled in: at least 1, also where a check objects."""
    training = config.training
    if training.local_batch_size == -1:
        return max(1, training.global_batch_size // batch_ranks)
    return training.local_batch_size


def micro_batch_size(config: Config) -> int:
    """Rows that go through the model, or a stage of it, at once."""
    parallelism = config.parallelism
    pipelined = parallelism.pipeline_parallel_degree > 1
    size = parallelism.pipeline_parallel_microbatch_size
    return size if pipelined else config.training.local_batch_size


def num_stages(config: Config, num_layers: int) -> int:
    """Pipeline stages over all pp ranks; 1 without pp."""
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree == 1:
        return 1
    if parallelism.module_fqns_per_model_part is not None:
        return len(parallelism.module_fqns_per_model_part)
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        return math.ceil(num_layers / parallelism.pipeline_parallel_layers_per_stage)
    stages_a_rank = 1 if parallelism.pipeline_parallel_schedule in SINGLE_STAGE_SCHEDULES else 2
    return parallelism.pipeline_parallel_degree * stages_a_rank


def schedule_needs(schedule: str, num_micro: int, *, stages: int, degree: int) -> str | None:
    """What number of micro-batches a schedule of torch needs, if it does not run `num_micro`.

    Measured for 1 to 13 micro-batches on 2 and 4 ranks: the interleaving schedules work in
    M // P rounds, which must share the micro-batches evenly; 1F1B and DualPipeV must fill every
    stage once; the others take any number.
    """
    rounds = max(1, num_micro // degree)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and num_micro % rounds:
        return f"a multiple of {rounds}"
    if schedule in ("1F1B", "DualPipeV") and num_micro < stages:
        return f"at least {stages}"
    return None


def num_schedule_steps(config: Config) -> int:
    """Steps of the learning-rate schedule."""
    total = config.lr_scheduler.total_steps
    return config.training.steps if total is None else total


def num_warmup_steps(config: Config) -> int:
    """Warm-up steps, at most as many as the schedule has."""
    return min(config.lr_scheduler.warmup_steps, num_schedule_steps(config))


def validation_seq_len(config: Config) -> int:
    """Tokens in a row of validation, with -1 filled in."""
    seq_len = config.validation.seq_len
    return config.training.seq_len if seq_len == -1 else seq_len


def divisors(number: int) -> list[int]:
    """The divisors of a positive integer, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]

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

from torchtitan_lite.config.keys import Config, Parallelism

SINGLE_STAGE_SCHEDULES = ("GPipe", "1F1B")
# The last stage sits on the first rank, so a rank holds exactly two stages.
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")

RESHARD_ZERO_STAGE = {"always": 3, "never": 2}
"""fsdp_reshard_after_forward -> the zero_stage it is another name of."""


def resolve(config: Config, world_size: int) -> None:
    """Replace, in place, what the configuration leaves open; it must have passed the checks.

    data_parallel_shard_degree and global_batch_size get their numbers, fsdp_reshard_after_forward
    becomes its zero_stage, and zero_stage 0 turns shard ranks into replicas. Doing it twice
    changes nothing.
    """
    parallelism = config.parallelism
    reshard = parallelism.fsdp_reshard_after_forward
    if reshard != "default":
        parallelism.zero_stage = RESHARD_ZERO_STAGE[reshard]
        parallelism.fsdp_reshard_after_forward = "default"
        alias = "parallelism.fsdp_reshard_after_forward"
        if alias in config.user_set:
            config.user_set["parallelism.zero_stage"] = config.user_set.pop(alias)
    shard = shard_degree(parallelism, world_size)
    assert shard is not None, "the degrees do not fit the world: check the configuration first"
    parallelism.data_parallel_shard_degree = shard
    if parallelism.zero_stage == 0:
        parallelism.data_parallel_replicate_degree = parallelism.batch_ranks
        parallelism.data_parallel_shard_degree = 1
    if config.training.global_batch_size == -1:
        config.training.global_batch_size = global_batch_size(config, parallelism.batch_ranks)


def shard_degree(parallelism: Parallelism, world_size: int) -> int | None:
    """dp_shard with -1 filled in; None if the degrees do not multiply to the world size."""
    others = other_degrees(parallelism)
    shard = parallelism.data_parallel_shard_degree
    if shard == -1:
        shard = world_size // others
    return shard if shard >= 1 and shard * others == world_size else None


def other_degrees(parallelism: Parallelism) -> int:
    """The product of all degrees but dp_shard."""
    return math.prod(
        (
            parallelism.pipeline_parallel_degree,
            parallelism.data_parallel_replicate_degree,
            parallelism.context_parallel_degree,
            parallelism.tensor_parallel_degree,
        )
    )


def global_batch_size(config: Config, batch_ranks: int) -> int:
    """Rows in a step over all ranks, with -1 filled in."""
    training = config.training
    if training.global_batch_size == -1:
        return training.local_batch_size * batch_ranks
    return training.global_batch_size


def num_accumulation_steps(config: Config, batch_ranks: int) -> int:
    """Forward and backward passes of local_batch_size rows in a step, without pp."""
    return global_batch_size(config, batch_ranks) // (
        config.training.local_batch_size * batch_ranks
    )


def num_microbatches(config: Config, batch_ranks: int) -> int:
    """Micro-batches in one call of the pipeline schedule, that is in a step of a batch rank."""
    rows = global_batch_size(config, batch_ranks) // batch_ranks
    return rows // config.parallelism.pipeline_parallel_microbatch_size


def stages_per_rank(schedule: str) -> int:
    """Stages that a schedule wants on each rank when the configuration does not say."""
    return 1 if schedule in SINGLE_STAGE_SCHEDULES else 2


def num_stages(config: Config, num_layers: int) -> int:
    """Pipeline stages over all pp ranks; 1 without pp."""
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree == 1:
        return 1
    if parallelism.module_fqns_per_model_part is not None:
        return len(parallelism.module_fqns_per_model_part)
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        return math.ceil(num_layers / parallelism.pipeline_parallel_layers_per_stage)
    return parallelism.pipeline_parallel_degree * stages_per_rank(
        parallelism.pipeline_parallel_schedule
    )


def schedule_accepts(
    schedule: str, *, num_microbatches: int, num_stages: int, pipeline_degree: int
) -> bool:
    """Whether a schedule of torch.distributed.pipelining runs this number of micro-batches.

    Measured for 1 to 6 and 8 micro-batches on 2 and 4 ranks: the interleaving schedules work in
    M // P rounds, which must share the micro-batches evenly; 1F1B and DualPipeV must fill every
    stage once; the others take any number.
    """
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return num_microbatches % max(1, num_microbatches // pipeline_degree) == 0
    if schedule in ("1F1B", "DualPipeV"):
        return num_microbatches >= num_stages
    return num_microbatches >= 1


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
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]

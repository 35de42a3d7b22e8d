"""What values a key admits beyond its type: one row a key.

Proven in tests/config/test_bounds.py: every number has a row, every row names a key, and each
default is within its own bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torchtitan_lite.config.values import Refused


class Bound(NamedTuple):
    """What holds of a value, and the sentence that says so."""

    holds: Callable[[Any], bool]
    sentence: str


AT_LEAST_1 = Bound(lambda value: value >= 1, "at least 1")
AT_LEAST_0 = Bound(lambda value: value >= 0, "0 or more")
AT_LEAST_1_OR_AUTO = Bound(lambda value: value >= 1 or value == -1, "at least 1, or -1")
AT_LEAST_0_OR_AUTO = Bound(lambda value: value >= -1, "0 or more, or -1")
NOT_NEGATIVE = Bound(lambda value: 0 <= value < math.inf, "a finite number, 0 or more")
POSITIVE = Bound(lambda value: 0 < value < math.inf, "a finite number above 0")
SHARE = Bound(lambda value: 0 <= value <= 1, "from 0 to 1")
BELOW_1 = Bound(lambda value: 0 <= value < 1, "0 or more and below 1")
NOT_EMPTY = Bound(lambda value: value != "", "not empty")
MULTIPLIERS = Bound(
    lambda table: all(NOT_NEGATIVE.holds(value) for value in table.values()),
    "finite numbers, 0 or more",
)
EVERY_NTH = Bound(
    lambda value: value == "op" or (value.isascii() and value.isdigit() and int(value) >= 1),
    '"op" or an integer of at least 1 in quotes',
)

BOUNDS: dict[str, Bound] = {
    "job.dump_folder": NOT_EMPTY,
    "model.name": NOT_EMPTY,
    "model.flavor": NOT_EMPTY,
    "training.seq_len": AT_LEAST_1,
    "training.local_batch_size": AT_LEAST_1,
    "training.global_batch_size": AT_LEAST_1_OR_AUTO,
    "training.steps": AT_LEAST_1,
    "training.max_norm": NOT_NEGATIVE,
    "training.norm_type": Bound(lambda value: value in (1, 2, math.inf), "1, 2 or inf"),
    "training.gc_freq": AT_LEAST_1,
    "training.max_skipped_steps": AT_LEAST_1,
    "training.dataloader.num_workers": AT_LEAST_0,
    "training.dataloader.prefetch_factor": AT_LEAST_1,
    "loss.num_chunks": AT_LEAST_1,
    "loss.z_loss_weight": NOT_NEGATIVE,
    "optimizer.lr": POSITIVE,
    "optimizer.beta1": BELOW_1,
    "optimizer.beta2": BELOW_1,
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.momentum": BELOW_1,
    "optimizer.lr_multipliers": MULTIPLIERS,
    "lr_scheduler.warmup_steps": AT_LEAST_0,
    "lr_scheduler.total_steps": AT_LEAST_1,
    "lr_scheduler.decay_ratio": SHARE,
    "lr_scheduler.min_lr_factor": SHARE,
    "parallelism.pipeline_parallel_degree": AT_LEAST_1,
    "parallelism.pipeline_parallel_microbatch_size": AT_LEAST_1,
    "parallelism.pipeline_parallel_layers_per_stage": AT_LEAST_1,
    "parallelism.data_parallel_replicate_degree": AT_LEAST_1,
    "parallelism.data_parallel_shard_degree": AT_LEAST_1_OR_AUTO,
    "parallelism.zero_stage": Bound(lambda value: 0 <= value <= 3, "0, 1, 2 or 3"),
    "parallelism.context_parallel_degree": AT_LEAST_1,
    "parallelism.tensor_parallel_degree": AT_LEAST_1,
    "checkpoint.folder": NOT_EMPTY,
    "checkpoint.interval": AT_LEAST_1,
    "checkpoint.load_step": AT_LEAST_0_OR_AUTO,
    "checkpoint.keep_latest_k": Bound(
        lambda value: value == 0 or value >= 2,
        "0 (keep all) or at least 2, as the newest may turn out to be damaged",
    ),
    "activation_checkpoint.selective_ac_option": EVERY_NTH,
    "metrics.log_freq": AT_LEAST_1,
    "profiling.profile_freq": AT_LEAST_1,
    "profiling.profiler_active": AT_LEAST_1,
    "profiling.profiler_warmup": AT_LEAST_0,
    "comm.init_timeout_seconds": AT_LEAST_1,
    "comm.train_timeout_seconds": AT_LEAST_1,
    # A generator takes 64 bits, a TOML integer 63 and a sign.
    "debug.seed": Bound(lambda value: 0 <= value < 2**63, "from 0 to 2**63 - 1"),
    "validation.freq": AT_LEAST_1,
    "validation.steps": AT_LEAST_1_OR_AUTO,
    "validation.local_batch_size": AT_LEAST_1,
    "validation.seq_len": AT_LEAST_1_OR_AUTO,
}


def check_bounds(name: str, value: Any) -> None:
    """Raise Refused if the value of a key is outside its bounds. None always is within."""
    bound = BOUNDS.get(name)
    if bound is not None and value is not None and not bound.holds(value):
        raise Refused("out of bounds", f"must be {bound.sentence}")

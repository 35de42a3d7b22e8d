"""What must hold between keys, and between the configuration, the model and the world.

Each check is a function from the same facts to problems; `CHECKS` lists them. All of them run
before any process group exists, and all problems are told at once. A problem names the keys it is
about: if one of them could not be read, the problem may be an echo and stays untold.

Proven in tests/config/test_checks.py, each check with a configuration that passes and one that
does not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from torchtitan_lite.config.derived import (
    RESHARD_ZERO_STAGE,
    divisors,
    global_batch_size,
    other_degrees,
    resolve,
    shard_degree,
    validation_seq_len,
)
from torchtitan_lite.config.facts import (
    BATCH,
    CONTEXT,
    DEGREES,
    SHARD,
    TENSOR,
    Facts,
    ModelShape,
    Problem,
    nearest_number,
    problem,
)
from torchtitan_lite.config.keys import Config, ConfigError
from torchtitan_lite.config.load import problem_line, read_sources, similar_file
from torchtitan_lite.config.pipeline_checks import PIPELINE_CHECKS
from torchtitan_lite.config.schema import get_value
from torchtitan_lite.config.values import one_of

M = TypeVar("M", bound=ModelShape)


def load_and_check(
    argv: list[str], world_size: int, resolve_model: Callable[[Config], M]
) -> tuple[Config, M]:
    """The resolved Config of a command line, and the model it asks for.

    `resolve_model` turns the model section into the model's configuration and raises ConfigError
    where it cannot. Its problems, those of reading and those of the checks are raised together,
    as one ConfigError with one line a problem.
    """
    reading = read_sources(argv)
    problems = list(reading.problems)
    model: M | None = None
    if not any(name.startswith("model.") for name in reading.failed):
        try:
            model = resolve_model(reading.config)
        except ConfigError as error:
            problems.extend(str(error).splitlines())
    for found in check_config(reading.config, model, world_size):
        if reading.failed.isdisjoint(found.keys):
            problems.append(found.line)
    if problems:
        raise ConfigError("\n".join(problems))
    assert model is not None, "no model and no problem"
    resolve(reading.config, world_size)
    return reading.config, model


def check_config(config: Config, model: ModelShape | None, world_size: int) -> list[Problem]:
    """All problems of a configuration, which is left as it is.

    Without a model, the checks that need one are left out.
    """
    shard = shard_degree(config.parallelism, world_size)
    replicate = config.parallelism.data_parallel_replicate_degree
    facts = Facts(config, model, world_size, None if shard is None else replicate * shard)
    return [found for check in (*CHECKS, *PIPELINE_CHECKS) for found in check(facts)]


def _world(facts: Facts) -> Iterator[Problem]:
    config, world = facts.config, facts.world_size
    parallelism = config.parallelism
    if parallelism.context_parallel_degree != 1:
        yield problem(
            config,
            (CONTEXT,),
            reason="this version has no context parallelism",
            fix="set it to 1; for long rows use tensor parallelism with sequence parallelism",
        )
        return
    if facts.batch_ranks is not None:
        return
    shard = parallelism.data_parallel_shard_degree
    others = other_degrees(parallelism)
    product = others * max(shard, 1)
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    reason = (
        f"pp {parallelism.pipeline_parallel_degree} x "
        f"dp_replicate {parallelism.data_parallel_replicate_degree} x "
        f"dp_shard {shard if shard > 0 else 'the rest'} x cp 1 x "
        f"tp {parallelism.tensor_parallel_degree} = {product}"
    )
    if shard == -1:
        reason += f", which does not divide this world of {ranks}"
    else:
        reason += f", and this is a world of {ranks}"
    yield problem(config, _degrees_at_fault(config), reason=reason, fix=_fitting(config, world))


def _degrees_at_fault(config: Config) -> tuple[str, ...]:
    """All degrees, those that are not 1 first, as one of these is the one to change."""
    return tuple(sorted(DEGREES, key=lambda name: get_value(config, name) in (1, -1)))


def _fitting(config: Config, world: int) -> str:
    """The smallest change of one degree that makes the mesh fit the world."""
    others = other_degrees(config.parallelism)
    shard = config.parallelism.data_parallel_shard_degree
    if shard != -1 and world % others == 0:
        return f"set {SHARD} to {world // others}, or to -1 for the rest of the world"
    for name in _degrees_at_fault(config):
        degree = get_value(config, name)
        rest = others // degree * max(shard, 1)
        if name == SHARD or degree == 1 or world % rest:
            continue
        fitting = divisors(world // rest) if shard == -1 else [world // rest]
        return f"set {name} to {nearest_number(fitting, degree)}"
    return f"choose degrees whose product divides {world}, and set {SHARD} to -1"


def _zero_stage_alias(facts: Facts) -> Iterator[Problem]:
    parallelism = facts.config.parallelism
    alias = "parallelism.fsdp_reshard_after_forward"
    means = RESHARD_ZERO_STAGE.get(parallelism.fsdp_reshard_after_forward)
    said = "parallelism.zero_stage" in facts.config.sources
    if means is not None and said and parallelism.zero_stage != means:
        yield problem(
            facts.config,
            (alias, "parallelism.zero_stage"),
            reason=f"means parallelism.zero_stage = {means}, which is set to "
            f"{parallelism.zero_stage}",
            fix="keep one of the two",
        )


def _tensor_parallel(facts: Facts) -> Iterator[Problem]:
    degree = facts.config.parallelism.tensor_parallel_degree
    if facts.model is None:
        return
    sizes = {
        "num_attention_heads": facts.model.num_attention_heads,
        "num_key_value_heads": facts.model.num_key_value_heads,
        "intermediate_size": facts.model.intermediate_size,
        "padded_vocab_size": facts.model.padded_vocab_size,
    }
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % degree]
    if uneven:
        fitting = divisors(math.gcd(*sizes.values()))
        yield problem(
            facts.config,
            (TENSOR,),
            reason=f"{degree} does not divide the model's {', '.join(uneven)}",
            fix=f"degrees that divide all are {one_of(fitting)}, "
            f"the nearest is {nearest_number(fitting, degree)}",
        )


def _sequence_parallel(facts: Facts) -> Iterator[Problem]:
    config = facts.config
    degree = config.parallelism.tensor_parallel_degree
    if degree == 1 or not config.parallelism.enable_sequence_parallel:
        return
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable and config.validation.seq_len != -1:
        lengths["validation.seq_len"] = validation_seq_len(config)
    for name, length in lengths.items():
        if length % degree:
            yield problem(
                config,
                (name, TENSOR, "parallelism.enable_sequence_parallel", "validation.enable"),
                reason=f"sequence parallelism shares the {length} tokens of a row among "
                f"{degree} ranks, which does not divide them",
                fix=f"set {name} to {_multiples_around(length, degree)}, "
                "or parallelism.enable_sequence_parallel to false",
            )


def _global_batch(facts: Facts) -> Iterator[Problem]:
    config, ranks = facts.config, facts.batch_ranks
    if ranks is None:
        return
    local = config.training.local_batch_size
    rows, unit = global_batch_size(config, ranks), local * ranks
    if rows % unit:
        yield problem(
            config,
            (*BATCH, *DEGREES),
            reason=f"training.global_batch_size {rows} is not a multiple of "
            f"training.local_batch_size {local} x {ranks} batch ranks = {unit}",
            fix=f"set training.global_batch_size to {_multiples_around(rows, unit)}"
            + _local_batch_advice(rows, ranks, local),
        )


def _local_batch_advice(rows: int, ranks: int, local: int) -> str:
    if rows % ranks:
        return ""
    fitting = nearest_number(divisors(rows // ranks), local)
    return f", or training.local_batch_size to {fitting}"


def _multiples_around(number: int, unit: int) -> str:
    below = number // unit * unit
    return one_of([below, below + unit] if below else [unit])


def _data(facts: Facts) -> Iterator[Problem]:
    config = facts.config
    yield from _data_path(config, "training")
    if config.validation.enable:
        yield from _data_path(config, "validation")
    tokenizer = os.path.join(config.model.hf_assets_path, "tokenizer.json")
    sections = ("training", "validation") if config.validation.enable else ("training",)
    if os.path.isfile(tokenizer) or not any(_is_tokenised(config, name) for name in sections):
        return
    yield problem(
        config,
        ("model.hf_assets_path", "training.dataset", "validation.dataset", "validation.enable"),
        reason=f"there is no {tokenizer}, and the data has to be tokenised",
        fix="give the folder that holds tokenizer.json, or data of dataset tokens or synthetic",
    )


def _is_tokenised(config: Config, section: str) -> bool:
    """Whether a tokenizer is needed to read a section's data."""
    dataset = get_value(config, f"{section}.dataset")
    path = get_value(config, f"{section}.dataset_path")
    # Of the kinds that auto finds, token shards alone have an index beside them.
    shards = dataset == "auto" and os.path.isfile(os.path.join(path, "index.json"))
    return dataset not in ("tokens", "synthetic") and not shards


def _data_path(config: Config, section: str) -> Iterator[Problem]:
    name, dataset = f"{section}.dataset_path", get_value(config, f"{section}.dataset")
    path = get_value(config, name)
    if dataset == "synthetic":
        return
    keys = (name, f"{section}.dataset", "validation.enable")[: 2 if section == "training" else 3]
    if path == "":
        reason = f"{section}.dataset {dataset} reads a file or a folder, and none is given"
        fix = f'set {name}, or {section}.dataset to "synthetic"'
    elif not os.path.exists(path):
        reason, fix = "no such file or folder", similar_file(path)
    elif not _has_content(path):
        reason, fix = "is empty", "give a file or a folder with data"
    else:
        return
    # The path itself is what is wrong, whichever of the keys the user set.
    source = config.sources.get(name, "the defaults")
    yield Problem(keys, problem_line(name, path, source, reason=reason, fix=fix))


def _has_content(path: str) -> bool:
    return bool(os.listdir(path)) if os.path.isdir(path) else os.path.getsize(path) > 0


def _initial_load(facts: Facts) -> Iterator[Problem]:
    config = facts.config
    path = config.checkpoint.initial_load_path
    if not config.checkpoint.enable or path == "" or os.path.isdir(path):
        return
    is_file = os.path.exists(path)
    yield problem(
        config,
        ("checkpoint.initial_load_path", "checkpoint.enable"),
        reason="is a file" if is_file else "no such folder",
        fix="give the step folder" if is_file else similar_file(path),
    )


def _profiler(facts: Facts) -> Iterator[Problem]:
    profiling = facts.config.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < needed:
        yield problem(
            facts.config,
            (
                "profiling.profile_freq",
                "profiling.profiler_warmup",
                "profiling.profiler_active",
                "profiling.enable_profiling",
            ),
            reason=f"profile_freq {profiling.profile_freq} is less than profiler_warmup "
            f"{profiling.profiler_warmup} + profiler_active {profiling.profiler_active}",
            fix=f"set profiling.profile_freq to at least {needed}",
        )


CHECKS: tuple[Callable[[Facts], Iterator[Problem]], ...] = (
    _world,
    _zero_stage_alias,
    _tensor_parallel,
    _sequence_parallel,
    _global_batch,
    _data,
    _initial_load,
    _profiler,
)

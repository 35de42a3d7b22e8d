"""What must hold between keys, and between the configuration, the model and the world.

Each check yields its findings: the keys it is about, the reason, the fix. `CHECKS` lists them. All
run before any process group exists, and all problems are told at once. If one of a finding's keys
could not be read, the finding may be an echo and stays untold.

Proven in tests/config/test_checks.py, each check with a configuration that passes and one that
does not.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable
from typing import TypeVar

from torchtitan_lite.config import derived, model_checks
from torchtitan_lite.config.derived import ZERO_STAGE, ZERO_STAGE_ALIAS, divisors
from torchtitan_lite.config.facts import (
    BY_HAND,
    DEGREES,
    LAYERS_PER_STAGE,
    PIPELINE,
    SCHEDULE,
    SHARD,
    Facts,
    Findings,
    ModelShape,
    multiple,
)
from torchtitan_lite.config.keys import Config, ConfigError
from torchtitan_lite.config.load import read_sources
from torchtitan_lite.config.schema import Problem, get_value, one_of, told

LOCAL_BATCH, GLOBAL_BATCH = "training.local_batch_size", "training.global_batch_size"
MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
INITIAL_LOAD, IN_HF = "checkpoint.initial_load_path", "checkpoint.initial_load_in_hf"

M = TypeVar("M", bound=ModelShape)


def load_and_check(
    argv: list[str], world_size: int, resolve_model: Callable[[Config], M]
) -> tuple[Config, M]:
    """The resolved Config of a command line, and the model it asks for.

    `resolve_model` turns the model section into the model's configuration and raises ConfigError
    where it cannot. Its problems, those of reading and those of the checks are raised together,
    as one ConfigError with one line a problem.
    """
    config, problems = read_sources(argv)
    lines = [problem.line for problem in problems]
    failed = {key for problem in problems for key in problem.keys}
    model: M | None = None
    if not any(name.startswith("model.") for name in failed):
        try:
            model = resolve_model(config)
        except ConfigError as error:
            lines += [_with_source(line, config) for line in str(error).splitlines()]
    found = check_config(config, model, world_size)
    lines += [problem.line for problem in found if failed.isdisjoint(problem.keys)]
    if lines:
        raise ConfigError("\n".join(lines))
    assert model is not None, "no model and no problem"
    derived.resolve(config, world_size)
    return config, model


def _with_source(line: str, config: Config) -> str:
    """`key = value: reason` of another room, with the file or flag that the value came from."""
    key = re.match(r"[\w.]*", line)[0]  # type: ignore[index]
    source = config.sources.get(key) or config.sources.get(key.rpartition(".")[0])
    return line.replace(":", f" (from {source}):", 1) if source else line


def check_config(config: Config, model: ModelShape | None, world_size: int) -> list[Problem]:
    """All problems of a configuration, which is left as it is.

    Without a model, the checks that need one are left out.
    """
    shard = derived.shard_degree(config.parallelism, world_size)
    ranks = None if shard is None else shard * config.parallelism.data_parallel_replicate_degree
    facts = Facts(config, model, world_size, ranks)
    return [told(config, *finding) for check in CHECKS for finding in check(facts)]


def _world(facts: Facts) -> Findings:
    config, _, world, ranks = facts
    if ranks is None:
        sizes = {axis: get_value(config, key) for axis, key in DEGREES.items()}
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        others = derived.degrees_but_shard(config.parallelism)
        fix = f"let pp x dp_replicate x cp x tp be {one_of(divisors(world))}, and {SHARD} -1"
        fix += f", or start {others} ranks (torchrun --nproc_per_node {others})"
        if world % others == 0:
            fix = f"set {SHARD} to {world // others}, or to -1 for the rest of the world"
        # One of those that are not 1 is the one to change.
        keys = sorted(reversed(DEGREES.values()), key=lambda key: get_value(config, key) in (1, -1))
        yield keys, f"{product} is no mesh of {world} ranks", fix


def _aliases(facts: Facts) -> Findings:
    for key, (alias, means) in derived.ALIASES.items():
        meant = means.get(get_value(facts.config, alias))
        said = get_value(facts.config, key)
        if meant is not None and key in facts.config.sources and said != meant:
            reason = f"means {key} = {meant}, which is set to {said}"
            yield (alias, key), reason, "keep one of the two"


def _split_backward_and_zero_stage(facts: Facts) -> Findings:
    config, parallelism = facts.config, facts.config.parallelism
    schedule = parallelism.pipeline_parallel_schedule
    split = schedule in derived.SPLIT_BACKWARD_SCHEDULES
    if not split or parallelism.pipeline_parallel_degree == 1:
        return
    if derived.zero_stage(config) == 3:
        reason = f"under {schedule}, which splits the backward, resharded parameters give wrong "
        reason += "gradients: it looks them up before they are gathered again"
        fix = f"set {ZERO_STAGE} to 2, or choose another schedule"
        yield (ZERO_STAGE, ZERO_STAGE_ALIAS, SCHEDULE, PIPELINE), reason, fix
    activation = config.activation_checkpoint
    per_op = activation.mode == "selective" and activation.selective_ac_option == "op"
    if per_op:
        reason = f"{schedule} splits the backward, and what an operator kept serves one backward"
        fix = "set it to a number, or choose another schedule"
        yield ("activation_checkpoint.selective_ac_option", SCHEDULE, PIPELINE), reason, fix


def _global_batch(facts: Facts) -> Findings:
    config, _, _, ranks = facts
    if config.training.local_batch_size == config.training.global_batch_size == -1:
        fix = f"give one of {LOCAL_BATCH} and {GLOBAL_BATCH} a number"
        yield (LOCAL_BATCH, GLOBAL_BATCH), "each would follow from the other", fix
        return
    local = derived.local_batch_size(config, ranks or 1)
    if ranks is not None and derived.global_batch_size(config, ranks) % (local * ranks):
        rows, unit = config.training.global_batch_size, local * ranks
        reason = f"{GLOBAL_BATCH} {rows} is not a multiple of {LOCAL_BATCH} {local} x "
        reason += f"{ranks} batch ranks = {unit}"
        fix = f"set {GLOBAL_BATCH} to {multiple(rows, unit)}"
        yield (GLOBAL_BATCH, LOCAL_BATCH, *DEGREES.values()), reason, fix


def _stages(facts: Facts) -> Findings:
    """The number of stages fits the schedule, the ranks and the layers."""
    config, model, parallelism = facts.config, facts.model, facts.config.parallelism
    degree, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    if degree == 1 or model is None:
        return
    stages, layers = derived.num_stages(config, model.num_hidden_layers), model.num_hidden_layers
    if schedule in derived.SINGLE_STAGE_SCHEDULES:
        fits, needs = stages == degree, f"{degree}, one a rank"
    elif schedule in derived.V_SCHEDULES:
        fits, needs = stages == 2 * degree, f"{2 * degree}, two a rank"
    else:
        fits = stages % degree == 0 and stages >= 2 * degree
        needs = f"a multiple of {degree}, at least {2 * degree}"
    said = LAYERS_PER_STAGE if parallelism.module_fqns_per_model_part is None else BY_HAND
    if not fits:
        reason = f"{stages} stages, and {schedule} on {degree} ranks needs {needs}"
        yield (said, SCHEDULE, PIPELINE), reason, f"leave {said} out, or choose another schedule"
    elif stages > layers:
        fix = f"set {PIPELINE} to at most {max(1, layers * degree // stages)}"
        reason = f"{stages} pipeline stages, and the model has {layers} layers"
        yield (PIPELINE, SCHEDULE, said), reason, fix


def _modules_by_hand(facts: Facts) -> Findings:
    """Every module of the model stands in module_fqns_per_model_part, once and in order."""
    parallelism, model = facts.config.parallelism, facts.model
    parts = parallelism.module_fqns_per_model_part
    if parallelism.pipeline_parallel_degree == 1 or parts is None or model is None:
        return
    layers = [f"layers.{index}" for index in range(model.num_hidden_layers)]
    expected = ["embed_tokens", *layers, "norm", "lm_head"]
    given = [name for part in parts for name in part]
    pairs = itertools.zip_longest(given, expected, fillvalue="nothing")
    wrong = [f"{name} stands where {right} belongs" for name, right in pairs if name != right]
    wrong += ["a part is empty"] * (not all(parts))
    if wrong:
        fix = "name each module of the model once, in its order, at least one in each part"
        yield (BY_HAND, PIPELINE), wrong[0], fix


def _microbatches(facts: Facts) -> Findings:
    """Rows divide into micro-batches, and the schedule runs that many; else the run would hang."""
    config, model, _, ranks = facts
    degree = config.parallelism.pipeline_parallel_degree
    if config.training.local_batch_size == config.training.global_batch_size == -1:
        return  # said by _global_batch
    local = derived.local_batch_size(config, ranks or 1)
    size = config.parallelism.pipeline_parallel_microbatch_size
    if degree > 1 and local % size:
        reason = f"{size} rows a micro-batch do not divide {LOCAL_BATCH} {local}"
        fix = f"set {MICROBATCH} to {one_of(divisors(local))}"
        yield (MICROBATCH, LOCAL_BATCH, PIPELINE), reason, fix
    elif degree > 1 and ranks is not None and model is not None:
        stages = derived.num_stages(config, model.num_hidden_layers)
        rows = derived.global_batch_size(config, ranks)
        schedule, count = config.parallelism.pipeline_parallel_schedule, rows // ranks // size
        needs = derived.schedule_needs(schedule, count, stages=stages, degree=degree)
        if needs is not None and rows % (local * ranks) == 0:
            reason = f"{schedule} on {degree} ranks needs {needs} micro-batches; {rows} rows over "
            reason += f"{ranks} batch ranks in micro-batches of {size} make {count}"
            # Every schedule takes a whole number of micro-batches a stage.
            unit = ranks * math.lcm(local, stages * size)
            fix = f"set {GLOBAL_BATCH} to {multiple(rows, unit)}"
            keys = (SCHEDULE, MICROBATCH, GLOBAL_BATCH, LOCAL_BATCH, LAYERS_PER_STAGE, BY_HAND)
            yield (*keys, *DEGREES.values()), reason, fix


def _data(facts: Facts) -> Findings:
    config = facts.config
    needs_tokenizer = False
    for name in ["training"] + ["validation"] * config.validation.enable:
        dataset, path = (get_value(config, f"{name}.{key}") for key in ("dataset", "dataset_path"))
        keys = [f"{name}.dataset_path", f"{name}.dataset"]
        keys += ["validation.enable"] * (name == "validation")
        # Of the kinds that auto finds, token shards alone have an index beside them.
        shards = dataset == "auto" and os.path.isfile(os.path.join(path, "index.json"))
        needs_tokenizer |= dataset not in ("tokens", "synthetic") and not shards
        if dataset == "synthetic":
            continue
        if not path:
            reason = f"{name}.dataset {dataset} reads a file or a folder, and none is given"
            yield keys, reason, f'set {name}.dataset_path, or {name}.dataset to "synthetic"'
        elif not os.path.exists(path):
            yield keys, "no such file or folder", "correct the path"
        elif not (os.listdir(path) if os.path.isdir(path) else os.path.getsize(path)):
            yield keys, "is empty", "give a file or a folder with data"
    tokenizer = os.path.join(config.model.hf_assets_path, "tokenizer.json")
    if needs_tokenizer and not os.path.isfile(tokenizer):
        keys = ["training.dataset", "validation.dataset", "validation.enable"]
        reason = f"there is no {tokenizer}, and the data has to be tokenised"
        fix = "give the folder that holds tokenizer.json, or data of dataset tokens or synthetic"
        yield ("model.hf_assets_path", *keys), reason, fix


def _initial_load(facts: Facts) -> Findings:
    checkpoint = facts.config.checkpoint
    path, in_hf = checkpoint.initial_load_path, checkpoint.initial_load_in_hf
    if not (checkpoint.enable and path):
        return
    keys = (INITIAL_LOAD, IN_HF, "checkpoint.enable")
    is_hf = os.path.isfile(os.path.join(path, "config.json"))
    if not os.path.isdir(path):
        fix = "give a Hugging Face folder" if in_hf else "give the folder of a saved step"
        yield keys, "no such folder", fix
    elif in_hf and not is_hf:
        yield keys, f"there is no config.json in it, and {IN_HF} is set", "give a whole folder"
    elif is_hf and not in_hf:
        yield keys, "it is a Hugging Face folder", f"set {IN_HF} to true"
    elif in_hf and not checkpoint.initial_load_model_only:
        whole = "checkpoint.initial_load_model_only"
        yield (whole, *keys), "a Hugging Face folder holds weights alone", "set it to true"


def _profiler(facts: Facts) -> Findings:
    profiling = facts.config.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < needed:
        reason = f"less than the {profiling.profiler_warmup} steps of profiling.profiler_warmup "
        reason += f"and the {profiling.profiler_active} of profiling.profiler_active together"
        names = ("profile_freq", "profiler_warmup", "profiler_active", "enable_profiling")
        keys = [f"profiling.{name}" for name in names]
        yield keys, reason, f"set profiling.profile_freq to at least {needed}"


CHECKS: tuple[Callable[[Facts], Findings], ...] = (
    _world,
    _aliases,
    _split_backward_and_zero_stage,
    model_checks.tensor_parallel,
    model_checks.expert_parallel,
    model_checks.expert_kernel,
    model_checks.attention_backend,
    model_checks.float8,
    model_checks.tokens_of_a_row,
    model_checks.context_parallel,
    model_checks.learned_positions,
    _global_batch,
    _stages,
    _modules_by_hand,
    _microbatches,
    _data,
    _initial_load,
    _profiler,
    model_checks.compile_pieces,
    model_checks.memory_budget,
)

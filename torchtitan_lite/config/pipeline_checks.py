"""What must hold for a pipeline: stages, micro-batches, and the two against the schedule.

A micro-batch count that a schedule cannot run, or rows that do not divide into micro-batches, show
at run time as a hang until the group's timeout; so they are found here. Without pp nothing is
checked. Proven in tests/config/test_pipeline_checks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torchtitan_lite.config.derived import (
    SINGLE_STAGE_SCHEDULES,
    V_SCHEDULES,
    divisors,
    global_batch_size,
    num_microbatches,
    num_stages,
    schedule_accepts,
)
from torchtitan_lite.config.facts import (
    BATCH,
    DEGREES,
    PIPELINE,
    Facts,
    Problem,
    nearest_number,
    problem,
)
from torchtitan_lite.config.values import nearest, one_of

SCHEDULE = "parallelism.pipeline_parallel_schedule"
MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
LAYERS_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
BY_HAND = "parallelism.module_fqns_per_model_part"


def _stages(facts: Facts) -> Iterator[Problem]:
    """The number of stages fits the schedule, the ranks and the layers."""
    config, degree = facts.config, facts.config.parallelism.pipeline_parallel_degree
    if degree == 1 or facts.model is None:
        return
    layers = facts.model.num_hidden_layers
    stages = num_stages(config, layers)
    schedule = config.parallelism.pipeline_parallel_schedule
    wrong = _stages_for_schedule(schedule, stages=stages, degree=degree)
    if wrong is not None:
        keys = (BY_HAND,) if config.parallelism.module_fqns_per_model_part is not None else ()
        yield problem(
            config,
            (*keys, LAYERS_PER_STAGE, SCHEDULE, PIPELINE),
            reason=f"{stages} stages, and {schedule} on {degree} ranks needs {wrong}",
            fix=f"leave {keys[0] if keys else LAYERS_PER_STAGE} out, or choose another schedule",
        )
    elif stages > layers:
        yield problem(
            config,
            (PIPELINE, SCHEDULE, LAYERS_PER_STAGE, BY_HAND),
            reason=f"{stages} pipeline stages, and the model has {layers} layers",
            fix=f"set {PIPELINE} to at most {max(1, layers * degree // stages)}",
        )


def _stages_for_schedule(schedule: str, *, stages: int, degree: int) -> str | None:
    """What number of stages a schedule needs, if it is not the given one."""
    if schedule in SINGLE_STAGE_SCHEDULES:
        return None if stages == degree else f"{degree}, one a rank"
    if schedule in V_SCHEDULES:
        return None if stages == 2 * degree else f"{2 * degree}, two a rank"
    if stages % degree or stages < 2 * degree:
        return f"a multiple of {degree}, at least {2 * degree}"
    return None


def _modules_by_hand(facts: Facts) -> Iterator[Problem]:
    """Every module of the model stands in module_fqns_per_model_part, once and in order."""
    config, parts = facts.config, facts.config.parallelism.module_fqns_per_model_part
    if config.parallelism.pipeline_parallel_degree == 1 or parts is None or facts.model is None:
        return
    layers = [f"layers.{index}" for index in range(facts.model.num_hidden_layers)]
    expected = ["embed_tokens", *layers, "norm", "lm_head"]
    wrong = _first_difference([name for part in parts for name in part], expected)
    if wrong is None and not all(parts):
        wrong = ("a part is empty", "name at least one module in each part")
    if wrong is not None:
        reason, fix = wrong
        yield problem(config, (BY_HAND, PIPELINE), reason=reason, fix=fix)


def _first_difference(given: list[str], expected: list[str]) -> tuple[str, str] | None:
    """Why a list of modules is not the expected one, and the fix."""
    for name in given:
        if name not in expected:
            close = nearest(name, expected)
            fix = f"did you mean {close[0]}?" if close else "remove it"
            return f"the model has no module {name}", fix
        if given.count(name) > 1:
            return f"{name} is named {given.count(name)} times", "name each module once"
    missing = [name for name in expected if name not in given]
    if missing:
        return f"{_some(missing)} in no part", "name each module once"
    for name, rightful in zip(given, expected, strict=True):
        if name != rightful:
            return f"{name} stands where {rightful} belongs", "keep the order of the model"
    return None


def _some(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit])
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"


def _microbatches(facts: Facts) -> Iterator[Problem]:
    """Rows divide into micro-batches, and the schedule runs that many."""
    config, ranks = facts.config, facts.batch_ranks
    if config.parallelism.pipeline_parallel_degree == 1:
        return
    local = config.training.local_batch_size
    size = config.parallelism.pipeline_parallel_microbatch_size
    if local % size:
        fitting = divisors(local)
        yield problem(
            config,
            (MICROBATCH, "training.local_batch_size", PIPELINE),
            reason=f"{size} rows a micro-batch do not divide training.local_batch_size {local}",
            fix=f"set {MICROBATCH} to {one_of(fitting)}; the nearest is "
            f"{nearest_number(fitting, size)}",
        )
        return
    if ranks is None or facts.model is None or global_batch_size(config, ranks) % (local * ranks):
        return
    yield from _schedule(facts, ranks, num_stages(config, facts.model.num_hidden_layers))


def _schedule(facts: Facts, ranks: int, stages: int) -> Iterator[Problem]:
    config = facts.config
    parallelism = config.parallelism
    schedule, degree = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree

    def accepts(count: int) -> bool:
        return schedule_accepts(
            schedule, num_microbatches=count, num_stages=stages, pipeline_degree=degree
        )

    count = num_microbatches(config, ranks)
    if accepts(count):
        return
    rounds = count // degree
    reason = (
        f"{schedule} on {degree} ranks needs at least {stages} micro-batches, one a stage"
        if schedule in ("1F1B", "DualPipeV")
        else f"{schedule} on {degree} ranks needs a multiple of {rounds} micro-batches"
    )
    rows = global_batch_size(config, ranks)
    yield problem(
        config,
        (SCHEDULE, MICROBATCH, *BATCH, *DEGREES, LAYERS_PER_STAGE, BY_HAND),
        reason=f"{reason}; {rows} rows over {ranks} batch ranks in micro-batches of "
        f"{parallelism.pipeline_parallel_microbatch_size} make {count}",
        fix=_fitting_batch(facts, ranks, rows=rows, stages=stages, accepts=accepts),
    )


def _fitting_batch(
    facts: Facts, ranks: int, *, rows: int, stages: int, accepts: Callable[[int], bool]
) -> str:
    """The global batch nearest to `rows`, and the micro-batch sizes, that the schedule accepts."""
    local = facts.config.training.local_batch_size
    size = facts.config.parallelism.pipeline_parallel_microbatch_size
    unit = local * ranks
    # One accumulation step of a whole multiple of the stages is always within this reach.
    reach = rows // unit + stages * size + 1
    batches = [unit * step for step in range(1, reach + 1)]
    fitting = [batch for batch in batches if accepts(batch // ranks // size)]
    sizes = [other for other in divisors(local) if accepts(rows // ranks // other)]
    advice = f"set training.global_batch_size to {nearest_number(fitting, rows)}"
    return advice + (f", or {MICROBATCH} to {one_of(sizes)}" if sizes else "")


PIPELINE_CHECKS = (_stages, _modules_by_hand, _microbatches)

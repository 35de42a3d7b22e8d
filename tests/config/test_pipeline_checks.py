"""Stages and micro-batches against layers, ranks and schedule."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.config.cases import Shape, degrees, problems

SCHEDULE = "--parallelism.pipeline_parallel_schedule="
LAYERS = "--parallelism.pipeline_parallel_layers_per_stage="
MICROBATCH = "--parallelism.pipeline_parallel_microbatch_size="
MODULES = ["embed_tokens", *(f"layers.{index}" for index in range(6)), "norm", "lm_head"]
SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V = ("ZBVZeroBubble", "DualPipeV")


def _by_hand(*parts: list[str]) -> str:
    return f"--parallelism.module_fqns_per_model_part={json.dumps(parts)}"


@pytest.mark.parametrize("schedule", [*SINGLE, *LOOPED, *V])
def test_each_schedule_passes_with_its_own_number_of_stages(schedule: str) -> None:
    assert problems([*degrees(pp=2), SCHEDULE + schedule], world=2) == []


@pytest.mark.parametrize(
    ("schedule", "layers", "needs"),
    [
        *((name, 2, "3 stages, and {} on 2 ranks needs 2, one a rank") for name in SINGLE),
        *((name, 6, "1 stages, and {} on 2 ranks needs 2, one a rank") for name in SINGLE),
        *(
            (name, 2, "3 stages, and {} on 2 ranks needs a multiple of 2, at least 4")
            for name in LOOPED
        ),
        *(
            (name, 3, "2 stages, and {} on 2 ranks needs a multiple of 2, at least 4")
            for name in LOOPED
        ),
        *((name, 1, "6 stages, and {} on 2 ranks needs 4, two a rank") for name in V),
    ],
)
def test_layers_per_stage_must_give_the_stages_of_the_schedule(
    schedule: str, layers: int, needs: str
) -> None:
    argv = [*degrees(pp=2), SCHEDULE + schedule]
    (line,) = problems([*argv, f"{LAYERS}{layers}"], world=2)
    assert needs.format(schedule) in line
    assert line.startswith("parallelism.pipeline_parallel_layers_per_stage")


def test_layers_per_stage_that_fit_pass() -> None:
    assert problems([*degrees(pp=2), f"{LAYERS}3"], world=2) == []
    assert problems([*degrees(pp=2), f"{LAYERS}1", SCHEDULE + "Interleaved1F1B"], world=2) == []


def test_no_more_stages_than_layers() -> None:
    (line,) = problems(degrees(pp=8), world=8)
    assert "8 pipeline stages, and the model has 6 layers" in line
    assert line.endswith("set parallelism.pipeline_parallel_degree to at most 6")
    assert problems(degrees(pp=6), world=6) == []
    (line,) = problems([*degrees(pp=4), SCHEDULE + "LoopedBFS"], world=4)
    assert line.endswith("set parallelism.pipeline_parallel_degree to at most 3")


def test_parts_by_hand_that_hold_every_module_in_order_pass() -> None:
    argv = degrees(pp=2)
    assert problems([*argv, _by_hand(MODULES[:3], MODULES[3:])], world=2) == []
    four = _by_hand(MODULES[:2], MODULES[2:3], MODULES[3:6], MODULES[6:])
    assert problems([*argv, four, SCHEDULE + "LoopedBFS"], world=2) == []
    # Without a pipeline they are not looked at.
    assert problems([_by_hand(["nonsense"])]) == []


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (
            [MODULES[:3], MODULES[3:8]],
            "lm_head is in no part; name each module once",
        ),
        (
            [MODULES[4:], MODULES[8:]],
            "lm_head is named 2 times; name each module once",
        ),
        ([["embed_tokens"], ["lm_head"]], "layers.0, layers.1, layers.2 and 4 more are in no part"),
        (
            [["tok_embeddings", *MODULES[1:3]], MODULES[3:]],
            "the model has no module tok_embeddings",
        ),
        (
            [["embed_token", *MODULES[1:3]], MODULES[3:]],
            "the model has no module embed_token; did you mean embed_tokens?",
        ),
        (
            [MODULES[3:], MODULES[:3]],
            "layers.2 stands where embed_tokens belongs; keep the order of the model",
        ),
        ([MODULES, []], "a part is empty; name at least one module in each part"),
    ],
)
def test_parts_by_hand_name_what_is_wrong(parts: list[list[str]], told: str) -> None:
    (line,) = problems([*degrees(pp=2), _by_hand(*parts)], world=2)
    assert line.startswith("parallelism.module_fqns_per_model_part = ")
    assert told in line


def test_the_number_of_parts_by_hand_fits_the_schedule() -> None:
    three = _by_hand(MODULES[:3], MODULES[3:6], MODULES[6:])
    (line,) = problems([*degrees(pp=2), three], world=2)
    assert "3 stages, and 1F1B on 2 ranks needs 2, one a rank" in line
    assert "leave parallelism.module_fqns_per_model_part out" in line


def test_rows_divide_into_micro_batches() -> None:
    argv = [*degrees(pp=2), f"{MICROBATCH}3"]
    (line,) = problems(argv, world=2)
    assert line == (
        "parallelism.pipeline_parallel_microbatch_size = 3 "
        "(from --parallelism.pipeline_parallel_microbatch_size): 3 rows a micro-batch do not "
        "divide training.local_batch_size 8; set parallelism.pipeline_parallel_microbatch_size "
        "to 1, 2, 4 or 8; the nearest is 2"
    )
    assert problems([*argv, f"{MICROBATCH}4"], world=2) == []
    assert problems(argv[1:], world=1) == []


def test_1f1b_needs_a_micro_batch_a_stage() -> None:
    argv = [*degrees(pp=4), "--training.local_batch_size=2"]
    (line,) = problems(argv, world=4)
    assert "1F1B on 4 ranks needs at least 4 micro-batches, one a stage" in line
    assert "2 rows over 1 batch ranks in micro-batches of 1 make 2" in line
    assert line.endswith("set training.global_batch_size to 4")
    assert problems([*argv, "--training.global_batch_size=4"], world=4) == []
    assert problems([*argv, SCHEDULE + "GPipe"], world=4) == []


def test_the_share_of_the_whole_global_batch_is_one_call_of_the_schedule() -> None:
    # 1 row at a time, 4 accumulation steps: 4 micro-batches, enough for 4 stages.
    argv = [*degrees(pp=4), "--training.local_batch_size=1", "--training.global_batch_size=8"]
    assert problems(argv, world=8) == []
    assert len(problems([*argv, *degrees(pp=4, dr=4)], world=16)) == 1


@pytest.mark.parametrize("schedule", [*SINGLE, *LOOPED, *V])
def test_the_advice_about_micro_batches_works(schedule: str) -> None:
    shape = Shape(num_hidden_layers=16)
    refused = 0
    for pp, rows, size in itertools.product((2, 4), (1, 2, 3, 5, 6, 7, 8, 10), (1, 2)):
        if rows % size:
            continue
        argv = [
            *degrees(pp=pp, dr=2),
            SCHEDULE + schedule,
            f"{MICROBATCH}{size}",
            f"--training.local_batch_size={rows}",
        ]
        for line in problems(argv, world=2 * pp, shape=shape):
            refused += 1
            batch, _, sizes = line.rpartition("; ")[2].partition(", or ")
            advised = batch.replace("set ", "--").replace(" to ", "=")
            assert problems([*argv, advised], world=2 * pp, shape=shape) == [], line
            if sizes:
                advised = f"{MICROBATCH}{sizes.split(' to ')[1].split(',')[0].split()[0]}"
                assert problems([*argv, advised], world=2 * pp, shape=shape) == [], line
    assert (refused > 0) == (schedule not in ("GPipe", "LoopedBFS", "ZBVZeroBubble"))

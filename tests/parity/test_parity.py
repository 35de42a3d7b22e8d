"""Any mesh trains what one process trains: a table of meshes, a case a row.

Each row is four optimizer steps of the real Trainer; losses, gradient norms, the first step's
gradients and the last parameters equal one process's to a relative 1e-5. Each mesh runs with the
clip inactive and once more with it active: an active clip and Adam hide any constant factor in
the gradients. test_twins.py breaks each guarantee and sees it go red.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.parity.harness import TINY, Mesh, assert_equal, reference, run

CLIPPED = {"training.max_norm": 0.1}

MESHES = [
    Mesh(pp=pp, dp_shard=dp, tp=tp)
    for world in (2, 4, 8)
    for pp in (1, 2, 4, 8)
    for dp in (1, 2, 4, 8)
    for tp in (1, 2, 4, 8)
    if pp * dp * tp == world
]
# In every run the rows of the table on up to four ranks; those on eight and the rest of the clipped
# rows are the slow proofs of `make test-all`.


def rows(meshes: list[Mesh]) -> list[Any]:
    return [
        pytest.param(
            mesh,
            id=str(mesh),
            marks=() if mesh.world < 8 else pytest.mark.slow,
        )
        for mesh in meshes
    ]


CLIPS = pytest.mark.parametrize(
    "clip",
    [
        pytest.param({}, id="unclipped"),
        pytest.param(CLIPPED, id="clipped", marks=pytest.mark.slow),
    ],
)
SCHEDULES = [
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]


def check(mesh: Mesh, options: dict[str, Any], **model_changes: Any) -> None:
    if mesh.pp > 4:
        model_changes["num_hidden_layers"] = mesh.pp  # a stage has at least one
    model = dataclasses.replace(TINY, **model_changes)
    assert_equal(run(mesh, options, model), reference(options, model_changes))


@CLIPS
@pytest.mark.parametrize("mesh", rows(MESHES))
def test_every_mesh_of_pp_dp_tp_equals_one_process(mesh: Mesh, clip: dict[str, Any]) -> None:
    check(mesh, clip)


@pytest.mark.parametrize(
    "mesh", [Mesh(dp_shard=2), Mesh(tp=2), Mesh(pp=2), Mesh(dp_shard=2, tp=2)], ids=str
)
def test_each_axis_with_an_active_clip_equals_one_process(mesh: Mesh) -> None:
    """The quick ones of the clipped rows of the table above, which are slow proofs."""
    check(mesh, CLIPPED)


@CLIPS
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(Mesh(dp_shard=2), id="dp2"),
        pytest.param(Mesh(dp_shard=2, tp=2), id="dp2-tp2"),
        pytest.param(Mesh(pp=2, dp_shard=2), id="pp2-dp2", marks=pytest.mark.slow),
    ],
)
def test_every_zero_stage_equals_one_process(
    mesh: Mesh, zero_stage: int, clip: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"parallelism.zero_stage": zero_stage, **clip}
    if mesh.pp == 1:
        options["training.local_batch_size"] = 2  # two micro-batches a step
    check(mesh, options)


@CLIPS
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize(
    "mesh",
    rows(
        [
            Mesh(dp_replicate=2, dp_shard=2),
            Mesh(dp_replicate=2, dp_shard=2, tp=2),
            Mesh(pp=2, dp_replicate=2, dp_shard=2),
        ]
    ),
)
def test_replicas_of_shards_equal_one_process(
    mesh: Mesh, zero_stage: int, clip: dict[str, Any]
) -> None:
    check(mesh, {"parallelism.zero_stage": zero_stage, **clip})


@CLIPS
@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_equals_one_process(schedule: str, dp: int, clip: dict[str, Any]) -> None:
    check(
        Mesh(pp=2, dp_shard=dp),
        {
            "parallelism.pipeline_parallel_schedule": schedule,
            "parallelism.zero_stage": 2,
            **clip,
        },
    )


@pytest.mark.parametrize(
    "schedule", ["1F1B", pytest.param("ZBVZeroBubble", marks=pytest.mark.slow)]
)
def test_a_pipeline_with_every_plan_at_once_equals_one_process(schedule: str) -> None:
    check(
        Mesh(pp=2, dp_shard=2, tp=2),
        {
            "parallelism.pipeline_parallel_schedule": schedule,
            "parallelism.zero_stage": 1,
            "activation_checkpoint.mode": "full",
            "loss.z_loss_weight": 1e-3,
            **CLIPPED,
        },
    )


@CLIPS
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(Mesh(tp=2), id="tp2"),
        pytest.param(Mesh(tp=4), id="tp4", marks=pytest.mark.slow),
        pytest.param(Mesh(dp_shard=2, tp=2), id="dp2-tp2"),
        pytest.param(Mesh(pp=2, tp=2), id="pp2-tp2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {"parallelism.enable_sequence_parallel": False},
        {"parallelism.disable_loss_parallel": True},
        {
            "parallelism.enable_sequence_parallel": False,
            "parallelism.disable_loss_parallel": True,
        },
    ],
    ids=["without-sp", "without-loss-parallel", "without-both"],
)
def test_each_form_of_tensor_parallelism_equals_one_process(
    mesh: Mesh, options: dict[str, Any], clip: dict[str, Any]
) -> None:
    check(mesh, {**options, **clip})


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_accumulation_changes_nothing(accumulation: int, zero_stage: int) -> None:
    options: dict[str, Any] = {
        "training.global_batch_size": 12,
        "training.local_batch_size": 6 // accumulation,
        "parallelism.zero_stage": zero_stage,
    }
    kept = {**options, "training.local_batch_size": 12}
    assert_equal(run(Mesh(dp_shard=2), options), run(Mesh(), {**kept, "parallelism.zero_stage": 3}))


@CLIPS
@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        (Mesh(dp_shard=2), "1F1B"),
        (Mesh(tp=2), "1F1B"),
        (Mesh(dp_shard=2, tp=2), "1F1B"),
        (Mesh(pp=2), "1F1B"),
        (Mesh(pp=4), "1F1B"),
        pytest.param(Mesh(pp=2, dp_shard=2, tp=2), "1F1B", marks=pytest.mark.slow),
        (Mesh(pp=2), "Interleaved1F1B"),
        (Mesh(pp=2, dp_shard=2), "ZBVZeroBubble"),
    ],
    ids=lambda value: str(value),
)
def test_a_tied_embedding_is_one_weight_on_every_mesh(
    mesh: Mesh, schedule: str, clip: dict[str, Any]
) -> None:
    options = {
        "parallelism.pipeline_parallel_schedule": schedule,
        "parallelism.zero_stage": 2,
        **clip,
    }
    check(mesh, options, tie_word_embeddings=True)


@CLIPS
@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpoint.mode": "full"},
        {
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "3",
        },
        {
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "op",
        },
    ],
    ids=["full", "every-third", "per-op"],
)
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(Mesh(), id="one"),
        pytest.param(Mesh(dp_shard=2, tp=2), id="dp2-tp2"),
        pytest.param(Mesh(pp=2), id="pp2", marks=pytest.mark.slow),
    ],
)
def test_recomputation_changes_nothing(
    mesh: Mesh, options: dict[str, Any], clip: dict[str, Any]
) -> None:
    check(mesh, {**options, **clip})


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(Mesh(dp_shard=2, tp=2), id="dp2-tp2"),
        pytest.param(Mesh(pp=2, dp_replicate=2), id="pp2-dr2", marks=pytest.mark.slow),
    ],
)
def test_clipping_by_other_norms_equals_one_process(mesh: Mesh, norm_type: float) -> None:
    check(mesh, {"training.norm_type": norm_type, "training.max_norm": 0.01})


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(Mesh(dp_shard=2), id="dp2"),
        pytest.param(Mesh(pp=2, tp=2), id="pp2-tp2", marks=pytest.mark.slow),
    ],
)
def test_sgd_equals_one_process(mesh: Mesh) -> None:
    """Plain gradient descent: a constant factor in the gradients shows in every parameter."""
    check(mesh, {"optimizer.name": "SGD", "optimizer.lr": 1.0, "optimizer.momentum": 0.9})


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(Mesh(dp_shard=4), id="dp4", marks=pytest.mark.slow),
        pytest.param(Mesh(dp_shard=2, tp=2), id="dp2-tp2"),
        pytest.param(Mesh(pp=2), id="pp2"),
        pytest.param(Mesh(pp=2, dp_shard=2, tp=2), id="pp2-dp2-tp2", marks=pytest.mark.slow),
    ],
)
def test_the_validation_loss_is_the_same_on_every_mesh(mesh: Mesh) -> None:
    """13 held-out rows, which no mesh divides; and training goes on as if nothing had happened."""
    options = {
        "validation.enable": True,
        "validation.dataset": "synthetic",
        "validation.freq": 2,
        "validation.local_batch_size": 2,
    }
    validated = run(mesh, options)
    assert len(validated.series("validation_loss")) == 2
    assert_equal(validated, reference(options))
    assert_equal(validated, dataclasses.replace(reference({}), metrics=validated.metrics))


def test_layers_may_be_given_to_stages_by_hand_and_unevenly() -> None:
    parts = [
        ["embed_tokens", "layers.0"],
        [*(f"layers.{index}" for index in range(1, 4)), "norm", "lm_head"],
    ]
    check(Mesh(pp=2), {"parallelism.module_fqns_per_model_part": parts})
    # Without a pipeline the list has no effect (and a warning says so): the model stays whole.
    check(Mesh(), {"parallelism.module_fqns_per_model_part": parts})


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_four_ranks_equals_one_process(schedule: str) -> None:
    """Two stages a rank where the schedule has them: eight stages of one layer."""
    options = {"parallelism.pipeline_parallel_schedule": schedule, "parallelism.zero_stage": 2}
    check(Mesh(pp=4), options, num_hidden_layers=8)

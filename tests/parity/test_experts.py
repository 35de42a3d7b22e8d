"""Mixture of experts: every mesh gives the gradients of one process that loops over its experts.

Each row trains four steps with the auxiliary loss, the z-loss and the balancing of the bias on,
clip off, and is compared with one process that computes each expert by a product of its own
(moe.kernel = loop): losses, norms, first gradients and last parameters of routers, shared and
routed experts, and the counts of tokens, exactly.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.harness import TINY, Mesh, RecordingTrainer, Run, assert_equal, run

MIXTURE = dataclasses.replace(
    TINY,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    shared_expert_intermediate_size=32,
    shared_expert_gate=True,
    router_scores="sigmoid",
    router_bias=True,
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    n_group=4,
    topk_group=2,
)
LATENT = dataclasses.replace(
    MIXTURE,
    kv_lora_rank=12,
    q_lora_rank=20,
    qk_nope_head_dim=6,
    v_head_dim=7,
    rope_interleave=True,
    num_key_value_heads=1,  # of no meaning to it, and divided by no mesh
)
BALANCED = {
    "moe.aux_loss_weight": 0.1,
    "moe.z_loss_weight": 0.01,
    "moe.bias_update_speed": 0.01,
    # As in test_families.py: a router's gradient has elements of the size of eps.
    "optimizer.eps": 1e-4,
}
EP, ZERO = "parallelism.expert_parallel_degree", "parallelism.zero_stage"
OFFLOAD = "training.enable_cpu_offload"
NO_SEQUENCE_PARALLEL = {"parallelism.enable_sequence_parallel": False}

ROWS: list[tuple[str, Mesh, dict[str, Any]]] = [
    ("ep2", Mesh(dp_shard=2), {EP: 2}),
    ("ep4", Mesh(dp_shard=4), {EP: 4}),
    ("ep2-of-dp4", Mesh(dp_shard=4), {EP: 2}),
    ("ep2-of-tp2", Mesh(tp=2), {EP: 2}),
    ("ep2-dp2-tp2", Mesh(dp_shard=2, tp=2), {EP: 2}),
    ("ep4-dp2-tp2", Mesh(dp_shard=2, tp=2), {EP: 4}),
    ("ep4-dp2-tp2-no-sp", Mesh(dp_shard=2, tp=2), {EP: 4, **NO_SEQUENCE_PARALLEL}),
    ("ep2-pp2", Mesh(pp=2, dp_shard=2), {EP: 2}),
    ("ep4-pp2-dp2-tp2", Mesh(pp=2, dp_shard=2, tp=2), {EP: 4}),
    ("ep2-hsdp", Mesh(dp_replicate=2, dp_shard=2), {EP: 2}),
    ("ep1-tp2", Mesh(tp=2), {}),
    ("ep1-dp2-tp2", Mesh(dp_shard=2, tp=2), {}),
    ("zero0", Mesh(dp_shard=4), {EP: 2, ZERO: 0}),
    ("zero1", Mesh(dp_shard=4), {EP: 2, ZERO: 1}),
    ("zero2", Mesh(dp_shard=4), {EP: 2, ZERO: 2}),
    ("full-recomputation", Mesh(dp_shard=2), {EP: 2, "activation_checkpoint.mode": "full"}),
    (
        "per-op-recomputation",
        Mesh(dp_shard=2, tp=2),
        {
            EP: 4,
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "op",
        },
    ),
    ("offload", Mesh(), {OFFLOAD: True}),
    ("ep2-offload", Mesh(dp_shard=2), {EP: 2, OFFLOAD: True}),
    ("ep2-of-dp4-offload", Mesh(dp_shard=4), {EP: 2, OFFLOAD: True}),
    ("accumulation", Mesh(dp_shard=2), {EP: 2, "training.local_batch_size": 1}),
    ("interleaved", Mesh(pp=2), {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}),
]


@cache
def oracle(form: str, latent: bool = False) -> Run:
    options = {**BALANCED, "moe.kernel": "loop", "moe.aux_loss_form": form}
    return run(Mesh(), options, model=LATENT if latent else MIXTURE)


def assert_same(ours: Run, expected: Run) -> None:
    assert ours.series("expert_tokens") == expected.series("expert_tokens")
    assert set(ours.series("expert_dropped")) == {0.0}
    for name in ("moe_aux_loss", "moe_z_loss"):
        assert ours.series(name) == pytest.approx(expected.series(name), rel=1e-6)
    assert_equal(ours, expected)


# The rest of the table is a slow proof; tests/parallel/test_expert_meshes.py has its meshes too,
# without the Trainer.
QUICK = (
    "ep4-dp2-tp2",
    "ep2-pp2",
    "full-recomputation",
)


def cases() -> list[Any]:
    slow = pytest.mark.slow
    return [
        pytest.param(mesh, options, id=name, marks=() if name in QUICK else slow)
        for name, mesh, options in ROWS
    ]


@pytest.mark.parametrize(("mesh", "options"), cases())
def test_every_mesh_equals_a_loop_over_experts(mesh: Mesh, options: dict[str, Any]) -> None:
    assert_same(run(mesh, {**BALANCED, **options}, model=MIXTURE), oracle("sequence"))


def test_accumulation_of_three_micro_batches_changes_nothing() -> None:
    rows = {"training.global_batch_size": 6}
    ours = run(Mesh(dp_shard=2), {**BALANCED, **rows, EP: 2, "training.local_batch_size": 1},
               model=MIXTURE)  # fmt: skip
    alone = {**BALANCED, **rows, "moe.kernel": "loop", "training.local_batch_size": 6}
    assert_same(ours, run(Mesh(), alone, model=MIXTURE))


@pytest.mark.slow
def test_the_loss_with_the_load_of_the_last_global_batch_is_the_same_on_every_mesh() -> None:
    options = {**BALANCED, "moe.aux_loss_form": "global"}
    ours = run(Mesh(pp=2, dp_shard=2, tp=2), {**options, EP: 4}, model=MIXTURE)
    assert_same(ours, oracle("global"))
    assert ours.series("loss") != oracle("sequence").series("loss")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="sp"),
        pytest.param(NO_SEQUENCE_PARALLEL, id="no-sp", marks=pytest.mark.slow),
    ],
)
def test_latent_attention_is_cut_over_tensor_parallel_ranks(options: dict[str, Any]) -> None:
    ours = run(Mesh(dp_shard=2, tp=2), {**BALANCED, **options, EP: 2}, model=LATENT)
    assert_same(ours, oracle("sequence", latent=True))


def test_routers_stay_bit_equal_on_tensor_parallel_ranks_over_ten_steps() -> None:
    options = {**BALANCED, EP: 2, "training.steps": 10}
    ranks = run(Mesh(tp=2), options, model=MIXTURE, act=_train_and_return_routers).returned
    assert ranks[0].keys() == ranks[1].keys() and len(ranks[0]) == 6
    assert all(ranks[1][name].equal(tensor) for name, tensor in ranks[0].items())


def _train_and_return_routers(trainer: RecordingTrainer) -> dict[str, torch.Tensor]:
    trainer.train()
    stored = trainer.model.stored
    gates = {name: tensor for name, tensor in stored.items() if ".gate." in name}
    return {name: getattr(t, "_local_tensor", t).detach().clone() for name, t in gates.items()}


def test_balancing_evens_the_load() -> None:
    """With a fast bias the fullest expert holds less at the end than without one."""
    steps = {"training.steps": 40, "optimizer.lr": 1e-4}
    even = run(Mesh(), {"moe.bias_update_speed": 0.002, **steps}, model=MIXTURE)
    left_alone = run(Mesh(), {"moe.bias_update_speed": 0.0, **steps}, model=MIXTURE)
    loads = [sum(one.series("expert_load_max")[-5:]) / 5 for one in (even, left_alone)]
    assert loads[0] < 0.9 * loads[1]


def test_a_mixture_goes_on_from_any_mesh_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Experts of ep 4 resume on ep 2 of another mesh: weights, moments, biases and shares."""
    options = {**BALANCED, "moe.aux_loss_form": "global", "lr_scheduler.total_steps": 4}
    saving = {**options, "checkpoint.enable": True}
    run(Mesh(dp_shard=2, tp=2), {**saving, EP: 4, "training.steps": 2}, MIXTURE, folder=tmp_path)
    resumed = run(Mesh(pp=2, dp_shard=2), {**saving, EP: 2}, MIXTURE, folder=tmp_path)
    resumed.gradients, expected = {}, oracle("global")  # of step 3, not of the first
    assert_same(resumed, dataclasses.replace(expected, gradients={}))


def test_a_run_that_forgets_the_bias_would_be_seen(tmp_path: Path) -> None:
    saving = {**BALANCED, "lr_scheduler.total_steps": 4, "checkpoint.enable": True}
    run(Mesh(), {**saving, "training.steps": 2}, MIXTURE, folder=tmp_path)
    resumed = run(Mesh(), saving, MIXTURE, folder=tmp_path, act=_forget_the_bias)
    assert resumed.series("loss")[2:] != oracle("sequence").series("loss")[2:]
    assert resumed.series("expert_tokens")[2:] != oracle("sequence").series("expert_tokens")[2:]


def _forget_the_bias(trainer: RecordingTrainer) -> None:
    for name, tensor in trainer.model.stored.items():
        if name.endswith("e_score_correction_bias"):
            tensor.zero_()
    trainer.train()

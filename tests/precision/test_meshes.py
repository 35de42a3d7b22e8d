"""The real Trainer with float8 linears: one experiment on any mesh, and with any recomputation.

Powers of two make it one: what a number is rounded to does then not depend on what else a rank
holds. Later steps part, as one number on the edge between two of float8 is rounded the other way
where a sum had another order, so it is the first step that is compared.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.harness import TINY, TOLERANCE, Mesh, Run, assert_equal, errors, run
from torchtitan_lite.precision.float8 import RECIPES
from torchtitan_lite.precision.fsdp import ALL_GATHER
from torchtitan_lite.precision.linear import Float8Linear

SLOW = pytest.mark.slow
RECIPE = "quantize.linear.float8.recipe_name"
WIDE = dataclasses.replace(TINY, hidden_size=48, intermediate_size=80)  # multiples of 16
MIXTURE = dataclasses.replace(
    WIDE,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=32,
)
MESHES: list[tuple[Mesh, dict[str, Any]]] = [
    (Mesh(dp_shard=2, tp=2), {}),
    (Mesh(dp_shard=2), {"parallelism.zero_stage": 1, "training.local_batch_size": 2}),
    (Mesh(tp=2), {"parallelism.enable_sequence_parallel": False}),
    (Mesh(pp=2), {}),
    (Mesh(pp=2), {"parallelism.pipeline_parallel_schedule": "InterleavedZeroBubble"}),
]


def options(name: str, **others: Any) -> dict[str, Any]:
    return {RECIPE: name, "training.steps": 1, "training.mixed_precision_param": "float32"} | {
        f"quantize.linear.float8.{key}": value for key, value in others.items()
    }


@cache
def one_process(name: str) -> Run:
    return run(Mesh(), options(name), WIDE)


def largest_gradient_error(ours: Run, expected: Run) -> float:
    found = errors(ours, expected)
    return max(error for name, error in found.items() if name.startswith("gradient"))


CASES = [pytest.param(name, *MESHES[0], id=f"{name}-{MESHES[0][0]}") for name in RECIPES] + [
    pytest.param(name, mesh, more, id=f"{name}-{mesh}-{number}", marks=SLOW)
    for name in RECIPES
    for number, (mesh, more) in enumerate(MESHES[1:])
]


@pytest.mark.parametrize(("name", "mesh", "more"), CASES)
def test_a_mesh_computes_what_one_process_computes(
    name: str, mesh: Mesh, more: dict[str, Any]
) -> None:
    assert_equal(run(mesh, options(name) | more, WIDE), one_process(name))


@SLOW
@pytest.mark.parametrize("mesh", [Mesh(dp_shard=2), Mesh(dp_shard=2, tp=2)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_beside_experts_that_ranks_share_out_it_is_the_same(name: str, mesh: Mesh) -> None:
    """Attention and the shared expert; the routed ones multiply in high precision."""
    more = options(name) | {"parallelism.expert_parallel_degree": 2}
    assert_equal(run(mesh, more, MIXTURE), run(Mesh(), options(name), MIXTURE))


ONE_QUICK = [pytest.param(name, marks=[] if name == "rowwise" else [SLOW]) for name in RECIPES]


@pytest.mark.parametrize("name", ONE_QUICK)
def test_float8_is_in_force_and_other_scales_depend_on_the_mesh(name: str) -> None:
    """What the claim above would miss if linears were left as they are, or all scales alike."""
    high = run(Mesh(), options(""), WIDE)
    assert 0.01 < largest_gradient_error(one_process(name), high) < 0.3
    other = options(name, round_scales_to_power_of_2=False)
    parts = run(Mesh(dp_shard=2, tp=2), other, WIDE)
    assert largest_gradient_error(parts, run(Mesh(), other, WIDE)) > 1000 * TOLERANCE


@SLOW
@pytest.mark.parametrize("name", RECIPES)
def test_emulation_is_the_same_experiment(name: str) -> None:
    assert_equal(run(Mesh(), options(name, emulate=True), WIDE), one_process(name))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=SLOW)])
@pytest.mark.parametrize("name", ONE_QUICK)
def test_recomputation_changes_no_bit(name: str, dtype: str) -> None:
    more = {"training.mixed_precision_param": dtype, "training.steps": 3}
    modes = {
        "none": {"activation_checkpoint.mode": "none"},
        "full": {"activation_checkpoint.mode": "full"},
        "op": {"activation_checkpoint.selective_ac_option": "op"},
    }
    runs = {mode: run(Mesh(), options(name) | more | keys, WIDE) for mode, keys in modes.items()}
    for mode in ("full", "op"):
        assert runs[mode].series("loss") == runs["none"].series("loss")
        for name, parameter in runs["none"].parameters.items():
            assert torch.equal(runs[mode].parameters[name], parameter), (mode, name)


# --- gathered in float8 --------------------------------------------------------------------------


class GatheredBytes(TorchDispatchMode):
    """What a rank gives to FSDP's gathers."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "c10d::_allgather_base_":
            self.total += args[1].numel() * args[1].itemsize
        return func(*args, **(kwargs or {}))


def train_and_count(trainer: Any) -> tuple[int, int, int]:
    """Bytes that a rank gave to gathers; numbers and rows of its shards of float8 linears."""
    with GatheredBytes() as gathered:
        trainer.train()
    parts = trainer.model.parts
    linears = [m for part in parts for m in part.modules() if type(m) is Float8Linear]
    shards = [module.weight.to_local() for module in linears]  # type: ignore[operator]
    return gathered.total, sum(t.numel() for t in shards), sum(t.shape[0] for t in shards)


@pytest.mark.parametrize(
    ("mesh", "dtype", "name"),
    [
        (Mesh(dp_shard=2), "bfloat16", "tensorwise"),
        pytest.param(Mesh(dp_shard=2, tp=2), "float32", "tensorwise", marks=SLOW),
        pytest.param(Mesh(dp_shard=2, dp_replicate=2), "bfloat16", "rowwise", marks=SLOW),
        pytest.param(Mesh(dp_shard=4), "bfloat16", "blockwise", marks=SLOW),
    ],
    ids=str,
)
def test_weights_gathered_in_float8_are_the_same_in_fewer_bytes(
    mesh: Mesh, dtype: str, name: str
) -> None:
    common = options(name) | {"training.mixed_precision_param": dtype, "parallelism.zero_stage": 1}
    high = run(mesh, common, WIDE, act=train_and_count)
    low = run(mesh, common | {ALL_GATHER: True}, WIDE, act=train_and_count)
    assert_equal(low, high)
    width = getattr(torch, dtype).itemsize
    for ours, (whole, numbers, rows) in zip(low.returned, high.returned, strict=True):
        assert ours == (whole - (width - 1) * numbers + 4 * rows, numbers, rows)


@SLOW
def test_a_run_in_stage_3_with_float8_gathers_equals_one_without() -> None:
    """Backward gathers again what forward used, and each step what the last one left."""
    common = options("tensorwise") | {"training.steps": 4, "parallelism.zero_stage": 3}
    high, low = (run(Mesh(dp_shard=2), common | {ALL_GATHER: on}, WIDE) for on in (False, True))
    assert_equal(low, high)


@SLOW
def test_rows_that_the_ranks_do_not_divide_are_gathered_in_high_precision() -> None:
    common = options("tensorwise")
    mesh = Mesh(dp_shard=3)
    more = {"training.global_batch_size": 9, "training.local_batch_size": 3}
    high, low = (run(mesh, common | more | {ALL_GATHER: on}, WIDE) for on in (False, True))
    assert low.series("loss") == high.series("loss")
    assert all(torch.equal(low.parameters[name], high.parameters[name]) for name in low.parameters)

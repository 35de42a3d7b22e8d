"""Experts shared out over ranks against all of them in one process, for any rows.

A case says how many rows each rank has for each expert: many, few, or none for an expert, for a
rank, or at all. Compared are the outputs, the gradients of the rows and those of the weights.
Whole models are in test_expert_meshes.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.comparison import TOLERANCE, Errors, make_twins, random, relative_error
from tests.parallel.experts import MIXTURE, with_experts
from tests.world import run_ranks
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.moe import Experts, MoE
from torchtitan_lite.parallel import expert
from torchtitan_lite.parallel.expert import apply_expert_parallel, by_expert

HIDDEN, EXPERTS = MIXTURE.hidden_size, MIXTURE.num_experts
WORLDS = (2, 4, 8)

# Rows that a rank has for an expert, of 8.
Rows = Callable[[int, int], int]
CASES: dict[str, Rows] = {
    "odd numbers": lambda rank, expert: (3 * rank + 2 * expert + 1) % 5,
    "an expert without rows": lambda rank, expert: (rank + expert) % 3 * (expert != 2),
    "a rank whose experts get none": lambda rank, expert: (rank + 2) * (expert < 4),
    "a rank without rows": lambda rank, expert: (expert % 3) * (rank != 1),
    "all to one expert": lambda rank, expert: (2 * rank + 1) * (expert == 5),
    "one row in all": lambda rank, expert: int(rank == 1 and expert == 0),
    "none at all": lambda rank, expert: 0,
}


def counts_of(case: str, rank: int) -> Tensor:
    return torch.tensor([CASES[case](rank, expert) for expert in range(EXPERTS)])


def rows_of(case: str, rank: int) -> Tensor:
    return random(int(counts_of(case, rank).sum()), HIDDEN, seed=10 + rank)


def make_experts() -> tuple[Experts, Experts]:
    plain, ours = make_twins(Experts(MIXTURE))
    plain.kernel = ours.kernel = "loop"
    return plain, ours


def compare(case: str, mesh: DeviceMesh) -> Errors:
    plain, ours = make_experts()
    apply_expert_parallel(ours, mesh)
    rank, size = mesh.get_local_rank(), mesh.size()
    for other in range(size):  # all ranks' rows, each against the same upstream as there
        rows = rows_of(case, other).requires_grad_()
        out = plain(rows, counts_of(case, other))
        out.backward(random(*out.shape, seed=50 + other))
        if other == rank:
            expected, expected_grad = out.detach(), rows.grad
    rows = rows_of(case, rank).requires_grad_()
    out = ours(rows, counts_of(case, rank))
    out.backward(random(*out.shape, seed=50 + rank))
    assert rows.grad is not None and expected_grad is not None
    found = {
        "output": _error(out.detach(), expected),
        "rows": _error(rows.grad, expected_grad),
    }
    for name, parameter in ours.named_parameters():
        grad, plain_grad = parameter.grad, plain.get_parameter(name).grad
        assert isinstance(grad, DTensor) and grad.placements == (Shard(0),)
        assert grad.to_local().shape[0] == EXPERTS // size
        assert plain_grad is not None
        found[name] = _error(grad.full_tensor(), plain_grad)
    return found


def _error(ours: Tensor, expected: Tensor) -> float:
    """Relative, but where nothing is expected, which must be nothing."""
    if not expected.any():
        assert ours.shape == expected.shape
        return float(ours.norm())
    return relative_error(ours, expected)


def _all_cases() -> dict[str, Errors]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    return {case: compare(case, mesh) for case in CASES}


@cache
def _on_ranks(world_size: int) -> list[dict[str, Errors]]:
    return run_ranks(_all_cases, world_size)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_experts_on_ranks_compute_what_they_compute_in_one_process(
    case: str, world_size: int
) -> None:
    for errors in _on_ranks(world_size):
        wrong = {name: error for name, error in errors[case].items() if not error < TOLERANCE}
        assert not wrong


# --- where rows go ----------------------------------------------------------------------------


def _labelled(case: str) -> tuple[bool, bool]:
    """Whether each row came back to its place, and whether it had been where its expert lives."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    num_local, rank = EXPERTS // mesh.size(), mesh.get_local_rank()

    def add_number_of_expert(rows: Tensor, counts: Tensor) -> Tensor:
        local = torch.arange(num_local).repeat_interleave(counts)
        return rows + (rank * num_local + local)[:, None]

    rows, counts = rows_of(case, rank).round(decimals=2) * 100, counts_of(case, rank)
    expected = torch.arange(EXPERTS).repeat_interleave(counts)[:, None]
    outs = []
    for compute in (lambda rows, counts: rows, add_number_of_expert):
        _, ours = make_experts()
        ours.forward = compute  # type: ignore[method-assign]
        apply_expert_parallel(ours, mesh)
        outs.append(ours(rows, counts))
    return torch.equal(outs[0], rows), torch.equal(outs[1].round(), rows.round() + expected)


@pytest.mark.parametrize("case", CASES)
def test_every_row_visits_its_expert_and_comes_back_to_its_place(case: str) -> None:
    assert run_ranks(_labelled, 4, case) == [(True, True)] * 4


def test_rows_by_rank_and_expert_are_put_by_expert_and_rank() -> None:
    counts = torch.tensor([[2, 0, 1], [1, 3, 0]])  # 2 ranks, 3 experts
    #               r0e0  r0e2 r1e0  r1e1        e0 first, of both ranks
    assert by_expert(counts, 7).tolist() == [0, 1, 6, 2, 3, 4, 5]
    assert by_expert(torch.zeros(2, 3, dtype=torch.int64), 0).tolist() == []


def _twins() -> dict[str, float]:
    """By twin, the relative error of the output."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    exchange, calls = expert.all_to_all, Counter[str]()

    def back_in_reverse(x: Tensor, **options: Any) -> Tensor:
        calls["exchange"] += 1
        return exchange(x.flip(0) if calls["exchange"] == 3 else x, **options)

    def as_they_came(counts: Tensor, num_rows: int) -> Tensor:
        return torch.arange(num_rows)

    found = {}
    for name, twin in (("all_to_all", back_in_reverse), ("by_expert", as_they_came)):
        with mock.patch.object(expert, name, twin):
            found[name] = compare("odd numbers", mesh)["output"]
    return found


def test_rows_in_the_wrong_order_would_be_seen() -> None:
    for errors in run_ranks(_twins, 2):
        assert min(errors.values()) > 1e-2


# --- what it costs ----------------------------------------------------------------------------

WIDE = with_experts(
    hidden_size=512,
    num_experts=64,
    num_experts_per_tok=4,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=0,
    shared_expert_gate=False,
)
NO_MESSAGE = ("wait_tensor", "_wrap_tensor_autograd")
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount", "equal")


class Cost(TorchDispatchMode):
    """Bytes that each exchange hands over, and how often the host waits for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name not in NO_MESSAGE:
            assert name == "all_to_all_single", name
            self.sent.append(args[0].numel() * args[0].itemsize)
        self.waits += name in WAITS
        return func(*args, **(kwargs or {}))


def _costs(config: ModelConfig, shared_out: bool) -> tuple[list[int], list[int], int]:
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = MoE(config)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    if shared_out:
        apply_expert_parallel(layer, mesh)
    x = torch.randn(2, 20, config.hidden_size, requires_grad=True)
    to_list, waits = Tensor.tolist, Counter[str]()

    def tolist(self: Tensor) -> Any:
        waits["tolist"] += 1
        return to_list(self)

    with mock.patch.object(Tensor, "tolist", tolist):
        with Cost() as forward:
            out = layer(x)
        with Cost() as backward:
            out.sum().backward()
    return forward.sent, backward.sent, forward.waits + backward.waits + waits["tolist"]


def test_a_row_crosses_once_each_way_and_the_host_waits_once() -> None:
    """40 tokens a rank, 4 experts each, 512 numbers of 4 bytes: no more, no less."""
    rows = 40 * 4 * 512 * 4
    ranks = run_ranks(_costs, 2, WIDE, True)
    for (counts, sent, returned), backward, waits in ranks:
        assert counts == 64 * 8
        assert sent == rows and backward == [rows, returned]
        assert counts + sent < 1.05 * rows
        assert waits == 1
    # A rank hands back what it received.
    assert sum(returned for (_, _, returned), _, _ in ranks) == 2 * rows


def test_without_a_plan_nothing_crosses_and_the_host_never_waits() -> None:
    assert run_ranks(_costs, 2, WIDE, False) == [([], [], 0)] * 2

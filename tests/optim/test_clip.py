"""The gradient norm is one number whatever the mesh, and the clip by it changes nothing else.

Each row of LAYOUTS puts the same gradients on four (or two) ranks in another way; the norm of
each is compared with the float64 norm of the full gradients in one process.
"""

from __future__ import annotations

import functools
import itertools
import math
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.world import run_ranks
from torchtitan_lite.optim.clip import gradient_norm, scale_gradients

NORM_TYPES = (1.0, 2.0, math.inf)
R, S0, S1 = Replicate(), Shard(0), Shard(1)

# 10 rows and 5 entries: no axis of 4 divides them.
SHAPES = {"embed": (10, 8), "up": (16, 8), "down": (8, 12), "norm": (5,), "experts": (4, 6, 8)}

Mesh = tuple[tuple[int, ...], tuple[str, ...]]
Layout = tuple[Mesh, tuple[Placement, ...]]
DP2: Mesh = ((2,), ("fsdp",))
TP2: Mesh = ((2,), ("tp",))
DP4: Mesh = ((4,), ("fsdp",))
DP2TP2: Mesh = ((2, 2), ("fsdp", "tp"))
HSDP: Mesh = ((2, 2), ("dp_replicate", "fsdp"))
EP: Mesh = ((2, 2), ("efsdp", "ep"))


def same(mesh: Mesh, *placements: Placement) -> dict[str, Layout]:
    return {name: (mesh, placements) for name in SHAPES}


LAYOUTS: dict[str, dict[str, Layout]] = {
    "dp2": same(DP2, S0),
    "tp2": same(TP2, S0) | {"down": (TP2, (S1,)), "norm": (TP2, (R,))},
    "replicas2": same(DP2, R),
    "dp4 uneven": same(DP4, S0),
    "dp2 x tp2": same(DP2TP2, S0, S0) | {"down": (DP2TP2, (S0, S1)), "norm": (DP2TP2, (S0, R))},
    "hsdp 2x2": same(HSDP, R, S0),
    "dense on dp4, experts on efsdp2 x ep2": same(DP4, S0) | {"experts": (EP, (S1, S0))},
    "dense on hsdp, experts on ep2 alone": same(HSDP, R, S0) | {"experts": (EP, (R, S0))},
}


def full_gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def reference_norm(gradients: list[Tensor], norm_type: float) -> float:
    flat = torch.cat([gradient.double().flatten() for gradient in gradients])
    return torch.linalg.vector_norm(flat, norm_type).item()


def with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


@functools.cache
def device_mesh(mesh: Mesh) -> DeviceMesh:
    return init_device_mesh("cpu", mesh[0], mesh_dim_names=mesh[1])


def place(layouts: dict[str, Layout]) -> list[nn.Parameter]:
    """The full gradients, laid out as the row says, as gradients of parameters."""
    parameters = []
    for name, gradient in full_gradients().items():
        mesh, placements = layouts[name]
        sharded = distribute_tensor(gradient, device_mesh(mesh), placements, src_data_rank=None)
        parameters.append(with_gradient(sharded))
    return parameters


def norms_of_layouts(names: list[str], ranks_per_stage: int) -> dict[str, list[float]]:
    return {
        name: [
            gradient_norm(place(LAYOUTS[name]), norm_type=p, ranks_per_stage=ranks_per_stage)
            for p in NORM_TYPES
        ]
        for name in names
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_norm_on_any_mesh_is_that_of_one_process(world_size: int) -> None:
    expected = [reference_norm([*full_gradients().values()], p) for p in NORM_TYPES]
    names = [
        name for name, layouts in LAYOUTS.items() if math.prod(layouts["embed"][0][0]) == world_size
    ]
    for norms in run_ranks(norms_of_layouts, world_size, names, world_size):
        for name in names:
            assert norms[name] == pytest.approx(expected, rel=1e-12), name


def test_one_process_without_a_process_group_gives_the_reference() -> None:
    assert not dist.is_initialized()
    parameters = [with_gradient(gradient) for gradient in full_gradients().values()]
    for p in (*NORM_TYPES, 3.0):
        norm = gradient_norm(parameters, norm_type=p, ranks_per_stage=1)
        assert norm == pytest.approx(reference_norm([*full_gradients().values()], p), rel=1e-12)


def test_counting_replicated_gradients_once_a_rank_would_be_seen() -> None:
    # Twin: pretend that each stage is as small as the shards of its parameter.
    names = ["replicas2"]
    (once_a_rank, _) = run_ranks(norms_of_layouts, 2, names, 1)
    expected = [reference_norm([*full_gradients().values()], p) for p in NORM_TYPES]
    for p, norm, right in zip(NORM_TYPES, once_a_rank["replicas2"], expected, strict=True):
        copies = 1 if math.isinf(p) else 2 ** (1 / p)
        assert norm == pytest.approx(copies * right, rel=1e-12)


def _norms_of_stages(plain: bool) -> list[float]:
    """Stage 0 is ranks 0 and 1, stage 1 is ranks 2 and 3; each holds other parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    stage = mesh.get_local_rank("pp")
    mine = [*full_gradients().values()][:2] if stage == 0 else [*full_gradients().values()][2:]
    if not plain:
        mine = [distribute_tensor(g, mesh["fsdp"], [S0], src_data_rank=None) for g in mine]
    parameters = [with_gradient(gradient) for gradient in mine]
    return [gradient_norm(parameters, norm_type=p, ranks_per_stage=2) for p in NORM_TYPES]


@pytest.mark.parametrize("plain", [False, True])
def test_stages_that_hold_different_parameters_add_up(plain: bool) -> None:
    expected = [reference_norm([*full_gradients().values()], p) for p in NORM_TYPES]
    for norms in run_ranks(_norms_of_stages, 4, plain):
        assert norms == pytest.approx(expected, rel=1e-12)


def _norm_where_ranks_lack_gradients() -> list[float]:
    """Rank 0 has a gradient, rank 1 parameters without one, rank 2 no parameters at all."""
    parameters = [
        [with_gradient(torch.tensor([3.0, 4.0]))],
        [nn.Parameter(torch.zeros(2))],
        [],
    ][dist.get_rank()]
    device = torch.device("cpu")
    return [
        gradient_norm(parameters, norm_type=p, ranks_per_stage=1, device=device) for p in NORM_TYPES
    ]


def test_ranks_without_gradients_take_part() -> None:
    assert run_ranks(_norm_where_ranks_lack_gradients, 3) == [[7.0, 5.0, 4.0]] * 3


def test_a_tied_parameter_listed_twice_counts_and_scales_once() -> None:
    tied = with_gradient(torch.tensor([3.0, 4.0]))
    norm = gradient_norm([tied, tied], ranks_per_stage=1)
    assert norm == 5.0
    scale_gradients([tied, tied], norm=norm, max_norm=2.5)
    assert tied.grad is not None and tied.grad.tolist() == pytest.approx([1.5, 2.0], rel=1e-6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


def _norms_of_a_trained_block(world_size: int) -> tuple[list[float], bool]:
    """Norms after a real backward of FSDP2 over tensor and sequence parallelism."""
    torch.manual_seed(3)
    block, x = Block().double(), torch.randn(2, 4, 8, dtype=torch.float64)
    if world_size > 1:
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("fsdp", "tp"))
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=S1),
            "down": RowwiseParallel(),
        }
        # This rank's row, and its half of the sequence: the norm works on sequence shards.
        x = x[mesh.get_local_rank("fsdp")].chunk(2)[mesh.get_local_rank("tp")].unsqueeze(0)
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["fsdp"])
        block.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        block.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    block(x).square().sum().backward()
    strided = any(
        isinstance(placement, _StridedShard)
        for parameter in block.parameters()
        if isinstance(parameter, DTensor)
        for placement in parameter.placements
    )
    norms = [
        gradient_norm(block.parameters(), norm_type=p, ranks_per_stage=world_size)
        for p in NORM_TYPES
    ]
    return norms, strided


def test_the_norm_after_a_real_backward_of_fsdp_and_tp_is_that_of_one_process() -> None:
    expected, _ = _norms_of_a_trained_block(1)
    for norms, strided in run_ranks(_norms_of_a_trained_block, 4, 4):
        assert strided, "the test lost the placement that FSDP gives to a tp-sharded dimension"
        assert norms == pytest.approx(expected, rel=1e-12)


def test_float32_would_depend_on_the_mesh_and_float64_does_not() -> None:
    gradient = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    right = reference_norm([gradient], 2.0)
    norm = gradient_norm([with_gradient(gradient)], ranks_per_stage=1)
    assert norm == pytest.approx(right, rel=1e-13)
    # Twin: the same sum kept in float32, whole and as two halves.
    whole = torch.linalg.vector_norm(gradient).item()
    halves = math.hypot(*(torch.linalg.vector_norm(half).item() for half in gradient.chunk(2)))
    assert whole != pytest.approx(right, rel=1e-7)
    assert whole != pytest.approx(halves, rel=1e-7)


def _poisoned_norms() -> list[float]:
    norms = []
    for p, culprit, poison in itertools.product(NORM_TYPES, (0, 1, 2), (math.nan, -math.inf)):
        gradient = torch.ones(3)
        if dist.get_rank() == culprit:
            gradient[1] = poison
        parameters = [with_gradient(gradient)] if dist.get_rank() < 3 else []
        norms.append(
            gradient_norm(parameters, norm_type=p, ranks_per_stage=1, device=torch.device("cpu"))
        )
    return norms


def test_a_gradient_that_is_not_finite_on_one_rank_is_seen_by_all() -> None:
    for norms in run_ranks(_poisoned_norms, 4):
        assert len(norms) == 18
        assert not any(math.isfinite(norm) for norm in norms), norms


def _norm_with_a_maximum_that_loses_nan(rank_with_nan: int) -> float:
    """A backend whose MAX prefers any number to a NaN, as IEEE's maximumNumber does."""
    real_all_reduce = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any, group: Any = None) -> None:
        assert op == dist.ReduceOp.MAX
        tensor.nan_to_num_(nan=-math.inf, posinf=math.inf)
        real_all_reduce(tensor, op, group)

    dist.all_reduce = all_reduce  # type: ignore[assignment]
    gradient = torch.tensor([math.nan if dist.get_rank() == rank_with_nan else 1.0])
    return gradient_norm([with_gradient(gradient)], norm_type=math.inf, ranks_per_stage=1)


def test_a_backend_whose_maximum_drops_nan_does_not_hide_one() -> None:
    for norm in run_ranks(_norm_with_a_maximum_that_loses_nan, 2, 1):
        assert not math.isfinite(norm)


class OperatorLog(TorchDispatchMode):
    """Names of all operators that reach the device, collectives and host waits among them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _count_costs() -> tuple[int, int]:
    parameters = place(LAYOUTS["dense on dp4, experts on efsdp2 x ep2"])
    with OperatorLog() as log:
        norm = gradient_norm(parameters, ranks_per_stage=4)
        scale_gradients(parameters, norm=norm, max_norm=0.1)
    collectives = sum("c10d" in name for name in log.names)
    host_waits = sum("_local_scalar_dense" in name for name in log.names)
    return collectives, host_waits


def test_norm_and_clip_cost_one_collective_and_one_host_wait() -> None:
    assert run_ranks(_count_costs, 4) == [(1, 1)] * 4


def _memory_growth(norm: Callable[[list[nn.Parameter]], float]) -> float:
    parameters = [with_gradient(torch.ones(1_000_000)) for _ in range(24)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert norm(parameters) == pytest.approx(math.sqrt(24e6))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024  # MiB


def _norm_of_copies(parameters: list[nn.Parameter]) -> float:
    copies = [parameter.grad.double() for parameter in parameters if parameter.grad is not None]
    return math.sqrt(sum(copy.square().sum().item() for copy in copies))


def test_gradients_are_widened_piece_by_piece() -> None:
    def norm(parameters: list[nn.Parameter]) -> float:
        return gradient_norm(parameters, ranks_per_stage=1)

    # 24 gradients of 4 MB; in float64 all of them are 183 MiB.
    assert run_ranks(_memory_growth, 1, norm)[0] < 20
    assert run_ranks(_memory_growth, 1, _norm_of_copies)[0] > 120


def _unreduced_gradient() -> None:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [R]))
    parameter.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(AssertionError, match="not reduced"):
        gradient_norm([parameter], ranks_per_stage=2)


def test_a_gradient_that_is_still_partial_is_refused() -> None:
    run_ranks(_unreduced_gradient, 2)


Clipped = tuple[float, float, dict[str, Tensor]]


def _clip_on_two_meshes(max_norms: list[float]) -> list[Clipped]:
    """For each max_norm the norm after the clip, the factor and the full gradients."""
    results = []
    for max_norm in max_norms:
        parameters = place(LAYOUTS["dense on dp4, experts on efsdp2 x ep2"])
        norm = gradient_norm(parameters, ranks_per_stage=4)
        factor = scale_gradients(parameters, norm=norm, max_norm=max_norm)
        gradients = {
            name: parameter.grad.full_tensor()  # type: ignore[union-attr]
            for name, parameter in zip(SHAPES, parameters, strict=True)
        }
        results.append((gradient_norm(parameters, ranks_per_stage=4), factor, gradients))
    return results


def test_an_active_clip_is_one_factor_on_all_meshes_and_an_inactive_one_leaves_every_bit() -> None:
    full = full_gradients()
    right = 0.5 / (reference_norm([*full.values()], 2.0) + 1e-6)
    for active, *inactive in run_ranks(_clip_on_two_meshes, 4, [0.5, 0.0, 1e9]):
        norm, factor, gradients = active
        assert factor == pytest.approx(right, rel=1e-12)
        assert norm == pytest.approx(0.5, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, full[name] * right, rtol=1e-6, atol=0)
        for _, factor, gradients in inactive:
            assert factor == 1.0
            assert all(torch.equal(gradients[name], full[name]) for name in full)


def test_clipping_by_a_norm_that_is_not_finite_is_refused() -> None:
    parameter = with_gradient(torch.ones(2))
    for norm in (math.nan, math.inf):
        with pytest.raises(AssertionError, match="skip the step"):
            scale_gradients([parameter], norm=norm, max_norm=1.0)


def test_a_norm_of_zero_divides_nothing_by_zero() -> None:
    parameter = with_gradient(torch.zeros(2))
    norm = gradient_norm([parameter], ranks_per_stage=1)
    assert norm == 0.0 and scale_gradients([parameter], norm=norm, max_norm=1.0) == 1.0

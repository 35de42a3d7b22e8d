"""Every factorisation of 8 and 16 over the five axes.

The formula is held against counting: five nested loops, outermost axis first, number the ranks.
The real build_mesh runs under the fake backend, on every rank of 8 and some of 16, and its groups
are held against the sets of ranks that share every other coordinate.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.fake_world import fake_rank
from tests.world import run_ranks
from torchtitan_lite.mesh import AXES, Degrees, ParallelMesh, build_mesh, set_timeout

Place = tuple[int, ...]  # (pp, dp_replicate, dp_shard, cp, tp)


def factorisations(world: int, num_axes: int = len(AXES)) -> list[tuple[int, ...]]:
    """All ordered ways to write `world` as a product of `num_axes` degrees."""
    if num_axes == 1:
        return [(world,)]
    degrees = [degree for degree in range(1, world + 1) if world % degree == 0]
    return [(d, *rest) for d in degrees for rest in factorisations(world // d, num_axes - 1)]


def count_places(degrees: Degrees) -> list[Place]:
    """The place of rank 0, 1, 2, ...: five nested loops, the last axis fastest."""
    sizes = (degrees.pp, degrees.dp_replicate, degrees.dp_shard, degrees.cp, degrees.tp)
    return list(itertools.product(*(range(size) for size in sizes)))


def ranks_sharing(places: list[Place], rank: int, *, all_but: set[str]) -> list[int]:
    """The ranks whose place equals that of `rank` on every axis that is not in `all_but`."""
    fixed = [index for index, axis in enumerate(AXES) if axis not in all_but]
    return [
        other
        for other, place in enumerate(places)
        if all(place[index] == places[rank][index] for index in fixed)
    ]


def members(view: DeviceMesh, axis: str) -> list[int]:
    """The global ranks of the group of one axis of a view, in the order of that axis."""
    return dist.get_process_group_ranks(view.get_group(axis))


def expected_groups(mesh: ParallelMesh) -> dict[str, list[int]]:
    """By counting, the group of each axis of each view that this rank belongs to, in its order.

    The replicas are those of the dense view, and of the sparse one.
    """
    degrees, rank = mesh.degrees, mesh.rank
    places = count_places(degrees)
    stage = ranks_sharing(places, rank, all_but={"dp_replicate", "dp_shard", "cp", "tp"})
    block = ranks_sharing(places, rank, all_but={"dp_shard", "cp", "tp"})
    place = block.index(rank)  # in it the last axis, tp, is the fastest, and so is ep
    first = place - place % degrees.ep
    groups = {
        "pp": ranks_sharing(places, rank, all_but={"pp"}),
        "cp": ranks_sharing(places, rank, all_but={"cp"}),
        "tp": ranks_sharing(places, rank, all_but={"tp"}),
        "fsdp": ranks_sharing(places, rank, all_but={"dp_shard", "cp"}),
        "ep": block[first : first + degrees.ep],
        "efsdp": block[place % degrees.ep :: degrees.ep],
        "dp_replicate": ranks_sharing(places, rank, all_but={"dp_replicate"}),
    }
    groups["replicas of experts"] = groups["dp_replicate"]
    if not degrees.sharded:
        groups |= {"fsdp": [rank], "efsdp": [rank]}
        groups["dp_replicate"] = [r for r in stage if places[r][-1] == places[rank][-1]]
        own = stage.index(rank) % degrees.ep
        groups["replicas of experts"] = stage[own :: degrees.ep]
    return groups


def check_views(mesh: ParallelMesh) -> None:
    """Each view's coordinates and groups are those of the counted place."""
    groups = expected_groups(mesh)
    views = {
        axis: (getattr(mesh, axis), axis) for axis in ("pp", "cp", "tp", "fsdp", "ep", "efsdp")
    }
    for axis, replicas in (("fsdp", "dp_replicate"), ("efsdp", "replicas of experts")):
        view: DeviceMesh = getattr(mesh, axis)
        hybrid = len(groups[replicas]) > 1
        names = ("dp_replicate", axis) if hybrid else (axis,)
        assert view.mesh_dim_names == names, "an axis of 1 replica costs FSDP an all-reduce"
        if hybrid:
            views[replicas] = view, "dp_replicate"
    for name, (view, axis) in views.items():
        assert members(view, axis) == groups[name], name
        assert groups[name][view.get_local_rank(axis)] == mesh.rank, name
        degree = getattr(mesh.degrees, name, len(groups[name]))
        assert name == "dp_replicate" or degree == len(groups[name]), name


def without_groups(degrees: Degrees, rank: int) -> ParallelMesh:
    """A mesh of which only the arithmetic is used."""
    nothing: DeviceMesh = None  # type: ignore[assignment]
    views = dict.fromkeys(("pp", "cp", "tp", "fsdp", "ep", "efsdp"), nothing)
    return ParallelMesh(degrees=degrees, rank=rank, **views)


def test_there_are_35_and_70_factorisations() -> None:
    """Stars and bars: 2^n over five axes in C(n + 4, 4) ways. None is left out below."""
    for exponent in (3, 4):
        found = factorisations(2**exponent)
        assert len(set(found)) == len(found) == math.comb(exponent + 4, 4)


@pytest.mark.parametrize("world", [8, 16, 12])
def test_the_rank_formula_counts_the_places_in_order(world: int) -> None:
    """Also of 12, whose degrees are not all powers of two."""
    for sizes in factorisations(world):
        degrees = Degrees(*sizes)
        assert degrees.world == world
        for rank, place in enumerate(count_places(degrees)):
            assert tuple(degrees.coordinate(rank).values()) == place
            assert tuple(degrees.coordinate(rank)) == AXES
            pp, dr, ds, cp, tp = place
            _, num_dr, num_ds, num_cp, num_tp = sizes
            assert rank == (((pp * num_dr + dr) * num_ds + ds) * num_cp + cp) * num_tp + tp


@pytest.mark.parametrize("world", [8, 16])
def test_each_block_of_rows_is_read_by_all_and_only_the_ranks_that_share_it(world: int) -> None:
    for sizes in factorisations(world):
        degrees = Degrees(*sizes)
        meshes = [without_groups(degrees, rank) for rank in range(world)]
        readers: dict[int, list[ParallelMesh]] = {}
        for mesh in meshes:
            readers.setdefault(mesh.batch_rank, []).append(mesh)
        assert sorted(readers) == list(range(degrees.batch))
        # pp, cp and tp ranks work on the same rows; no others do.
        for batch_rank, sharing in readers.items():
            assert len(sharing) == degrees.pp * degrees.cp * degrees.tp
            rows = {(mesh.place["dp_replicate"], mesh.place["dp_shard"]) for mesh in sharing}
            assert rows == {divmod(batch_rank, degrees.dp_shard)}
        assert {mesh.ranks_per_stage for mesh in meshes} == {world // degrees.pp}


@pytest.mark.parametrize("world", [8, 16])
def test_exactly_one_rank_of_each_tp_group_owns_the_data(world: int) -> None:
    for sizes in factorisations(world):
        degrees = Degrees(*sizes)
        owners: dict[Place, int] = {}
        for rank, place in enumerate(count_places(degrees)):
            owners.setdefault(place[:-1], 0)
            owners[place[:-1]] += without_groups(degrees, rank).owns_data
        assert len(owners) == world // degrees.tp
        assert set(owners.values()) == {1}


@pytest.mark.parametrize(("world", "ranks"), [(8, range(8)), (16, (0, 5, 10, 15))])
def test_every_view_of_every_factorisation_agrees_with_the_formula(
    world: int, ranks: Sequence[int]
) -> None:
    for sizes in factorisations(world):
        for rank in ranks:
            with fake_rank(rank, world):
                check_views(build_mesh(Degrees(*sizes), "cpu", rank))


@pytest.mark.parametrize("sharded", [True, False])
def test_every_degree_of_ep_agrees_with_counting(sharded: bool) -> None:
    """Sharded, or with all that would be sharded replicated: zero_stage 0."""
    for sizes in factorisations(8):
        _, _, shard, cp, tp = sizes
        for ep in (ep for ep in (1, 2, 4, 8) if shard * cp * tp % ep == 0):
            degrees = Degrees(*sizes, ep=ep, sharded=sharded)
            assert degrees.world == 8, "ep is no factor of the world"
            for rank in (1, 6):
                with fake_rank(rank, 8):
                    check_views(build_mesh(degrees, "cpu", rank))


def test_ep_is_the_fast_axis_of_the_ranks_that_shard_and_its_neighbours_are_neighbours() -> None:
    degrees = Degrees(pp=2, dp_shard=4, tp=2, ep=4)
    with fake_rank(13, 16):
        mesh = build_mesh(degrees, "cpu", 13)
        assert members(mesh.ep, "ep") == [12, 13, 14, 15]
        assert members(mesh.efsdp, "efsdp") == [9, 13]
        assert members(mesh.tp, "tp") == [12, 13]


def test_ep_must_divide_the_ranks_it_is_cut_from() -> None:
    with pytest.raises(AssertionError, match=r"ep 4 does not divide dp_shard x cp x tp = 6"):
        Degrees(dp_replicate=4, dp_shard=3, tp=2, ep=4)
    with pytest.raises(AssertionError, match="ep 2"):
        Degrees(pp=2, dp_replicate=2, ep=2)


def test_cp_is_folded_into_fsdp_as_its_fast_axis() -> None:
    """Parameters are sharded over dp_shard x cp; the cp ranks of one shard rank are neighbours."""
    degrees = Degrees(dp_shard=2, cp=4)
    for rank in range(8):
        with fake_rank(rank, 8):
            mesh = build_mesh(degrees, "cpu", rank)
            assert mesh.fsdp.size() == degrees.fsdp == 8
            assert mesh.fsdp.get_local_rank() == mesh.place["dp_shard"] * 4 + mesh.place["cp"]
            assert mesh.batch_rank == mesh.place["dp_shard"] == rank // 4


@pytest.mark.parametrize(
    ("built", "claimed"),
    [
        (Degrees(pp=2, tp=4), Degrees(pp=4, tp=2)),
        (Degrees(dp_shard=2, tp=4), Degrees(dp_shard=4, tp=2)),
        (Degrees(pp=2, dp_shard=4), Degrees(dp_shard=4, tp=2)),
        (Degrees(dp_replicate=2, dp_shard=4), Degrees(dp_replicate=4, dp_shard=2)),
        (Degrees(dp_shard=8, ep=2), Degrees(dp_shard=8, ep=4)),
        (Degrees(dp_shard=8, ep=4), Degrees(dp_shard=8, ep=4, sharded=False)),
    ],
)
def test_a_mesh_with_its_axes_in_another_order_would_be_seen(
    built: Degrees, claimed: Degrees
) -> None:
    """The twin: groups built for one order of axes, read as if built for another."""
    with fake_rank(5, 8):
        mesh = build_mesh(built, "cpu", 5)
        check_views(mesh)
        with pytest.raises(AssertionError):
            check_views(dataclasses.replace(mesh, degrees=claimed))


def _talk(degrees: Degrees) -> dict[str, list[int]]:
    """Gather the global ranks over each group, with real messages."""
    mesh = build_mesh(degrees, "cpu", dist.get_rank())
    check_views(mesh)
    heard = {}
    for axis in ("pp", "cp", "tp", "fsdp", "ep", "efsdp"):
        view: DeviceMesh = getattr(mesh, axis)
        group = view.get_group(axis)
        parts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, torch.tensor([mesh.rank]), group=group)
        heard[axis] = [int(part) for part in parts]
    return heard


def test_real_ranks_hear_their_own_groups_and_no_others() -> None:
    for degrees in (Degrees(pp=2, cp=2, tp=2), Degrees(dp_shard=2, cp=2, tp=2, ep=4)):
        for rank, heard in enumerate(run_ranks(_talk, 8, degrees)):
            groups = expected_groups(without_groups(degrees, rank))
            assert heard == {axis: groups[axis] for axis in heard}


def _wait_alone(axis: str) -> str:
    mesh = build_mesh(Degrees(pp=2, cp=2, tp=2, ep=2), "cpu", dist.get_rank())
    view: DeviceMesh = getattr(mesh, axis)
    group = view.get_group(axis)
    dist.all_reduce(torch.zeros(1), group=group)  # connects the group, within the long limit
    set_timeout(mesh, 0.3)
    message = ""
    if view.get_local_rank() == 0:
        try:
            dist.all_reduce(torch.zeros(1), group=group)
        except RuntimeError as error:
            message = str(error)
    set_timeout(mesh, 60)
    return message


@pytest.mark.parametrize("axis", ["pp", "cp", "tp", "fsdp", "ep", "efsdp"])
def test_a_rank_that_waits_alone_in_any_group_fails_at_the_limit(axis: str) -> None:
    messages = run_ranks(_wait_alone, 8, axis, timeout=30)
    assert sum("Timed out" in message for message in messages) == 4, messages

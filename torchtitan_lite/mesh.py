"""The one DeviceMesh.

Every rank has one coordinate on five axes, outermost first:

    rank = (((pp * DR + dr) * DS + ds) * CP + cp) * TP + tp

tp is innermost because its collectives are on the critical path of every layer and must stay
inside a node; pp is outermost because it sends the least. Everything else is a view of this
one mesh, so a tensor sharded on one view and a tensor sharded on another agree on who is where:

    data    (pp, batch, cp, tp)               batch = dr x ds: who reads which rows
    dense   (pp, dp_replicate, fsdp, tp)      fsdp = ds x cp: who shards the dense parameters
    sparse  (pp, dp_replicate, efsdp, ep)     efsdp x ep = ds x cp x tp: who shards the experts

ep is innermost: neighbours exchange tokens. Its degree is no factor of the world, since the ranks
that read and cut everything else share out the experts too. Where nothing is sharded (zero_stage
0) fsdp and efsdp are 1, and the ranks that they had are on dp_replicate.

The data view is read as coordinates, but for cp, whose ranks exchange the tokens of a row. Sums
over all ranks that hold a share of the loss run on the world group, each share contributed once
(`owns_data`). Flattening and unflattening meshes is private API of torch: it stays in this file.
Proven in tests/test_mesh.py for every factorisation of 8 and 16.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_lite.config import Config

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Degrees:
    """The size of each axis of the mesh; their product is the world.

    `ep` ranks of dp_shard x cp x tp share the experts; it must divide them. Not `sharded`: what
    those of dp_shard x cp hold, they all hold whole.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    _: KW_ONLY
    ep: int = 1
    sharded: bool = True

    def __post_init__(self) -> None:
        ranks = self.dp_shard * self.cp * self.tp
        assert ranks % self.ep == 0, f"ep {self.ep} does not divide dp_shard x cp x tp = {ranks}"

    @classmethod
    def of(cls, config: Config) -> Degrees:
        """The degrees that a resolved configuration asks for."""
        parallelism = config.parallelism
        return cls(
            pp=parallelism.pipeline_parallel_degree,
            dp_replicate=parallelism.data_parallel_replicate_degree,
            dp_shard=parallelism.data_parallel_shard_degree,
            cp=parallelism.context_parallel_degree,
            tp=parallelism.tensor_parallel_degree,
            ep=parallelism.expert_parallel_degree,
            sharded=parallelism.zero_stage > 0,
        )

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def batch(self) -> int:
        """How many ranks read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Over how many ranks a dense parameter is sharded."""
        return self.dp_shard * self.cp if self.sharded else 1

    @property
    def efsdp(self) -> int:
        """Over how many ranks FSDP shards the experts that an ep rank holds."""
        return self.dp_shard * self.cp * self.tp // self.ep if self.sharded else 1

    def coordinate(self, rank: int) -> dict[str, int]:
        """The place of `rank` on each of the five axes."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return {axis: place[axis] for axis in AXES}


@dataclass(frozen=True)
class ParallelMesh:
    """This rank's place, and the communicators of the dense and of the sparse view.

    Sub-meshes are cut once here: indexing a DeviceMesh does real work at each call.
    """

    degrees: Degrees
    rank: int
    pp: DeviceMesh
    cp: DeviceMesh
    tp: DeviceMesh
    fsdp: DeviceMesh  # 1-D (fsdp), or 2-D (dp_replicate, fsdp) when parameters are replicated
    ep: DeviceMesh
    efsdp: DeviceMesh  # as fsdp, for what an ep rank holds

    @property
    def place(self) -> dict[str, int]:
        return self.degrees.coordinate(self.rank)

    @property
    def batch_rank(self) -> int:
        """Which block of the global batch's rows this rank reads."""
        return self.place["dp_replicate"] * self.degrees.dp_shard + self.place["dp_shard"]

    @property
    def owns_data(self) -> bool:
        """True on exactly one of the tp ranks that see the same tokens."""
        return self.place["tp"] == 0

    @property
    def ranks_per_stage(self) -> int:
        return self.degrees.world // self.degrees.pp


def build_mesh(degrees: Degrees, device_type: str, rank: int) -> ParallelMesh:
    """The views of the one world mesh; the default process group must be up.

    Every axis exists, also those of size 1, so that no caller asks whether it does.
    """
    world = init_device_mesh(device_type, (degrees.world,), mesh_dim_names=("world",))
    data = _view(world, degrees.pp, cp=degrees.cp, tp=degrees.tp)
    dense = _view(world, degrees.pp, fsdp=degrees.fsdp, tp=degrees.tp)
    sparse = _view(world, degrees.pp, efsdp=degrees.efsdp, ep=degrees.ep)
    return ParallelMesh(
        degrees=degrees,
        rank=rank,
        pp=dense["pp"],
        cp=data["cp"],
        tp=dense["tp"],
        fsdp=_with_replicas(dense, "fsdp"),
        ep=sparse["ep"],
        efsdp=_with_replicas(sparse, "efsdp"),
    )


def _view(world: DeviceMesh, pp: int, **inner: int) -> DeviceMesh:
    """(pp, dp_replicate, *inner), with as many replicas as fill the world."""
    replicas = world.size() // (pp * math.prod(inner.values()))
    return world._unflatten(
        0, (pp, replicas, *inner.values()), ("pp", "dp_replicate", *inner.keys())
    )


def _with_replicas(view: DeviceMesh, axis: str) -> DeviceMesh:
    """What FSDP is given: an axis of one replica would cost it an all-reduce."""
    return view["dp_replicate", axis] if view["dp_replicate"].size() > 1 else view[axis]


def set_timeout(mesh: ParallelMesh, seconds: float) -> None:
    """From here on, a collective of any group of this rank that takes longer is an error."""
    groups = {dist.group.WORLD}
    for view in (mesh.pp, mesh.cp, mesh.tp, mesh.fsdp, mesh.ep, mesh.efsdp):
        groups.update(view.get_all_groups())
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

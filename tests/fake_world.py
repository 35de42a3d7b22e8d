"""Any rank of any world in this one process, under torch's fake backend.

    with fake_rank(rank=511, world_size=512):
        mesh = build_mesh(...)

Collectives return at once and move nothing, so what is checked is who is where, what is cut how
and which shapes fit; never a number. Real ranks are in tests/world.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
import torch.distributed.tensor.debug as dtensor_debug
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be `rank` of `world_size` inside the block; the default process group is up."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor remembers shardings by mesh, and with them process groups that are gone.
        for name in ("_clear_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
            getattr(dtensor_debug, name, lambda: None)()

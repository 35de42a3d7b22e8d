"""Expert parallelism: a rank holds some of the experts, and the tokens travel to them and back.

Two ranks, four experts; a3 are rank 0's rows for expert 3, b3 those of rank 1:

                          rank 0                   rank 1
    rows, by expert       a0 a1 a2 a3              b0 b1 b2 b3
    all-to-all            a0 a1 b0 b1              a2 a3 b2 b3          by (rank, expert)
    reorder               a0 b0 a1 b1              a2 b2 a3 b3          by (expert, rank)
    the rank's experts    E0(a0 b0) E1(a1 b1)      E2(a2 b2) E3(a3 b3)
    reorder, all-to-all   a0 a1 a2 a3              b0 b1 b2 b3

A row crosses once each way: top_k x hidden numbers a token, and the backward moves the same. Before
it the ranks tell each other how many rows come, (ep, experts / ep) int64, and the host waits once
for both lists of lengths. Blocks are as long as they are: nothing is padded or dropped, and a
rank that no row reaches goes through the same collectives with empty tensors.

Each rank's gradient of its experts is of all rows that reached them, from every rank of its ep
group; FSDP adds what other groups' rows give (data.py).
Proven in tests/parallel/test_expert.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from torchtitan_lite.models.moe import Experts
from torchtitan_lite.ops.collectives import all_to_all
from torchtitan_lite.ops.permute import take_rows
from torchtitan_lite.parallel.parameters import compute_on_local_shards, distribute


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Share out the routed experts of each layer of `model` over the 1-D `mesh`."""
    for module in list(model.modules()):
        if isinstance(module, Experts):
            parallelize_module(module, mesh, ExpertParallel())


class ExpertParallel(ParallelStyle):
    """Experts of which a rank holds its share, all of them open to every rank's rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Experts)
        num_experts, size = module.gate_proj.shape[0], device_mesh.size()
        assert num_experts % size == 0, f"{num_experts} experts on {size} ranks"
        distribute(module, device_mesh, Shard(0))
        compute_on_local_shards(module)
        compute, group = module.forward, device_mesh.get_group()
        theirs = [num_experts // size] * size  # experts of each rank

        def compute_where_they_live(rows: Tensor, counts: Tensor) -> Tensor:
            """rows: (rows, hidden) by expert, counts: (experts,) -> (rows, hidden)."""
            received = all_to_all(counts, send=theirs, receive=theirs, group=group)
            lengths = torch.stack((counts, received)).view(2, size, -1).sum(2)
            send, receive = lengths.tolist()  # the one wait for the device
            rows = all_to_all(rows, send=send, receive=receive, group=group)
            received = received.view(size, -1)  # (ep, experts / ep)
            places = by_expert(received, sum(receive))
            rows = torch.empty_like(rows).index_copy_(0, places, rows)
            rows = take_rows(compute(rows, received.sum(0)), places)
            return all_to_all(rows, send=receive, receive=send, group=group)

        module.forward = compute_where_they_live  # type: ignore[method-assign]
        return module


def by_expert(counts: Tensor, num_rows: int) -> Tensor:
    """The place of each row, when rows that lie by (rank, expert) shall lie by (expert, rank).

    counts: (ranks, experts) int64, rows of each block; `num_rows` is their sum, known to the host.
    """
    blocks, sorted_blocks = counts.flatten(), counts.T.flatten()
    before = blocks.cumsum(0) - blocks
    after = (sorted_blocks.cumsum(0) - sorted_blocks).view(counts.T.shape).T.flatten()
    rows = torch.arange(num_rows, device=counts.device)
    return rows + (after - before).repeat_interleave(blocks, output_size=num_rows)

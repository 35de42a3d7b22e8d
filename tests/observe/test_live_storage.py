"""Live bytes: each storage once, from the operator that made it until it is gone."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from tests.fake_world import fake_rank
from torchtitan_lite.observe.live_storage import LiveStorage


def test_a_storage_counts_once_and_until_its_last_view_is_gone() -> None:
    with LiveStorage() as memory:
        x = torch.zeros(10, 4)
        view = x[2:].t()
        assert (memory.live, memory.peak) == (160, 160)
        del x
        assert memory.live == 160
        y = view + 1
        assert memory.live == 160 + 128
        del view
        assert (memory.live, memory.peak) == (128, 288)
    del y
    assert memory.live == 0, "also where the mode is left"


def test_what_is_kept_for_backward_is_alive_until_backward() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    with LiveStorage(left_out=[weight]) as memory:
        loss = (weight @ weight).exp().sum()
        assert memory.live == 64 + 4, "what exp gave, and the sum"
        loss.backward()
        del loss
        assert memory.live == 64, "the gradient"


def test_a_storage_that_is_freed_and_filled_again_while_its_tensor_lives() -> None:
    """As FSDP does with gathered parameters."""
    original = torch.UntypedStorage.resize_
    with LiveStorage() as memory:
        x = torch.zeros(8)
        x.untyped_storage().resize_(0)
        assert memory.live == 0
        x.untyped_storage().resize_(64)
        assert (memory.live, memory.peak) == (64, 64)
    assert torch.UntypedStorage.resize_ is original
    del x
    assert memory.live == 0


def test_what_was_there_counts_if_it_is_held_and_only_once() -> None:
    x = torch.zeros(8)
    memory = LiveStorage()
    memory.hold(x)
    memory.hold(x[:2])
    assert memory.live == 32
    del x
    assert memory.live == 0
    memory.hold(torch.zeros(8, device="meta"))
    assert memory.peak == 32, "meta tensors have no storage"


def test_of_a_dtensor_the_local_part_counts() -> None:
    with fake_rank(1, 4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
        whole = torch.zeros(8, 4)
        sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        with LiveStorage() as memory:
            doubled = sharded * 2
            assert memory.live == doubled.to_local().numel() * 4 == 32


def test_fake_tensors_count_as_real_ones() -> None:
    peaks = []
    for fake in (False, True):
        with FakeTensorMode() if fake else torch.enable_grad(), LiveStorage() as memory:
            x = torch.ones(16, 16, requires_grad=True)
            (x @ x).relu().sum().backward()
        peaks.append(memory.peak)
    assert peaks[0] == peaks[1] > 0

"""How a process group ends: with the block, and after an error without waiting for the others."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from torchtitan_lite import device
from torchtitan_lite.launch import process_group


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def is_up_after_an_error() -> bool:
    with pytest.raises(ZeroDivisionError), process_group():
        1 / 0  # noqa: B018
    return dist.is_initialized()


def test_a_group_ends_with_its_block() -> None:
    with process_group():
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()
    assert not is_up_after_an_error()


def test_after_an_error_no_backend_that_waits_for_the_others_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's destruction blocks until the communicators of all ranks are idle."""
    monkeypatch.setattr(device, "backend", lambda kind, cpu_offload: "cpu:gloo")
    assert is_up_after_an_error()


def test_a_process_may_open_as_many_sockets_as_it_is_allowed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        with process_group():
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

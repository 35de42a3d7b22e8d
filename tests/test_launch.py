"""How a process group ends: with the block, and after an error without waiting for the others."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.world import run_ranks
from torchtitan_lite import device, launch
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


def is_up_on_a_rank() -> bool:
    dist.destroy_process_group()  # the world of the test itself
    return is_up_after_an_error()


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
    assert not is_up_after_an_error(), "a rank that is alone has nobody to wait for"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert run_ranks(is_up_on_a_rank, 2) == [True, True]


def test_a_process_may_open_a_socket_for_each_of_many_ranks() -> None:
    """As many as it may ask for; a limit that is high enough stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = launch.MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, launch.MANY_FILES)
    try:
        for before in (256, most, most + 1):
            if hard == resource.RLIM_INFINITY or before <= hard:
                resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
                with process_group():
                    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (max(before, most), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

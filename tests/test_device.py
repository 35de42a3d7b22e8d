"""What differs between devices is answered by device.py, and never guessed."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchtitan_lite import device

on_cpu = pytest.mark.skipif(device.device_type() != "cpu", reason="says what the CPU answers")


def test_the_device_type_is_one_that_torch_can_put_a_tensor_on():
    where = device.local_device(0)
    device.set_device(where)
    device.synchronize()
    assert torch.ones(2, device=where).device.type == device.device_type()
    assert device.device_name()


@on_cpu
def test_every_local_rank_shares_the_cpu():
    assert device.local_device(0) == device.local_device(7) == torch.device("cpu")


def test_a_rank_without_an_accelerator_of_its_own_is_told_both_numbers(monkeypatch):
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert device.local_device(1) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="local rank 2 .* has 2 of type cuda"):
        device.local_device(2)


def test_apple_mps_trains_on_the_cpu_because_gloo_reads_host_memory(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps")
    )
    assert device.device_type() == "cpu"


@pytest.mark.parametrize(
    ("kind", "cpu_offload", "backend"),
    [
        ("cpu", False, "gloo"),
        ("cpu", True, "gloo"),
        ("cuda", False, "nccl"),
        ("cuda", True, "cpu:gloo,cuda:nccl"),
        ("xpu", False, "xccl"),
    ],
)
def test_the_backend_follows_the_device_and_where_gradients_lie(kind, cpu_offload, backend):
    assert device.backend(kind, cpu_offload=cpu_offload) == backend


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA GH200 144G HBM3e", 989.4),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362.05),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_the_peak_of_a_known_device_is_its_dense_bf16_figure(name, tera):
    assert device.peak_flops(name) == pytest.approx(tera * 1e12)
    assert device.peak_flops(name, torch.float16) == device.peak_flops(name)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a seventh of the device whose name it carries
        "NVIDIA A100-40C",  # a virtual GPU
        "NVIDIA H100 80GB HBM2e",  # a variant without a published figure here
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "x86_64",
        "",
    ],
)
def test_the_peak_of_any_other_device_is_none_and_not_a_relatives(name):
    assert device.peak_flops(name) is None


def test_full_precision_has_no_peak_because_it_depends_on_tf32():
    assert device.peak_flops("NVIDIA H200", torch.float32) is None


@on_cpu
def test_memory_on_cpu_is_the_peak_resident_size_and_never_falls():
    before = device.memory_gib()
    block = torch.ones(64, 1024, 1024)  # 256 MiB, written, hence resident
    during = device.memory_gib()
    del block
    assert 0.02 < before < 64
    status = Path("/proc/self/status")
    if status.exists():
        peak_kib = next(line for line in status.read_text().splitlines() if "VmHWM" in line)
        assert during == pytest.approx(int(peak_kib.split()[1]) / 1024**2, rel=0.05)
    assert during >= 0.25
    assert device.memory_gib() >= during


@pytest.mark.skipif(device.device_type() == "cpu", reason="needs an allocator with statistics")
def test_memory_on_an_accelerator_is_the_peak_of_what_is_reserved():
    before = device.memory_gib()
    block = torch.ones(64, 1024, 1024, device=device.local_device(0))
    during = device.memory_gib()
    del block
    assert during - before == pytest.approx(0.25, abs=0.03)
    assert device.memory_gib() == during


def test_one_seed_fixes_the_draws_of_python_and_torch():
    def draw() -> tuple[float, float]:
        return random.random(), torch.rand(()).item()

    device.seed_all(7)
    first = draw()
    device.seed_all(7)
    assert draw() == first
    device.seed_all(8)
    assert draw() != first


@pytest.fixture
def restored_determinism(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_mode_refuses_an_operator_without_a_deterministic_form(
    restored_determinism,
):
    def scatter_to_one_place() -> None:
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))

    scatter_to_one_place()
    device.make_deterministic()
    with pytest.raises(RuntimeError, match="deterministic"):
        scatter_to_one_place()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark


def test_garbage_is_collected_on_the_beat_and_only_there():
    class Node:
        alive = 0

        def __init__(self) -> None:
            self.me = self  # a cycle: only the collector frees it
            Node.alive += 1

        def __del__(self) -> None:
            Node.alive -= 1

    with device.GarbageCollection(freq=3) as garbage:
        assert not gc.isenabled()
        alive = []
        for step in range(1, 7):
            Node()
            garbage.step(step)
            alive.append(Node.alive)
    assert alive == [1, 2, 0, 1, 2, 0]
    assert gc.isenabled()


def test_automatic_collection_returns_when_training_fails():
    with pytest.raises(KeyError), device.GarbageCollection(freq=3):
        raise KeyError
    assert gc.isenabled()


@on_cpu
def test_a_thread_works_where_the_one_that_asks_does(monkeypatch):
    device.device_of_this_thread()()  # nothing to do
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    enter = device.device_of_this_thread()
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)  # as in a new thread
    enter()
    assert chosen == [3]


@pytest.mark.parametrize(
    ("users", "ours"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_the_allocator_is_told_to_grow_its_blocks_unless_the_user_told_it_something(
    users, ours, monkeypatch
):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    device.let_blocks_grow()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == ours

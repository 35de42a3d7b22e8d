"""Traces and snapshots lie where they should, at the steps of the run, and hold the work done."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.world import run_ranks
from torchtitan_lite import device
from torchtitan_lite.observe.logging import warn_once
from torchtitan_lite.observe.profiler import memory_snapshot, profiling


def train(folder: Path, *, steps: int, start_step: int = 0, **options) -> None:
    options = {"freq": 5, "warmup": 1, "active": 1, **options}
    with profiling(
        enabled=True, dump_folder=folder, traces_folder="t", start_step=start_step, **options
    ) as profiler:
        for step in range(start_step + 1, start_step + steps + 1):
            with torch.profiler.record_function(f"work of step {step}."):
                torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step()


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))


def traced_steps(folder: Path, iteration: int, rank: int = 0) -> list[int]:
    path = folder / "t" / f"iteration_{iteration}" / f"rank{rank}_trace.json"
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    assert "aten::mm" in names
    return sorted(
        {int(match[1]) for name in names if (match := re.match(r"work of step (\d+)\.", name))}
    )


def test_a_trace_is_named_by_the_step_that_it_shows(tmp_path):
    train(tmp_path, steps=11)
    assert files(tmp_path) == ["t/iteration_10/rank0_trace.json", "t/iteration_5/rank0_trace.json"]
    assert traced_steps(tmp_path, 5) == [5]
    assert traced_steps(tmp_path, 10) == [10]


def test_active_steps_are_the_last_of_each_cycle(tmp_path):
    train(tmp_path, steps=6, active=3)
    assert traced_steps(tmp_path, 5) == [3, 4, 5]


def test_after_a_resume_the_steps_are_still_the_runs(tmp_path):
    train(tmp_path, steps=4, start_step=7)
    assert files(tmp_path) == ["t/iteration_10/rank0_trace.json"]
    assert traced_steps(tmp_path, 10) == [10]


def test_a_cycle_entered_after_its_warm_up_began_is_left_out(tmp_path):
    train(tmp_path, steps=7, start_step=9)  # step 10 would be traced without warm-up
    assert files(tmp_path) == ["t/iteration_15/rank0_trace.json"]


def test_a_run_that_ends_before_the_active_step_writes_no_empty_trace(tmp_path):
    train(tmp_path, steps=4)
    assert files(tmp_path) == []


def test_a_run_that_ends_between_active_steps_keeps_what_it_has(tmp_path):
    train(tmp_path, steps=4, active=3)
    assert files(tmp_path) == ["t/iteration_4/rank0_trace.json"]
    assert traced_steps(tmp_path, 4) == [3, 4]


def train_on_ranks(folder: str) -> None:
    train(Path(folder), steps=5, rank=torch.distributed.get_rank())


def test_every_rank_writes_its_own_trace(tmp_path):
    run_ranks(train_on_ranks, 2, str(tmp_path))
    assert files(tmp_path) == [f"t/iteration_5/rank{rank}_trace.json" for rank in (0, 1)]


def test_switched_off_nothing_is_written_and_nothing_is_checked(tmp_path):
    with profiling(enabled=False, dump_folder=tmp_path, freq=1, active=5) as profiler:
        profiler.step()
    with memory_snapshot(enabled=False, dump_folder=tmp_path, freq=1) as snapshots:
        snapshots.step()
    assert files(tmp_path) == []


def test_a_cycle_may_be_all_warm_up_and_active(tmp_path):
    train(tmp_path, steps=4, freq=4, warmup=3, active=1)
    assert traced_steps(tmp_path, 4) == [4]


# --- memory snapshots ---------------------------------------------------------------------------


@pytest.mark.skipif(device.supports_memory_history(), reason="says what other devices answer")
def test_on_a_device_without_a_history_a_snapshot_warns_once_and_writes_nothing(tmp_path, caplog):
    warn_once.cache_clear()
    for _ in range(2):
        with memory_snapshot(enabled=True, dump_folder=tmp_path, freq=1) as snapshots:
            snapshots.step()
    assert len(caplog.messages) == 1
    assert "profiling.enable_memory_snapshot = true has no effect" in caplog.messages[0]
    assert files(tmp_path) == []


@pytest.fixture
def recorded(monkeypatch) -> list[int | None]:
    """Stands for an allocator with a history, which the CPU lacks; collects what is asked of it."""
    calls: list[int | None] = []
    monkeypatch.setattr(device, "supports_memory_history", lambda: True)
    monkeypatch.setattr(device, "record_memory_history", calls.append)
    monkeypatch.setattr(device, "dump_memory_history", lambda path: Path(path).touch())
    return calls


def test_a_snapshot_is_written_each_freq_steps_of_the_run(tmp_path, recorded):
    with memory_snapshot(
        enabled=True, dump_folder=tmp_path, snapshot_folder="m", freq=4, rank=3, start_step=3
    ) as snapshots:
        for _ in range(6):
            snapshots.step()
    assert files(tmp_path) == [
        f"m/iteration_{step}/rank3_memory_snapshot.pickle" for step in (4, 8)
    ]
    assert recorded == [100_000, None]


def test_running_out_of_memory_leaves_a_snapshot_of_the_step_and_goes_on_failing(
    tmp_path, recorded
):
    with (
        pytest.raises(torch.OutOfMemoryError),
        memory_snapshot(enabled=True, dump_folder=tmp_path, freq=4, start_step=5) as snapshots,
    ):
        snapshots.step()
        raise torch.OutOfMemoryError
    assert files(tmp_path) == ["memory_snapshot/iteration_7_exit/rank0_memory_snapshot.pickle"]
    assert recorded == [100_000, None]


def test_another_failure_leaves_no_snapshot_and_stops_recording(tmp_path, recorded):
    with (
        pytest.raises(KeyError),
        memory_snapshot(enabled=True, dump_folder=tmp_path, freq=4),
    ):
        raise KeyError
    assert files(tmp_path) == []
    assert recorded == [100_000, None]


@pytest.mark.skipif(not device.supports_memory_history(), reason="needs an allocator's history")
def test_a_real_snapshot_holds_the_allocation(tmp_path):
    import pickle

    with memory_snapshot(enabled=True, dump_folder=tmp_path, freq=1) as snapshots:
        block = torch.ones(1 << 20, device=device.local_device(0))
        snapshots.step()
    (path,) = tmp_path.rglob("*.pickle")
    events = pickle.loads(path.read_bytes())["device_traces"][0]
    assert any(event["size"] == block.nbytes for event in events)

"""Writing while training goes on: a copy, one in flight, and no failure that stays unheard.

The failure of an asynchronous save is shown in test_manager.py, beside the synchronous one.
"""

from __future__ import annotations

import logging
import resource
import threading
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager

from tests.checkpoint.worlds import Run, same, train_and_save
from tests.world import run_ranks
from torchtitan_lite.checkpoint import manager as manager_module
from torchtitan_lite.checkpoint.manager import CheckpointManager


def train_on_while_writing(folder: Path, leaky: bool) -> list[bool]:
    """Hold the writer back, change the weights, let it go: what did it write?"""
    manager, run = CheckpointManager(folder, async_mode="async"), Run({"fsdp": 2})
    go = threading.Event()
    write = manager._write

    def late_write(*args: object, **options: object) -> None:
        go.wait(20)
        write(*args, **options)  # type: ignore[arg-type]

    unstaged = patch.object(manager, "_stage", _done)
    run.step()
    expected = run.full()
    with patch.object(manager, "_write", late_write):
        if leaky:
            with unstaged:
                manager.save(1, run.state())
        else:
            manager.save(1, run.state())
        manager.wait_for_staging()
        run.step()
        manager.poll()  # in flight still: returns at once
        listed = [path.name for path in folder.iterdir()]
        go.set()
        manager.finish()
    loaded = Run({"fsdp": 2}, seed="another")
    loaded.load(manager)
    return [same(loaded.full(), expected), listed == []]


def _done(state: dict) -> Future:
    future: Future = Future()
    future.set_result(state)
    return future


def test_steps_made_while_a_save_is_in_flight_do_not_leak_into_it(tmp_path: Path) -> None:
    assert run_ranks(train_on_while_writing, 2, tmp_path, False) == [[True, True]] * 2


def test_without_the_copy_they_would(tmp_path: Path) -> None:
    assert run_ranks(train_on_while_writing, 2, tmp_path, True) == [[False, True]] * 2


def several_saves(folder: Path) -> bool:
    states = train_and_save(folder, {"fsdp": 2}, [1, 2, 3], async_mode="async", keep_latest_k=2)
    loads = []
    for step in (2, 3):
        run = Run({"fsdp": 2}, seed="another")
        loads.append(run.load(CheckpointManager(folder), step=step) == step)
        loads.append(same(run.full(), states[step]))
    return all(loads)


def test_saves_in_a_row_each_hold_their_own_step(tmp_path: Path) -> None:
    assert run_ranks(several_saves, 2, tmp_path) == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]


def a_copy_that_fails_on_one_rank(folder: Path) -> str:
    manager, run = CheckpointManager(folder, async_mode="async"), Run({"fsdp": 2})

    def out_of_memory(stager: DefaultStager, state: dict) -> dict:
        raise MemoryError("no room for a copy")

    if dist.get_rank() == 1:
        DefaultStager.stage = out_of_memory  # type: ignore[method-assign, assignment]
    manager.save(1, run.state())
    try:
        manager.finish()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_copy_that_fails_on_one_rank_is_an_error_on_all_and_no_hang(tmp_path: Path) -> None:
    messages = run_ranks(a_copy_that_fails_on_one_rank, 2, tmp_path, timeout=20)
    assert messages[0] == messages[1]
    assert "rank 1: MemoryError: no room for a copy" in messages[0]


def ranks_that_finish_apart(folder: Path) -> list[int]:
    """Rank 1's writer ends late: no rank may look at the result before it."""
    manager, run = CheckpointManager(folder, async_mode="async"), Run({"fsdp": 2})
    released = threading.Event()

    def late(step: int) -> None:
        if dist.get_rank() == 1:
            released.wait(20)
        raise OSError("after the save")  # a failure that the writer thread does not agree on

    manager._prune = late  # type: ignore[method-assign]
    manager.save(1, run.state())
    raised_at = []
    for poll in range(2000):
        if poll == 300:
            released.set()
        try:
            manager.poll()
        except RuntimeError:
            raised_at.append(poll)
            break
    return raised_at


def test_all_ranks_raise_at_the_same_poll_however_apart_they_finish(tmp_path: Path) -> None:
    first, second = run_ranks(ranks_that_finish_apart, 2, tmp_path, timeout=30)
    assert first == second and first[0] >= 300


def many_saves(folder: Path, leaky: bool) -> float:
    """Growth of the peak resident size over 20 asynchronous saves, in units of one state."""
    weight = torch.zeros(2_000_000)
    manager = CheckpointManager(folder, async_mode="async", keep_latest_k=1)
    kept, peaks = [], []
    for step in range(1, 24):
        manager.save(step, {"norm.weight": weight})
        if leaky:
            kept.append(weight.clone())
        if step in (3, 23):
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    manager.finish()
    return (peaks[1] - peaks[0]) / weight.nbytes


@pytest.mark.parametrize("leaky", [False, True])
def test_memory_does_not_grow_with_each_save(tmp_path: Path, leaky: bool) -> None:
    growth = run_ranks(many_saves, 1, tmp_path, leaky)[0]
    assert growth > 10 if leaky else growth < 4


def pinned_on_a_cpu(folder: Path) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchtitan_lite").addHandler(handler)
    logging.getLogger("torchtitan_lite").setLevel(logging.INFO)
    with patch.object(manager_module.torch.accelerator, "is_available", lambda: False):
        train_and_save(folder, {"fsdp": 1}, [1, 2], async_mode="async_with_pinned_mem")
    return lines


def test_pinned_memory_without_an_accelerator_is_plain_async_and_said_once(tmp_path: Path) -> None:
    lines = run_ranks(pinned_on_a_cpu, 1, tmp_path)[0]
    assert [line for line in lines if "async_with_pinned_mem" in line] == [
        "checkpoint.async_mode = async_with_pinned_mem: no accelerator, so plain async"
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]

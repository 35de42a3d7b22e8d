"""A rank killed at any point of a save leaves a complete checkpoint, the old or the new one."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from tests.checkpoint.worlds import Run, resume, same, train_and_save
from tests.world import RankFailure, run_ranks
from torchtitan_lite.checkpoint import manager, manifest
from torchtitan_lite.checkpoint.manager import CheckpointManager

# Point -> (owner, name of the function, rank to kill, step that loads afterwards). The rank is
# killed on entering the function, unless the point says otherwise.
POINTS: dict[str, tuple[Any, str, int, int]] = {
    "before its shard": (FileSystemWriter, "write_data", 1, 2),
    "before the index": (FileSystemWriter, "finish", 0, 2),
    "before its hash": (manager, "measure", 1, 2),
    "before the manifest": (manager, "write_manifest", 0, 2),
    "before the manifest is on disk": (manifest.os, "fsync", 0, 2),
    "before the rename": (manager, "publish", 0, 2),
    "before the removal of old ones": (manager, "prune", 0, 4),
    "amid the removal of an old one": (manifest.shutil, "rmtree", 0, 4),
}


def die_at(point: str, folder: Path, async_mode: str) -> None:
    owner, name, rank, _ = POINTS[point]
    run = Run({"fsdp": 2})
    saver = CheckpointManager(folder, keep_latest_k=1, async_mode=async_mode)
    for _ in range(4):
        run.step()
    if dist.get_rank() == rank:
        original = getattr(owner, name)

        def die(*args: Any, **options: Any) -> Any:
            if name == "fsync" and not os.path.exists(folder / "step-4.tmp" / manifest.MANIFEST):
                return original(*args, **options)  # DCP syncs its own files first
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, die)
    saver.save(4, run.state())
    saver.finish()


@pytest.mark.parametrize(
    ("point", "async_mode"),
    [*((point, "disabled") for point in POINTS), ("before its hash", "async")],
)
def test_a_rank_killed_in_a_save_leaves_a_complete_checkpoint(
    tmp_path: Path, point: str, async_mode: str, two_steps: dict
) -> None:
    folder = two_steps["copy"](tmp_path)
    with pytest.raises(RankFailure, match="rank . died, exit code -9|onnection|closed"):
        run_ranks(die_at, 2, point, folder, async_mode, timeout=20)
    step, state = run_ranks(resume, 1, folder, None)[0]
    assert step == POINTS[point][3]
    assert same(state, two_steps[step])
    if step == 2:
        assert (folder / "step-4.tmp").is_dir() and not (folder / "step-4").exists()


def finish_the_save(folder: Path) -> list[str]:
    train_and_save(folder, {"fsdp": 2}, [2, 4], keep_latest_k=1)
    return sorted(os.listdir(folder))


def test_the_next_save_clears_what_a_crash_left(tmp_path: Path, two_steps: dict) -> None:
    folder = two_steps["copy"](tmp_path)
    with pytest.raises(RankFailure):
        run_ranks(die_at, 2, "before the rename", folder, "disabled", timeout=20)
    assert sorted(os.listdir(folder)) == ["step-2", "step-4.tmp"]
    assert run_ranks(finish_the_save, 2, folder)[0] == ["step-4"]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The full states at steps 2 and 4, and a way to copy a folder that holds step 2."""
    folder = tmp_path_factory.mktemp("two") / "checkpoint"
    states = run_ranks(_states, 1, folder)[0]
    return {**states, "copy": lambda target: shutil.copytree(folder, target / "checkpoint")}


def _states(folder: Path) -> dict:
    states = train_and_save(folder, {"fsdp": 1}, [2])
    run = Run({"fsdp": 1})
    for _ in range(4):
        run.step()
    assert not same(run.full(), states[2])  # the comparison can fail
    return {**states, 4: run.full()}

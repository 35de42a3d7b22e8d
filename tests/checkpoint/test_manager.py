"""Saved on one mesh, loaded on any other, bit by bit; whole or not at all; damage is named."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.checkpoint.test_manifest import DAMAGES, flip_a_byte
from tests.checkpoint.worlds import Run, draw, full, mesh_of, resume, same, train_and_save
from tests.world import run_ranks
from torchtitan_lite.checkpoint.agreement import CheckpointError
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.manifest import MANIFEST, read_manifest, verify
from torchtitan_lite.checkpoint.state import (
    cast_state,
    materialise_state,
    model_state,
    optimizer_state,
    part_of,
)
from torchtitan_lite.config import ConfigError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """Steps 2 and 4 of a run on 4 ranks of fsdp, and the full states they must give."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(train_and_save, 4, folder, {"fsdp": 4}, [2, 4])[0]


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [(4, {"fsdp": 2, "tp": 2}), (2, {"tp": 2}), (1, {"fsdp": 1}), (1, None)],
    ids=str,
)
def test_any_mesh_loads_weights_moments_and_counts_bitwise(
    saved: tuple[Path, dict], ranks: int, axes: dict[str, int] | None
) -> None:
    folder, states = saved
    for step, state in run_ranks(resume, ranks, folder, axes):
        assert step == 4
        assert same(state, states[4])
        assert not same(state, states[2])  # the comparison can fail
        assert state["optimizer.state.embed_tokens.weight.step"].item() == 4
        assert state["trainer.tokens_seen"].item() == 4000


def chain(folder: Path) -> bool:
    """Two steps, save, resume on another mesh, two steps: the same as four steps."""
    whole, first, second = Run({"tp": 2}), Run({"tp": 2}), Run({"fsdp": 2}, seed="b")
    for _ in range(4):
        whole.step()
    for _ in range(2):
        first.step()
    manager = CheckpointManager(folder)
    manager.save(2, first.state())
    second.load(manager)
    for _ in range(2):
        second.step()
    forgetful = Run({"fsdp": 2}, seed="b")
    forgetful.load(manager, exclude=["optimizer"])
    for _ in range(2):
        forgetful.step()
    assert not same(forgetful.full(), whole.full())  # dropped moments do show
    return same(second.full(), whole.full())


def test_a_run_resumed_on_another_mesh_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    assert run_ranks(chain, 2, tmp_path) == [True] * 2


def sharded_modules(folder: Path) -> list[bool]:
    """FSDP2 over TP cuts a dim twice (strided shards); what a load fills must reach the forward."""

    def build(axes: dict[str, int], seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.Linear(16, 10, bias=False))
        mesh = mesh_of(axes)
        if "tp" in axes:
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["fsdp"])
        return model

    tokens = torch.arange(12.0).view(2, 6)
    first, second = build({"fsdp": 2, "tp": 2}, seed=1), build({"fsdp": 4}, seed=2)
    expected = first(tokens)
    manager = CheckpointManager(folder)
    manager.save(1, model_state(dict(first.named_parameters())))
    manager.load(model_state(dict(second.named_parameters())))
    weights = zip(first.parameters(), second.parameters(), strict=True)
    return [torch.equal(full(a), full(b)) for a, b in weights] + [
        torch.allclose(second(tokens), expected, atol=1e-6)
    ]


def test_weights_loaded_into_sharded_modules_are_those_they_compute_with(tmp_path: Path) -> None:
    assert run_ranks(sharded_modules, 4, tmp_path) == [[True] * 3] * 4


def tied_over_two_stages(folder: Path, kind: str) -> tuple:
    """Each of 2 ranks is a stage: both hold the tied embedding, on meshes of their own."""
    world = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "fsdp"))
    rank = dist.get_rank()

    def stage(seed: str) -> dict[str, nn.Parameter]:
        names = ["embed_tokens.weight", f"layers.{rank}.mlp.up_proj.weight"]
        tensors = {name: draw(seed + name, (10, 8)) for name in names}
        if kind == "dtensor":
            own = world["fsdp"]  # another mesh on each rank
            tensors = {
                name: distribute_tensor(tensor, own, [Shard(0)], src_data_rank=None)
                for name, tensor in tensors.items()
            }
        return {name: nn.Parameter(tensor) for name, tensor in tensors.items()}

    def state_of(parameters: dict[str, nn.Parameter], *, stepped: bool) -> dict:
        optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
        if stepped:
            for parameter in parameters.values():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        else:
            materialise_state(optimizer)
        return {**model_state(parameters), **optimizer_state(optimizer, parameters)}

    manager = CheckpointManager(folder)
    written = state_of(stage("first"), stepped=True)
    manager.save(1, written)
    loaded = state_of(stage("another"), stepped=False)
    manager.load(loaded)
    as_full = {name: full(tensor) for name, tensor in loaded.items()}
    return same(as_full, {n: full(t) for n, t in written.items()}), as_full["embed_tokens.weight"]


@pytest.mark.parametrize("kind", ["dtensor", "plain"])
def test_a_tied_head_on_the_last_stage_is_written_once_and_loaded_twice(
    tmp_path: Path, kind: str
) -> None:
    results = run_ranks(tied_over_two_stages, 2, tmp_path, kind)
    assert all(equal for equal, _ in results)
    assert torch.equal(results[0][1], results[1][1])
    index = torch.distributed.checkpoint.FileSystemReader(tmp_path / "step-1").read_metadata()
    embedding = index.state_dict_metadata["embed_tokens.weight"]
    assert isinstance(embedding, TensorStorageMetadata) and len(embedding.chunks) == 1
    stored = sum(info.length for info in index.storage_data.values())
    on_disk = sum(path.stat().st_size for path in (tmp_path / "step-1").glob("*.distcp"))
    assert stored == on_disk


def damage_each_file(folder: Path) -> list[tuple]:
    """Damage a file, load, mend it; for each file and each kind of damage, on all ranks alike."""
    manager, run, seen = CheckpointManager(folder), Run({"fsdp": 2}, seed="another"), []
    for name in sorted(path.name for path in (folder / "step-4").iterdir()):
        whole = (folder / "step-4" / name).read_bytes()
        for damage in DAMAGES:
            lines: list[str] = []
            handler = logging.Handler()
            handler.emit = lambda record, lines=lines: lines.append(record.getMessage())  # type: ignore
            logging.getLogger("torchtitan_lite").addHandler(handler)
            dist.barrier()
            if dist.get_rank() == 0:
                damage(folder / "step-4" / name)
            dist.barrier()
            step = run.load(manager)
            refusal = None
            try:
                run.load(manager, step=4)
            except ConfigError as error:
                refusal = str(error)
            dist.barrier()
            if dist.get_rank() == 0:
                (folder / "step-4" / name).write_bytes(whole)
            logging.getLogger("torchtitan_lite").removeHandler(handler)
            seen.append((name, damage.__name__, step, refusal, run.full(), lines))
    return seen


def test_damage_to_any_file_is_named_and_the_previous_step_loads(
    saved: tuple[Path, dict], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    by_rank = run_ranks(damage_each_file, 2, folder)
    assert len(by_rank[0]) == 6 * 3  # four shards, the index, the manifest
    for name, kind, step, refusal, state, lines in by_rank[0]:
        assert step == 2 and same(state, saved[1][2]), (name, kind)
        assert any(name in line for line in lines), (name, kind, lines)
        assert "load_step = 4" in refusal and "\n" not in refusal
        absent = name == MANIFEST and kind == "delete"
        assert ("no such step" in refusal) if absent else (f"{name}: " in refusal)
    assert [row[:4] for row in by_rank[0]] == [row[:4] for row in by_rank[1]]


def load_unverified(folder: Path) -> tuple:
    with patch("torchtitan_lite.checkpoint.manager.verify", return_value=[]):
        return resume(folder, None)


def test_without_verification_a_flipped_byte_loads_in_silence(
    saved: tuple[Path, dict], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    index = torch.distributed.checkpoint.FileSystemReader(folder / "step-4").read_metadata()
    place = next(
        info for key, info in index.storage_data.items() if key.fqn == "layers.0.mlp.up_proj.weight"
    )
    shard = folder / "step-4" / place.relative_path
    content = bytearray(shard.read_bytes())
    piece = bytes(content[place.offset : place.offset + place.length])
    weights = saved[1][4]["layers.0.mlp.up_proj.weight"]
    row = next(r for r in weights if r.numpy().tobytes() in piece).numpy().tobytes()
    content[place.offset + piece.index(row)] ^= 1
    shard.write_bytes(content)
    step, state = run_ranks(load_unverified, 1, folder)[0]
    assert step == 4 and not same(state, saved[1][4])
    step, state = run_ranks(resume, 1, folder, None)[0]
    assert step == 2 and same(state, saved[1][2])


def save_again(folder: Path) -> tuple:
    manager, run = CheckpointManager(folder), Run({"fsdp": 2})
    run.load(manager, step=4)
    before = {p: p.stat().st_mtime_ns for p in (folder / "step-4").iterdir()}
    dist.barrier()
    manager.save(4, run.state())
    untouched = before == {p: p.stat().st_mtime_ns for p in (folder / "step-4").iterdir()}
    dist.barrier()
    if dist.get_rank() == 0:
        flip_a_byte(folder / "step-4" / "__0_0.distcp")
        (folder / "step-4.tmp").mkdir()
        (folder / "step-4.tmp" / "__7_0.distcp").touch()  # a crash of a larger world
    dist.barrier()
    manager.save(4, run.state())
    loaded = Run({"fsdp": 2}, seed="another")
    loaded.load(manager, step=4)
    return untouched, same(loaded.full(), run.full()), sorted(os.listdir(folder))


def test_a_whole_step_is_never_written_again_and_a_damaged_one_is_replaced(
    saved: tuple[Path, dict], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    for result in run_ranks(save_again, 2, folder):
        assert result == (True, True, ["step-2", "step-4"])


def save_on_another_branch(folder: Path) -> bool:
    """Begin from step 2 and arrive at a step 4 of its own."""
    manager, run = CheckpointManager(folder), Run({"fsdp": 2})
    run.load(manager, step=2)
    run.step()
    manager.save(4, run.state())
    loaded = Run({"fsdp": 2}, seed="another")
    loaded.load(manager, step=4)
    return same(loaded.full(), run.full())


def test_a_step_of_an_abandoned_branch_gives_way_to_the_runs_own(
    saved: tuple[Path, dict], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    assert run_ranks(save_on_another_branch, 2, folder) == [True, True]


def another_rope(folder: Path) -> str:
    run = Run({"fsdp": 2})
    run.step()
    CheckpointManager(folder, model={"rope_theta": 1e4}).save(1, run.state())
    try:
        run.load(CheckpointManager(folder, model={"rope_theta": 5e5}))
    except ConfigError as error:
        return str(error)
    return "loaded"


def test_another_model_of_the_same_shapes_is_refused(tmp_path: Path) -> None:
    for message in run_ranks(another_rope, 2, tmp_path):
        assert "checkpoint of another model: rope_theta 10000.0, not 500000.0" in message


def keep_two(folder: Path) -> list[str]:
    train_and_save(folder, {"fsdp": 2}, [1, 2, 3, 4], keep_latest_k=2)
    return sorted(os.listdir(folder))


def test_the_newest_k_stay(tmp_path: Path) -> None:
    assert run_ranks(keep_two, 2, tmp_path)[0] == ["step-3", "step-4"]


def save_after_damage(folder: Path) -> list[str]:
    manager, run = CheckpointManager(folder, keep_latest_k=2), Run({"fsdp": 2})
    assert run.load(manager) == 2  # step 4 is damaged
    run.step()
    manager.save(5, run.state())
    return sorted(os.listdir(folder))


def test_a_damaged_step_does_not_take_the_place_of_a_whole_one(
    saved: tuple[Path, dict], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    flip_a_byte(folder / "step-4" / "__0_0.distcp")
    assert run_ranks(save_after_damage, 2, folder)[0] == ["step-2", "step-4", "step-5"]


def full_disk_on_one_rank(folder: Path, async_mode: str) -> tuple:
    """Rank 1 may write no file beyond 200 bytes: its write fails as on a full disk."""
    run = Run({"fsdp": 2})
    run.step()
    CheckpointManager(folder).save(1, run.state())
    run.step()
    manager = CheckpointManager(folder, async_mode=async_mode)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, unlimited[1]))
    message, polls = "", 0
    try:
        manager.save(2, run.state())
        while polls < 1000:
            manager.poll()
            polls += 1
            time.sleep(0.01)
    except CheckpointError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    step = Run({"fsdp": 2}, seed="another").load(manager)
    manager.save(2, run.state())  # the disk has room again
    manager.finish()
    return message, polls, step, sorted(os.listdir(folder))


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_failed_write_on_one_rank_is_an_error_on_all_and_nothing_counts(
    tmp_path: Path, async_mode: str
) -> None:
    results = run_ranks(full_disk_on_one_rank, 2, tmp_path, async_mode, timeout=30)
    assert results[0] == results[1]  # the same words, at the same poll
    message, _, step, listing = results[0]
    assert "step-2" in message and "rank 1" in message and "\n" not in message
    assert step == 1
    assert listing == ["step-1", "step-2"]


def export(folder: Path) -> bool:
    manager, run = CheckpointManager(folder), Run({"fsdp": 2})
    run.step()
    manager.save(1, cast_state(run.state(), torch.bfloat16), model_only=True)
    loaded = Run({"fsdp": 2}, seed="another")
    state = loaded.state()
    manager.load_from(folder / "step-1", state, model_only=True)
    expected = model_only(cast_state(run.full(), torch.bfloat16))
    return same(model_only(loaded.full()), {n: t.float() for n, t in expected.items()})


def model_only(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if part_of(name) == "model"}


def test_an_export_holds_weights_alone_in_the_precision_asked_for(tmp_path: Path) -> None:
    assert run_ranks(export, 2, tmp_path) == [True, True]
    index = torch.distributed.checkpoint.FileSystemReader(tmp_path / "step-1").read_metadata()
    assert {part_of(key) for key in index.state_dict_metadata} == {"model"}
    for entry in index.state_dict_metadata.values():
        assert isinstance(entry, TensorStorageMetadata)
        assert entry.properties.dtype == torch.bfloat16
    assert read_manifest(tmp_path / "step-1").model_only and verify(tmp_path / "step-1") == []


def stages_saved_apart(folder: Path) -> None:
    CheckpointManager(folder).save(dist.get_rank(), {"norm.weight": torch.ones(1)})


def test_ranks_that_save_different_steps_are_stopped(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the ranks save different things"):
        run_ranks(stages_saved_apart, 2, tmp_path)
    assert not list(tmp_path.iterdir())

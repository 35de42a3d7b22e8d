"""local_batch_size = -1, per-operator recomputation, and what a resumed run changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_lite.config import Config, changed_settings, check_config, resolve, to_toml


def _config(*, local: int, total: int, pp: int = 1) -> Config:
    config = Config()
    config.training.dataset = "synthetic"
    config.training.local_batch_size = local
    config.training.global_batch_size = total
    config.parallelism.pipeline_parallel_degree = pp
    return config


@pytest.mark.parametrize(("world_size", "rows"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_the_share_follows_the_mesh(world_size: int, rows: int) -> None:
    config = _config(local=-1, total=8)
    assert check_config(config, None, world_size) == []
    resolve(config, world_size)
    assert config.training.local_batch_size == rows
    resolve(config, world_size)
    assert (config.training.local_batch_size, config.training.global_batch_size) == (rows, 8)


def test_a_global_batch_that_the_ranks_do_not_share_evenly_is_refused() -> None:
    (problem,) = check_config(_config(local=-1, total=9), None, 2)
    assert "not a multiple" in problem.line


@pytest.mark.parametrize("pp", [1, 2])
def test_one_of_the_two_sizes_must_be_given(pp: int) -> None:
    (problem,) = check_config(_config(local=-1, total=-1, pp=pp), None, 2)
    assert "give one of training.local_batch_size and training.global_batch_size" in problem.line


def test_per_operator_recomputation_and_a_split_backward_are_refused() -> None:
    """torch frees what an operator kept after one backward; a split one comes twice."""
    config = _config(local=8, total=8, pp=2)
    config.activation_checkpoint.selective_ac_option = "op"
    assert check_config(config, None, 2) == []
    config.parallelism.pipeline_parallel_schedule = "ZBVZeroBubble"
    (problem,) = check_config(config, None, 2)
    assert "splits the backward" in problem.line


def test_what_a_resumed_run_computes_otherwise_is_listed_and_its_mesh_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(_config(local=8, total=8)))
    changed = _config(local=4, total=8, pp=2)
    assert changed_settings(path, changed) == []
    changed.debug.seed = 7
    assert changed_settings(path, changed) == ["debug.seed was 42, is 7"]

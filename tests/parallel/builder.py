"""The real build_model on a rank, for tests that look below the Trainer."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from tests.parity.harness import Mesh, make_config
from torchtitan_lite.build import ParallelModel, build_model
from torchtitan_lite.config import Config, check_config, resolve
from torchtitan_lite.mesh import Degrees, ParallelMesh, build_mesh
from torchtitan_lite.models.config import ModelConfig

CPU = torch.device("cpu")


def configure(mesh: Mesh, options: dict[str, Any], model: ModelConfig) -> Config:
    """The harness's configuration, checked and resolved; it writes no file."""
    config = make_config(mesh, "unused", {"job.save_config_file": "", **options})
    problems = check_config(config, model, mesh.world)
    assert not problems, problems
    resolve(config, mesh.world)
    return config


def mesh_of(config: Config) -> ParallelMesh:
    """The mesh of a resolved configuration, as the Trainer builds it."""
    degrees = Degrees.of(config)
    return build_mesh(degrees, "cpu", dist.get_rank())


def build(config: Config, model: ModelConfig) -> tuple[ParallelMesh, ParallelModel]:
    """This rank's place and its parts of `model`."""
    # DTensor warns of each full_tensor() over two axes.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    mesh = mesh_of(config)
    return mesh, build_model(config, model, mesh, CPU)

"""A model from one folder into another, of the other kind.

    Hugging Face folder  ->  step folder  ->  Hugging Face folder

The parameters pass through memory once, sharded over however many ranks there are: one process
holds one copy of the model, N ranks an N-th each. The bits of a float survive: a conversion there
and back gives the same tensors.

Proven in tests/test_convert.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from torchtitan_lite import device as devices
from torchtitan_lite.build import load_model
from torchtitan_lite.checkpoint.hugging_face import read_index
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state import model_state
from torchtitan_lite.checkpoint.weights import Weights, write_hugging_face
from torchtitan_lite.config import Config, resolve
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import stored_shapes
from torchtitan_lite.models.families import regions


def to_step_folder(weights: Weights, folder: Path) -> None:
    """Write the weights of a Hugging Face folder as `folder`/step-0; a collective of the world.

    In bf16 if all tensors on disk are, else in fp32, which holds every other exactly.
    """
    dtypes = {stored.dtype for stored in read_index(weights.folder, key=weights.named).values()}
    state = _load(weights, "bfloat16" if dtypes == {"BF16"} else "float32")
    model = dataclasses.asdict(weights.model)
    manager = CheckpointManager(folder, model=model, hf_assets_path=str(weights.hf_assets_path))
    manager.save(0, state, model_only=True)


def to_hugging_face(weights: Weights, folder: Path, *, dtype: str, hf_assets_path: Path) -> None:
    """Write `folder` for `AutoModelForCausalLM.from_pretrained`; a collective of the world."""
    state = _load(weights, weights.precision(dtype))
    write_hugging_face(folder, state, weights.model, hf_assets_path=hf_assets_path, dtype=dtype)


def _load(weights: Weights, dtype: str) -> Mapping[str, Tensor]:
    """The parameters in host memory, sharded over all ranks."""
    config = Config()
    config.training.dtype = config.training.mixed_precision_param = dtype  # type: ignore[assignment]
    config.training.enable_cpu_offload = devices.device_type() != "cpu"
    resolve(config, dist.get_world_size())
    return model_state(load_model(config, weights)[0].stored)


def key_table(config: ModelConfig) -> list[tuple[str, Sequence[int], str]]:
    """(our name, its shape, where its numbers lie on disk) of each parameter of a model."""
    shapes = stored_shapes(config)
    rows: list[tuple[str, Sequence[int], str]] = []
    for name, places in regions(config, shapes).items():
        for place in places:
            box = ", ".join(f"{side.start or 0}:{side.stop}" for side in place.theirs)
            theirs = f"{place.tensor}[{box}]" + ".T" * place.transposed
            rows.append((name, tuple(shapes[name]), theirs))
    return rows

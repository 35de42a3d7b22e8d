"""What the tests of this room share: a small model on any mesh, its optimizer, its whole state.

Weights and gradients are drawn by name and step, so that the same run on any mesh has the same
full tensors: what one mesh saved can be compared bit by bit with what another loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

# Building an optimizer imports this; here it is imported once, and not by every forked rank.
import torch._dynamo  # noqa: F401
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state import (
    State,
    materialise_state,
    model_state,
    optimizer_state,
    read_train_state,
    train_state,
)

# 10 rows over 4 ranks are an uneven shard; the norm has one dim.
SHAPES = {
    "embed_tokens.weight": (10, 8),
    "layers.0.mlp.up_proj.weight": (16, 8),
    "layers.0.input_layernorm.weight": (8,),
}


def draw(name: str, shape: Sequence[int]) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mesh_of(axes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def place(full: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Shard rows over fsdp; matrices also over tp, by columns; vectors replicated over tp."""
    if mesh is None:
        return full
    on_tp = Shard(1) if full.dim() == 2 else Replicate()
    placements = [Shard(0) if axis == "fsdp" else on_tp for axis in mesh.mesh_dim_names or ()]
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


class Run:
    """A model of SHAPES on `axes` (None: plain tensors), an optimizer, and the training scalars."""

    def __init__(
        self,
        axes: dict[str, int] | None,
        *,
        seed: str = "first",
        shapes: dict[str, tuple[int, ...]] | None = None,
        optimizer: str = "foreach",
    ) -> None:
        mesh = None if axes is None else mesh_of(axes)
        self.mesh = mesh
        self.named_parameters = {
            name: nn.Parameter(place(draw(seed + name, shape), mesh))
            for name, shape in (shapes or SHAPES).items()
        }
        self.optimizer = make_optimizer(list(self.named_parameters.values()), optimizer)
        self.scalars: dict[str, int | float] = {"step": 0, "tokens_seen": 0}

    def step(self) -> None:
        self.scalars["step"] += 1
        self.scalars["tokens_seen"] += 1000
        for name, parameter in self.named_parameters.items():
            gradient = draw(f"{name} {self.scalars['step']}", parameter.shape)
            parameter.grad = place(gradient, self.mesh)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        return {
            **model_state(self.named_parameters),
            **optimizer_state(self.optimizer, self.named_parameters),
            **train_state(self.scalars),
        }

    def load(self, manager: CheckpointManager, **options: object) -> int | None:
        materialise_state(self.optimizer)
        state = self.state()
        step = manager.load(state, **options)  # type: ignore[arg-type]
        self.scalars = read_train_state(state)
        return step

    def full(self) -> dict[str, Tensor]:
        return {name: full(tensor).clone() for name, tensor in self.state().items()}


def make_optimizer(parameters: list[nn.Parameter], kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)
    half = len(parameters) // 2
    groups = [
        {"params": parameters[:half], "weight_decay": 0.1},
        {"params": parameters[half:], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, fused=kind == "fused", foreach=kind == "foreach")


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Bitwise, name by name."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def train_and_save(folder: Path, axes: dict[str, int], steps: list[int], **options: object) -> dict:
    """Train to the last of `steps`, saving at each; the full state after each, by step."""
    manager = CheckpointManager(folder, **options)  # type: ignore[arg-type]
    run, states = Run(axes), {}
    while run.scalars["step"] < max(steps):
        run.step()
        manager.poll()
        if run.scalars["step"] in steps:
            step = int(run.scalars["step"])
            manager.save(step, run.state())
            states[step] = run.full()
    manager.finish()
    return states


def resume(folder: Path, axes: dict[str, int] | None, step: int = -1) -> tuple:
    """(step loaded, full state) of a run that starts with other weights and loads."""
    run = Run(axes, seed="another")
    loaded = run.load(CheckpointManager(folder), step=step)
    return loaded, run.full()

"""The one place that knows in which order a part of the model gets its plans.

Tensor and expert parallelism first, since they decide what each rank holds; then activation
checkpointing, around the collectives it would recompute; FSDP last, around everything.
"""

from __future__ import annotations

import torch

from torchtitan_lite.config import Config
from torchtitan_lite.mesh import ParallelMesh
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.parallel.activation import apply_activation_checkpointing
from torchtitan_lite.parallel.data import apply_data_parallel
from torchtitan_lite.parallel.expert import apply_expert_parallel
from torchtitan_lite.parallel.tensor import apply_tensor_parallel


def parallelize(part: Decoder, mesh: ParallelMesh, config: Config) -> None:
    """Give `part`, on the meta device, every plan that `config` asks for."""
    if mesh.degrees.tp > 1:
        apply_tensor_parallel(
            part,
            mesh.tp,
            sequence_parallel=config.parallelism.enable_sequence_parallel,
            loss_parallel=not config.parallelism.disable_loss_parallel,
        )
        part.tie_weights()  # the plan replaced both weights
    if mesh.degrees.ep > 1:
        apply_expert_parallel(part, mesh.ep)
    apply_activation_checkpointing(
        part,
        mode=config.activation_checkpoint.mode,
        selective_option=config.activation_checkpoint.selective_ac_option,
    )
    apply_data_parallel(
        part,
        mesh.fsdp,
        expert_mesh=mesh.efsdp,
        zero_stage=config.parallelism.zero_stage,
        param_dtype=getattr(torch, config.training.mixed_precision_param),
        reduce_dtype=getattr(torch, config.training.mixed_precision_reduce),
        cpu_offload=config.training.enable_cpu_offload,
    )

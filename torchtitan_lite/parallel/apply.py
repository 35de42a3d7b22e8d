"""The one place that knows in which order a part of the model gets its plans.

Float8 first, since a plan calls whatever linear it finds; tensor and expert parallelism, since they
decide what each rank holds, and context parallelism, which decides what it sees; then activation
checkpointing, around the collectives it would recompute, and the compiler, which captures both;
FSDP last, around everything.
"""

from __future__ import annotations

import torch

from torchtitan_lite.config import Config
from torchtitan_lite.config.derived import SPLIT_BACKWARD_SCHEDULES
from torchtitan_lite.mesh import ParallelMesh
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.parallel.activation import apply_activation_checkpointing
from torchtitan_lite.parallel.chunks import order_of_rows
from torchtitan_lite.parallel.compile import apply_compile
from torchtitan_lite.parallel.context import apply_context_parallel
from torchtitan_lite.parallel.data import apply_data_parallel
from torchtitan_lite.parallel.expert import apply_expert_parallel
from torchtitan_lite.parallel.tensor import apply_tensor_parallel
from torchtitan_lite.precision.grouped import apply_float8_to_experts
from torchtitan_lite.precision.linear import apply_float8


def parallelize(part: Decoder, mesh: ParallelMesh, config: Config) -> None:
    """Give `part`, on the meta device, every plan that `config` asks for."""
    float8 = config.quantize.linear.float8
    apply_float8(part, config)
    apply_float8_to_experts(part, config)
    if mesh.degrees.tp > 1:
        apply_tensor_parallel(
            part,
            mesh.tp,
            sequence_parallel=config.parallelism.enable_sequence_parallel,
            loss_parallel=not config.parallelism.disable_loss_parallel,
            float8_gathers=bool(float8.recipe_name) and float8.enable_tp_float8_all_gather,
        )
        part.tie_weights()  # the plan replaced both weights
    if mesh.degrees.ep > 1:
        apply_expert_parallel(part, mesh.ep)
    method = config.parallelism.context_parallel_method
    if mesh.degrees.cp > 1:
        apply_context_parallel(part, mesh.cp, order=order_of_rows(config), method=method)
    apply_activation_checkpointing(
        part,
        mode=config.activation_checkpoint.mode,
        selective_option=config.activation_checkpoint.selective_ac_option,
        attention_in_pieces=mesh.degrees.cp > 1 and method != "ulysses",
    )
    if config.compile.enable:
        schedule = config.parallelism.pipeline_parallel_schedule
        apply_compile(
            part,
            components=config.compile.components,
            backend=config.compile.backend,
            memory_budget=config.activation_checkpoint.memory_budget
            if config.activation_checkpoint.mode == "memory_budget"
            else 1.0,
            split_backward=mesh.degrees.pp > 1 and schedule in SPLIT_BACKWARD_SCHEDULES,
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

"""Configuration and mesh -> this rank's parts of the model, initialised and ready to run.

    meta device -> cut into stages -> plans (parallel/apply.py) -> storage -> weights from the seed

Training, evaluation and generation all come through here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_lite import device as devices
from torchtitan_lite.checkpoint.weights import Weights, load_weights
from torchtitan_lite.config import Config, num_stages
from torchtitan_lite.config.derived import V_SCHEDULES
from torchtitan_lite.loss import GlobalBatchLoss
from torchtitan_lite.mesh import Degrees, ParallelMesh, build_mesh
from torchtitan_lite.models.attention import CoreAttention
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import (
    Decoder,
    matmul_parameters,
    module_names,
    stored_buffers,
)
from torchtitan_lite.models.init import canonical_name, draw_parameter
from torchtitan_lite.models.moe import Experts
from torchtitan_lite.parallel.apply import parallelize
from torchtitan_lite.parallel.chunks import order_of_rows
from torchtitan_lite.parallel.data import set_last_micro_batch
from torchtitan_lite.parallel.pipeline import (
    Pipeline,
    TiedHead,
    balanced_stages,
    stages_of_rank,
)
from torchtitan_lite.parallel.tensor import reduce_partial_gradients
from torchtitan_lite.precision.delayed import DelayedScaling
from torchtitan_lite.precision.fsdp import gather_in_float8
from torchtitan_lite.precision.grouped import announce_float8_experts
from torchtitan_lite.precision.linear import announce_float8


@dataclass
class ParallelModel:
    """This rank's parts, and how a batch goes through them.

    `named_parameters` maps canonical names to the parameters that are optimised, counted in the
    norm and saved: every one but the copy of a tied head.
    """

    config: ModelConfig
    stages: list[list[str]]  # the modules of each stage, of all ranks
    parts: list[Decoder]
    named_parameters: dict[str, nn.Parameter]
    zero_stage: int
    pipeline: Pipeline | None
    tied_head: TiedHead | None
    scaling: DelayedScaling
    own_tokens: Callable[[Tensor], Tensor]  # (rows, seq) -> what of it goes through this rank

    def train(
        self,
        tokens: Tensor,
        labels: Tensor,
        keys: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        loss: GlobalBatchLoss,
        micro_batch_size: int,
    ) -> None:
        """Forward and backward of all this rank's rows (rows, seq) of a global batch.

        `loss` divides, and collects the sums, on the rank of the last stage. `keys` (rows,) are
        the randomness of dropout; None drops nothing. `positions` (rows, seq) restart at each
        document; None: a row is one.
        """
        self.scaling.begin()
        num_micro_batches = tokens.shape[0] // micro_batch_size
        if self.pipeline is not None:
            self.pipeline.train(
                tokens, labels, keys, positions, loss_fn=loss, num_micro_batches=num_micro_batches
            )
        else:
            (part,) = self.parts
            for index in range(num_micro_batches):
                rows = slice(index * micro_batch_size, (index + 1) * micro_batch_size)
                last = index == num_micro_batches - 1
                set_last_micro_batch(part, zero_stage=self.zero_stage, last=last)
                more = {"labels": labels, "keys": keys, "positions": positions}
                more = {name: None if t is None else t[rows] for name, t in more.items()}
                loss(part(tokens[rows], **more)).backward()
        reduce_partial_gradients(self.named_parameters.values())
        if self.tied_head is not None:
            self.tied_head.add_gradient_to_embedding()

    @torch.no_grad()
    def evaluate(
        self,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        *,
        loss: GlobalBatchLoss,
    ) -> None:
        """Forward of one micro-batch (rows, seq); `loss` collects the sums."""
        if self.pipeline is not None:
            self.pipeline.evaluate(tokens, labels, positions, loss_fn=loss)
        else:
            loss(self.parts[0](tokens, positions=positions, labels=labels))

    @property
    def stored(self) -> dict[str, Tensor]:
        """What the weights of this rank are on disk: parameters, and biases of balancing."""
        named: dict[str, Tensor] = {**self.named_parameters}
        for part in self.parts:
            named |= stored_buffers(part)
        return named

    @property
    def has_loss(self) -> bool:
        """Whether this rank holds the last stage, and with it the loss."""
        return self.pipeline is None or self.pipeline.has_last

    def after_update(self) -> None:
        """To be called whenever the parameters changed: by the optimizer or by a checkpoint."""
        if self.tied_head is not None:
            self.tied_head.copy_weight_to_head()


def build_model(
    config: Config,
    model_config: ModelConfig,
    mesh: ParallelMesh,
    device: torch.device,
    *,
    fresh: bool = True,
) -> ParallelModel:
    """This rank's parts on `device`, with the weights that `debug.seed` names.

    Not `fresh`: whatever lies in memory, to be filled from a checkpoint.
    """
    degrees, schedule = mesh.degrees, config.parallelism.pipeline_parallel_schedule
    total = num_stages(config, model_config.num_hidden_layers)
    modules = stage_modules(
        model_config,
        total,
        given=config.parallelism.module_fqns_per_model_part,
        layers_per_stage=config.parallelism.pipeline_parallel_layers_per_stage,
    )
    held = [0]
    if degrees.pp > 1:
        held = stages_of_rank(
            schedule, pp_rank=mesh.place["pp"], pp_degree=degrees.pp, num_stages=total
        )
    dtype = getattr(torch, config.training.dtype)
    storage = torch.device("cpu") if config.training.enable_cpu_offload else device
    stages: dict[int, Decoder] = {}
    if config.quantize.linear.float8.recipe_name:
        with torch.device("meta"):
            announce_float8(whole := Decoder(model_config), config)
            announce_float8_experts(whole, config)
    for index in held:
        with torch.device("meta"):
            part = Decoder(model_config, modules[index])
        for parameter in part.parameters():  # not the buffers, which are sums and counts
            parameter.data = parameter.data.to(dtype)
        _configure(part, config)
        parallelize(part, mesh, config)
        part.to_empty(device=storage)
        part.tie_weights()  # plain tensors got storage one by one
        gather_in_float8(part, config, mesh.fsdp)
        for module in part.modules():  # also where parameters wait in host memory
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.zeros_like(buffer, device=device)
        if fresh:
            initialise(part, seed=config.debug.seed, device=device)
        stages[index] = part
    pipeline = None
    if degrees.pp > 1:
        cut = degrees.cp * (degrees.tp if config.parallelism.enable_sequence_parallel else 1)
        in_fp32 = model_config.residual_in_fp32
        activation_dtype = getattr(
            torch, "float32" if in_fp32 else config.training.mixed_precision_param
        )
        pipeline = Pipeline(
            stages,
            num_stages=total,
            schedule=schedule,
            group=mesh.pp.get_group(),
            device=device,
            activation=(model_config.hidden_size, activation_dtype, cut),
        )
    parts = list(stages.values())
    tied_head = _tied_head(model_config, pipeline, schedule, mesh)
    return ParallelModel(
        config=model_config,
        stages=modules,
        parts=parts,
        named_parameters=_named_parameters(parts, tied_head),
        zero_stage=config.parallelism.zero_stage,
        pipeline=pipeline,
        tied_head=tied_head,
        scaling=DelayedScaling(parts, config, ranks_per_stage=mesh.ranks_per_stage),
        own_tokens=partial(order_of_rows(config).take, rank=mesh.place["cp"])
        if degrees.cp > 1
        else lambda rows: rows,
    )


def load_model(
    config: Config, weights: Weights
) -> tuple[ParallelModel, ParallelMesh, torch.device]:
    """The model of a checkpoint with its weights, on the mesh that `config` asks for.

    A collective of the world, whose process group is up.
    """
    device = devices.local_device(int(os.environ.get("LOCAL_RANK", "0")))
    devices.set_device(device)
    mesh = build_mesh(Degrees.of(config), device.type, dist.get_rank())
    model = build_model(config, weights.model, mesh, device, fresh=False)
    load_weights(weights, model.stored)
    model.after_update()
    return model, mesh, device


def stage_modules(
    config: ModelConfig,
    num_stages: int,
    *,
    given: list[list[str]] | None = None,
    layers_per_stage: int | None = None,
) -> list[list[str]]:
    """The modules of each stage: all for one; else as given, or so many layers each, or balanced.

    Balanced by the matmul parameters of each layer; the head counts with its own, the embedding, a
    lookup, counts nothing.
    """
    if num_stages == 1:
        return [module_names(config)]
    if given is not None:
        return given
    if layers_per_stage is not None:
        layers = range(config.num_hidden_layers)
        cuts = [
            list(layers[start : start + layers_per_stage])
            for start in range(0, config.num_hidden_layers, layers_per_stage)
        ]
        return _with_ends(cuts)
    cuts = balanced_stages(
        [float(matmul_parameters(config))] * config.num_hidden_layers,
        num_stages,
        last=float(config.hidden_size * config.padded_vocab_size),
    )
    return _with_ends(cuts)


def _with_ends(cuts: list[list[int]]) -> list[list[str]]:
    modules = [[f"layers.{index}" for index in cut] for cut in cuts]
    modules[0].insert(0, "embed_tokens")
    modules[-1] += ["norm", "lm_head"]
    return modules


@torch.no_grad()
def initialise(part: Decoder, *, seed: int, device: torch.device) -> None:
    """Fill every parameter of `part` from (seed, name), each rank cutting its own copy.

    Drawn on `device` wherever it is stored: kinds of devices draw different numbers.
    """
    for name, parameter in part.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        full = draw_parameter(
            canonical_name(name, part.config),
            parameter.shape,
            part.config,
            seed=seed,
            device=device,
        ).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            full = distribute_tensor(
                full, parameter.device_mesh, parameter.placements, src_data_rank=None
            ).to_local()
        local.copy_(full)


def _configure(part: Decoder, config: Config) -> None:
    for module in part.modules():
        if isinstance(module, Experts):
            module.kernel = config.moe.kernel
        elif isinstance(module, CoreAttention):
            module.backend = config.model.attention_backend
    part.document_mask = config.training.document_mask
    if part.lm_head is not None:
        part.lm_head.token_loss.num_chunks = config.loss.num_chunks
        part.lm_head.token_loss.z_loss_weight = config.loss.z_loss_weight


def _tied_head(
    config: ModelConfig, pipeline: Pipeline | None, schedule: str, mesh: ParallelMesh
) -> TiedHead | None:
    if pipeline is None or not config.tie_word_embeddings:
        return None
    first, last = pipeline.stages.get(0), pipeline.stages.get(pipeline.num_stages - 1)
    head_rank = 0 if schedule in V_SCHEDULES else mesh.degrees.pp - 1
    return TiedHead(
        None if first is None else first.embed_tokens.weight,  # type: ignore[union-attr, arg-type]
        None if last is None else last.lm_head.weight,  # type: ignore[union-attr, arg-type]
        group=pipeline.group,
        embedding_rank=0,
        head_rank=head_rank,
    )


def _named_parameters(parts: list[Decoder], tied_head: TiedHead | None) -> dict[str, nn.Parameter]:
    copy = None if tied_head is None else tied_head.head
    named: dict[str, nn.Parameter] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter is not copy:
                assert name not in named, name
                named[name] = parameter
    return named

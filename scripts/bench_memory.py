"""Memory of a rank by mode, beside the least there could be: counted in bytes, nothing is timed.

    PYTHONPATH=. python scripts/bench_memory.py              a small Llama, real steps
    PYTHONPATH=. python scripts/bench_memory.py --dry_run    8B on 8 and 64 ranks, 70B on 64

A rank of any world runs alone, under a process group that moves nothing, through build.py and the
optimizer, for a whole step (observe/live_storage.py). A dry run does so with fake tensors, which
have shapes and no numbers; the norm of gradients, a number, is left out.

    held        after backward: parameters, gradients, optimizer state and what else stays
    kept        by a layer in the first forward, for its backward; gathered parameters left out
    peak        the most there was at once, anywhere in a step

The least of each, for N parameters on a rank's stage, cut over tp (norms are not) and over fsdp:

    P, G, S     4 N, 4 N, 8 N (4 N with moments in bfloat16) over tp x fsdp; zero_stage 0: over tp
    A           of all layers; one keeps, of T tokens in bf16, over tp; h hidden, f intermediate
                size, q and kv the widths of all heads
        none         T (2 (4 h + 2 q + 2 kv + 3 f) + 4 heads): the inputs of both norms, of q k v
                     and of gate and up; q, k, v, what attention gives and its logsumexp; gate, up
                     and their product
        full         T 2 h: a layer's input
        selective n  "full" in every n-th layer, "none" in the others
        op           T (2 (2 h + q + kv + f) + 4 heads): the input, k, attention and o, up
        budget b     full + b (none - full)
        a pipeline   as often as there are micro-batches in flight
    loss        the gradients that the loss forms in forward, of its input (2 T h) and of the head
                (4 V h / tp), and the logits of a chunk (4 T V / tp / chunks)
    U           zero_stage 0 to 2: the gathered parameters, 2 N / tp, until the last backward is by
    E           gradients of earlier micro-batches: G; in zero_stage 0 and 1, and in a pipeline,
                whole: 4 N / tp
    peak        P + S + the larger of U + E + A + loss, where the last backward begins, and G, where
                it ends: the rest goes as gradients come

Under CPU offload P and S lie in host memory and are left out. Gradients follow them, but here,
where host and device are one, they stay where they were reduced, and are counted.

What a rank has beside the least: parameters of the layers that are gathered, gradients on their way
into the exchange, what a layer computes, and what operators keep twice.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.tensor.debug as sharding
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite.build import ParallelModel, build_model, stage_modules
from torchtitan_lite.checkpoint.state import materialise_state
from torchtitan_lite.config import Config, load_and_check, micro_batch_size
from torchtitan_lite.loss import GlobalBatchLoss
from torchtitan_lite.mesh import Degrees, build_mesh
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder, parameter_shapes
from torchtitan_lite.models.families import model_of
from torchtitan_lite.observe.live_storage import LiveStorage
from torchtitan_lite.optim.optimizer import build_optimizer

MIB, GIB = 2**20, 2**30

SMALL = ModelConfig(
    vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=4, head_dim=16, max_position_embeddings=2048,
)  # fmt: skip
NAMES = {  # short names of keys, for the rows below
    "zero": "parallelism.zero_stage", "tp": "parallelism.tensor_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "dr": "parallelism.data_parallel_replicate_degree",
    "ac": "activation_checkpoint.mode", "every": "activation_checkpoint.selective_ac_option",
    "budget": "activation_checkpoint.memory_budget", "compile": "compile.enable",
    "state": "optimizer.state_dtype", "offload": "training.enable_cpu_offload",
    "chunks": "loss.num_chunks", "seq": "training.seq_len", "rows": "training.local_batch_size",
    "batch": "training.global_batch_size", "flavor": "model.flavor",
}  # fmt: skip
COMMON = (
    "training.dataset=synthetic lr_scheduler.warmup_steps=1 compile.backend=aot_eager "
    "activation_checkpoint.mode=none"
)

Row = tuple[int, str]  # ranks, settings by short name
SMALL_ROWS: list[Row] = [
    *((4, f"zero={stage} ac=full") for stage in (0, 1, 2, 3)),
    (4, "zero=1 ac=full batch=8"), (4, "zero=3 ac=full batch=8"),
    (4, "zero=3 tp=2 ac=full"), (4, "zero=0 tp=4 ac=full"),
    (4, "zero=2 pp=2 ac=full rows=4"),
    (8, "zero=2 pp=2 tp=2 ac=full rows=4"),
    (4, "zero=3"), (4, "zero=3 ac=selective every=2"), (4, "zero=3 ac=selective every=op"),
    *((4, f"zero=3 ac=memory_budget budget={share} compile=true") for share in (1.0, 0.5, 0.0)),
    (4, "zero=3 ac=full state=bfloat16"), (4, "zero=3 ac=full offload=true"),
    (4, "zero=3 ac=full chunks=1"), (4, "zero=3 ac=full state=bfloat16 offload=true"),
]  # fmt: skip
LARGE_ROWS: list[Row] = [
    (8, "flavor=8B zero=3 ac=full"), (8, "flavor=8B zero=3 ac=selective every=op"),
    (8, "flavor=8B zero=3 ac=selective every=2"), (8, "flavor=8B zero=3"),
    (8, "flavor=8B zero=2 ac=full"), (8, "flavor=8B zero=3 ac=full chunks=1"),
    (8, "flavor=8B zero=3 ac=full state=bfloat16"),
    (64, "flavor=8B zero=3 ac=full"), (64, "flavor=8B zero=3 tp=8 ac=full"),
    (64, "flavor=70B zero=3 ac=full"), (64, "flavor=70B zero=3 tp=8 ac=full"),
]  # fmt: skip


@dataclass
class Bytes:
    """Of one rank, as the docstring above says; `gathered` are the parameters of a layer in U."""

    held: float
    kept: float
    peak: float
    gathered: float = 0.0


def settings(text: str) -> list[str]:
    """Flags of a row of the tables."""
    pairs = [pair.split("=") for pair in f"{COMMON} {text}".split()]
    return [f"--{NAMES.get(key, key)}={value}" for key, value in pairs]


def load(row: Row, model: ModelConfig | None) -> tuple[Config, ModelConfig]:
    """The configuration of a row, all checks passed."""
    ranks, text = row
    base = "rows=1 seq=8192" if model is None else "rows=1 seq=256"
    return load_and_check(
        settings(f"{base} {text}"), ranks, lambda config: model or model_of(config)
    )


# --- the least ------------------------------------------------------------------------------------


def least(config: Config, model: ModelConfig, pp_rank: int = 0) -> Bytes:
    """By the formulas above, for a dense model of the Llama kind under a schedule of one stage."""
    parallelism, degrees = config.parallelism, Degrees.of(config)
    tp, pp = degrees.tp, degrees.pp
    modules = stage_modules(model, pp)[pp_rank]
    shapes = parameter_shapes(model, modules)
    sizes = {n: s.numel() / (1 if "norm" in n else tp) for n, s in shapes.items()}
    number = sum(sizes.values())
    state = 4 if config.optimizer.state_dtype == "bfloat16" else 8
    local = number / degrees.fsdp
    micro = config.parallelism.pipeline_parallel_microbatch_size
    rows = micro if pp > 1 else micro_batch_size(config)
    num_micro = config.training.global_batch_size // degrees.batch // rows
    tokens = rows * config.training.seq_len / degrees.cp
    indices = [int(name.split(".")[1]) for name in modules if name.startswith("layers.")]
    kept = [_of_layer(config, model, index) * tokens / tp for index in indices]
    loss = 0.0
    if "lm_head" in modules:
        words, hidden = model.padded_vocab_size / tp, model.hidden_size
        loss = 2 * tokens * hidden + 4 * words * hidden
        loss += 4 * tokens * words / config.loss.num_chunks
    gathered = of_layer = early = 0.0
    if parallelism.zero_stage < 3 and degrees.world > tp * pp:
        gathered, layer = 2 * number, f"layers.{indices[1]}."
        of_layer = 2 * sum(size for name, size in sizes.items() if name.startswith(layer))
    if num_micro > 1:  # torch's schedules of a pipeline reduce once, at the end
        early = 4 * (number if parallelism.zero_stage < 2 or pp > 1 else local)
    stored = 0.0 if config.training.enable_cpu_offload else (4 + state) * local
    in_flight = min(pp - pp_rank, num_micro)
    peak = stored + max(gathered + early + sum(kept) * in_flight + loss, 4 * local)
    return Bytes(stored + 4 * local, mean(kept[1:-1]), peak, of_layer)


def _of_layer(config: Config, model: ModelConfig, index: int) -> float:
    """Bytes a token that a layer keeps, before the cut over tp."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    q, kv = heads * model.head_dim, model.num_key_value_heads * model.head_dim
    full = 2 * hidden
    none = 2 * (4 * hidden + 2 * q + 2 * kv + 3 * model.intermediate_size) + 4 * heads
    options = config.activation_checkpoint
    if options.mode == "memory_budget":
        return full + options.memory_budget * (none - full)
    if options.mode == "selective" and options.selective_ac_option == "op":
        return 2 * (2 * hidden + q + kv + model.intermediate_size) + 4 * heads
    if options.mode == "selective":
        return none if index % int(options.selective_ac_option) else full
    return full if options.mode == "full" else none


# --- what there is --------------------------------------------------------------------------------


@contextlib.contextmanager
def alone(rank: int, world: int) -> Iterator[None]:
    """Be `rank` of `world`, whose collectives move nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor remembers shardings by mesh, and with them process groups that are gone.
        sharding._clear_sharding_prop_cache()
        sharding._clear_fast_path_sharding_prop_cache()


def measure(row: Row, model: ModelConfig | None = None, *, rank: int = 0) -> tuple[Bytes, Bytes]:
    """(what rank `rank` of a row has, the least); fake tensors where no `model` is given."""
    config, model_config = load(row, model)
    fake = FakeTensorMode(allow_non_fake_inputs=True) if model is None else None
    static = mock.patch.object(_PipelineSchedule, "_warmup_p2p", _static_shapes)
    with alone(rank, row[0]), static:
        mesh = build_mesh(Degrees.of(config), "cpu", rank)
        with storage_in(fake):
            device = torch.device("cpu")
            built = build_model(config, model_config, mesh, device, fresh=model is not None)
        named, options = built.named_parameters, vars(config.optimizer)
        optimizer = build_optimizer(named, **options, seed=0, strict_patterns=())
        with fake or contextlib.nullcontext():
            found = _one_step(config, built, optimizer)
    minimum = least(config, model_config, mesh.place["pp"])
    found.kept -= minimum.gathered
    return found, minimum


def _static_shapes(schedule: Any, stages: list[Any], *args: Any) -> None:
    """In the place of a vote among stages on whether shapes are known, which no one answers."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


@contextlib.contextmanager
def storage_in(fake: FakeTensorMode | None) -> Iterator[None]:
    """Plans are laid out on meta, which a fake mode takes for its own: it begins after them."""
    if fake is None:
        yield
        return
    to_empty = Decoder.to_empty

    def to_fake(part: Decoder, **options: Any) -> Any:
        with fake:
            return to_empty(part, **options)

    with mock.patch.object(Decoder, "to_empty", to_fake):
        yield


def _one_step(config: Config, built: ParallelModel, optimizer: Optimizer) -> Bytes:
    training = config.training
    rows = training.global_batch_size // config.parallelism.batch_ranks
    tokens = torch.zeros(rows, training.seq_len, dtype=torch.int64)
    memory, loss, at_layers = LiveStorage(), GlobalBatchLoss(torch.device("cpu")), []
    materialise_state(optimizer)
    if not training.enable_cpu_offload:
        state = [value for of_one in optimizer.state.values() for value in of_one.values()]
        for tensor in (*built.named_parameters.values(), *state):
            if isinstance(tensor, torch.Tensor):
                memory.hold(tensor)
    for part in built.parts:
        for layer in part.layers.values():  # before FSDP gathers its parameters
            note = lambda *_: at_layers.append(memory.live)  # noqa: E731
            layer.register_forward_pre_hook(note, prepend=True)
    loss.begin(tokens.numel(), tokens.numel())
    with memory:
        built.train(tokens, tokens, loss=loss, micro_batch_size=micro_batch_size(config))
        held = memory.live
        if not training.enable_cpu_offload:  # else it computes in host memory too
            optimizer.step()
    # From the second layer to the last: in front of the first the embedding is at hand.
    first, last = at_layers[1], at_layers[len(built.parts[0].layers) - 1]
    kept = (last - first) / (len(built.parts[0].layers) - 2)
    return Bytes(held=held, kept=kept, peak=memory.peak)


def print_table(rows: list[Row], model: ModelConfig | None) -> None:
    unit, name = (GIB, "GiB") if model is None else (MIB, "MiB")
    print(f"{'ranks':5} {'settings':52} {'held':>8} {'/ least':>8} {'kept':>8} {'/ least':>8}"
          f" {'peak':>8} {'/ least':>8}   {name}")  # fmt: skip
    for row in rows:
        found, minimum = measure(row, model)
        cells = "".join(
            f" {ours / unit:8.2f} {ours / theirs:8.3f}"
            for ours, theirs in (
                (found.held, minimum.held),
                (found.kept, minimum.kept),
                (found.peak, minimum.peak),
            )  # fmt: skip
        )
        print(f"{row[0]:5} {row[1]:52}{cells}", flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry_run", action="store_true", help="8B and 70B, with fake tensors")
    options = parser.parse_args(argv)
    if options.dry_run:
        print_table(LARGE_ROWS, None)
    else:
        print_table(SMALL_ROWS, SMALL)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

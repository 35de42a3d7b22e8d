"""The real Trainer on any mesh, against the real Trainer on one process.

`run(case)` trains a tiny decoder for four steps on as many gloo ranks as the case's mesh has,
and hands back what a user would see (the metrics file) and what he would not: the full gradients
of the first step, before the clip, and the full parameters at the end. `assert_equal` holds two
runs against each other, to a relative 1e-5.

The rows end in ragged runs of -100, the vocabulary (61) is divided by no mesh and padded to 128,
query heads share KV heads, and no two sizes of the model are equal, so that an axis taken for
another cannot go unnoticed.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.world import run_ranks
from torchtitan_lite.config import Config, check_config, resolve
from torchtitan_lite.config.schema import set_value
from torchtitan_lite.data.sources import Source, SyntheticRows
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.observe.metrics import read_metrics
from torchtitan_lite.trainer import Trainer

TOLERANCE = 1e-5
SEQ_LEN, STEPS, GLOBAL_BATCH_SIZE = 24, 4, 8

TINY = ModelConfig(
    vocab_size=61,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=4,
    max_position_embeddings=SEQ_LEN,
)


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The degrees of a run."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    def __str__(self) -> str:
        sizes = dataclasses.asdict(self)
        return "-".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one"


@dataclasses.dataclass
class Run:
    """What a run leaves: the logged steps, the first step's gradients, the last parameters."""

    metrics: list[dict[str, Any]]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    returned: list[Any]  # by `act`, a rank each
    apart: list[str]  # names of what two ranks hold with different bits

    def series(self, name: str) -> list[float]:
        return [record[name] for record in self.metrics if name in record]


class RecordingTrainer(Trainer):
    """Keeps the full gradients of the first step, as they are before the clip."""

    first_gradients: dict[str, Tensor] | None = None

    def gradient_norm(self) -> float:
        if self.first_gradients is None:
            self.first_gradients = {
                name: whole(parameter.grad)
                for name, parameter in self.model.named_parameters.items()
            }
        return super().gradient_norm()


def whole(tensor: Tensor | None) -> Tensor:
    """The full tensor, on every rank of its mesh."""
    assert tensor is not None
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def make_config(mesh: Mesh, folder: str | Path, options: dict[str, Any]) -> Config:
    """The configuration of a tiny run, with every key of `options` set as a user would set it."""
    micro_batch_size = 1 if mesh.pp > 1 else GLOBAL_BATCH_SIZE // mesh.dp_replicate // mesh.dp_shard
    settings: dict[str, Any] = {
        "job.dump_folder": str(folder),
        "training.seq_len": SEQ_LEN,
        "training.steps": STEPS,
        "training.local_batch_size": micro_batch_size,
        "training.global_batch_size": GLOBAL_BATCH_SIZE,
        "training.max_norm": 0.0,
        "training.mixed_precision_param": "float32",
        "training.dataset": "synthetic",
        "optimizer.lr": 3e-3,
        # Adam's first update is g / (|g| + eps). An element whose gradient is as small as eps has
        # the rounding error of g in it at full size, on any mesh: 1e-8 would measure that.
        "optimizer.eps": 1e-6,
        "lr_scheduler.warmup_steps": 2,
        "loss.num_chunks": 3,
        "metrics.log_freq": 1,
        "activation_checkpoint.mode": "none",
        "parallelism.pipeline_parallel_degree": mesh.pp,
        "parallelism.data_parallel_replicate_degree": mesh.dp_replicate,
        "parallelism.data_parallel_shard_degree": mesh.dp_shard,
        "parallelism.context_parallel_degree": mesh.cp,
        "parallelism.tensor_parallel_degree": mesh.tp,
        **options,
    }
    config = Config()
    for name, value in settings.items():
        set_value(config, name, value)
        config.user_set[name] = "test"
    return config


def make_source(num_rows: int = 20) -> Source:
    """Fewer rows than four steps read, so that every run crosses the end of an epoch."""
    return SyntheticRows(TINY.vocab_size, SEQ_LEN, num_rows=num_rows, seed=5, ignore_fraction=0.3)


def run(
    mesh: Mesh,
    options: dict[str, Any] | None = None,
    model: ModelConfig = TINY,
    *,
    folder: str | Path | None = None,
    trainer: type[RecordingTrainer] = RecordingTrainer,
    act: Callable[[Any], Any] = RecordingTrainer.train,
    source: Source | None = None,
    timeout: float = 120.0,
) -> Run:
    """Train on `mesh`; `act` is what is done with the Trainer on each rank.

    `folder` keeps the run's files; `source` is read in place of `make_source()`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        config = make_config(mesh, folder or temporary, options or {})
        problems = check_config(config, model, mesh.world)
        assert not problems, problems
        resolve(config, mesh.world)
        source = make_source() if source is None else source
        ranks = run_ranks(
            _on_rank, mesh.world, config, model, source, trainer, act, timeout=timeout
        )
        gradients: dict[str, Tensor] = {}
        parameters: dict[str, Tensor] = {}
        returned = []
        apart = []
        for rank_gradients, rank_parameters, rank_returned in ranks:
            for merged, own in ((gradients, rank_gradients), (parameters, rank_parameters)):
                apart += [n for n in own if n in merged and not torch.equal(own[n], merged[n])]
                merged |= own
            returned.append(rank_returned)
        path = Path(config.job.dump_folder) / "metrics.jsonl"
        metrics = read_metrics(path) if path.exists() else []
    return Run(metrics, gradients, parameters, returned, apart)


def _on_rank(
    config: Config,
    model: ModelConfig,
    source: Source,
    trainer_class: type[RecordingTrainer],
    act: Callable[[Any], Any],
) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    # DTensor warns of each full_tensor() over two axes.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    held_out = make_source(13) if config.validation.enable else None
    trainer = trainer_class(config, model, source=source, held_out=held_out)
    returned = act(trainer)
    parameters = {name: whole(p) for name, p in trainer.model.named_parameters.items()}
    return trainer.first_gradients or {}, parameters, returned


@cache
def _reference(options: tuple[tuple[str, Any], ...], model_changes: tuple[Any, ...]) -> Run:
    return run(Mesh(), dict(options), dataclasses.replace(TINY, **dict(model_changes)))


def reference(options: dict[str, Any], model_changes: dict[str, Any] | None = None) -> Run:
    """One process with the same numerics: `options` less those that only say how to get them."""
    kept = {
        name: value
        for name, value in options.items()
        if not name.startswith(("parallelism.", "activation_checkpoint.", "training.local"))
    }
    return _reference(tuple(sorted(kept.items())), tuple(sorted((model_changes or {}).items())))


def relative_error(ours: Tensor, expected: Tensor) -> float:
    """|ours - expected| / |expected|, in fp64."""
    difference = (ours.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def errors(ours: Run, expected: Run) -> dict[str, float]:
    """The largest relative error of each thing that must not depend on the mesh."""
    assert ours.parameters.keys() == expected.parameters.keys()
    assert len(ours.metrics) == len(expected.metrics) > 0
    found = {
        f"{kind} of {name}": relative_error(theirs[name], tensor)
        for kind, theirs, tensors in (
            ("gradient", ours.gradients, expected.gradients),
            ("parameter", ours.parameters, expected.parameters),
        )
        for name, tensor in tensors.items()
    }
    for name in ("loss", "grad_norm", "validation_loss"):
        pairs = zip(ours.series(name), expected.series(name), strict=True)
        found[name] = max((abs(a - b) / abs(b) for a, b in pairs), default=0.0)
    return found


def assert_equal(ours: Run, expected: Run, tolerance: float = TOLERANCE) -> None:
    """Both runs agree to `tolerance`; the message lists what does not.

    Within a run, ranks that hold the same tensor hold the same bits.
    """
    assert not ours.apart, f"differs between ranks: {sorted(set(ours.apart))}"
    wrong = {name: error for name, error in errors(ours, expected).items() if not error < tolerance}
    assert not wrong, f"off by more than {tolerance}: {wrong}"

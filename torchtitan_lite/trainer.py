"""The rest of the building in reading order, then the loop.

    global batch -> micro-batches -> forward/backward -> norm -> clip -> step -> log -> checkpoint

One step communicates, beside what the plans do inside forward and backward: the number of valid
labels (one integer), the gradient norm (one fp64), and on logged steps the loss. A step whose
gradient norm is not finite changes no weight and no moment, on any rank, since every rank reads
the same norm.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite import device as devices
from torchtitan_lite.build import ParallelModel, build_model, stage_modules
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state import (
    State,
    cast_state,
    materialise_state,
    model_state,
    optimizer_state,
    read_train_state,
    restore_optimizer_state,
    train_state,
)
from torchtitan_lite.config import (
    Config,
    ConfigError,
    num_schedule_steps,
    num_warmup_steps,
    to_dict,
    to_toml,
    validation_seq_len,
)
from torchtitan_lite.data.loader import Batch, Loader, held_out_batches
from torchtitan_lite.data.prepare import prepare
from torchtitan_lite.data.shards import TokenShards
from torchtitan_lite.data.sources import IGNORE_LABEL, Source, SyntheticRows, TokenRows
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.loss import GlobalBatchLoss
from torchtitan_lite.mesh import Degrees, build_mesh, set_timeout
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.observe.flops import flops_per_token
from torchtitan_lite.observe.logging import logger, use_color
from torchtitan_lite.observe.metrics import MetricsWriter, Record, StepTimer, format_line
from torchtitan_lite.observe.profiler import memory_snapshot, profiling
from torchtitan_lite.optim.clip import gradient_norm, scale_gradients
from torchtitan_lite.optim.optimizer import build_optimizer, group_table, set_learning_rate
from torchtitan_lite.optim.schedule import lr_factor

SYNTHETIC_ROWS = 1 << 20  # more than a run that tries things out will read


class TrainingStopped(RuntimeError):
    """The run cannot go on; the message says why and what to try."""


def open_sources(config: Config, model_config: ModelConfig) -> tuple[Source, Source | None]:
    """The rows to train on and, when asked for, the rows held out.

    Text is tokenised here, which may take longer than a collective may wait: call it before the
    process group is up. Raises ConfigError for data that is missing, bad or of another vocabulary.
    """

    def rows(section: str, kind: str, path: str, seq_len: int) -> Source:
        if kind == "synthetic":
            seed = config.debug.seed + (section == "validation")
            return SyntheticRows(
                model_config.vocab_size, seq_len, num_rows=SYNTHETIC_ROWS, seed=seed
            )
        key = f"{section}.dataset_path"
        if kind == "tokens":
            folder = Path(path)
        else:
            folder = prepare(
                kind,
                path,
                load_tokenizer(config.model.hf_assets_path),
                cache=config.training.token_cache,
                text_column=config.training.dataset_text_column,
                key=key,
            )
        shards = TokenShards(folder, key=key)
        shards.check_vocabulary(model_config.vocab_size)
        return TokenRows(shards, seq_len, key=key)

    training, validation = config.training, config.validation
    train_rows = rows("training", training.dataset, training.dataset_path, training.seq_len)
    if not validation.enable:
        return train_rows, None
    seq_len = validation_seq_len(config)
    held_out = rows("validation", validation.dataset, validation.dataset_path, seq_len)
    return train_rows, held_out


class Trainer:
    """One run on this rank. The default process group must be up, one rank a device."""

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        *,
        source: Source,
        held_out: Source | None = None,
    ) -> None:
        self.config = config
        self.step = 0
        self.tokens_seen = 0
        self.skipped_steps = 0
        self.skipped_in_a_row = 0
        parallelism = config.parallelism
        self.device = devices.local_device(_local_rank())
        devices.set_device(self.device)
        devices.seed_all(config.debug.seed)
        if config.debug.deterministic:
            devices.make_deterministic()

        degrees = Degrees(
            pp=parallelism.pipeline_parallel_degree,
            dp_replicate=parallelism.data_parallel_replicate_degree,
            dp_shard=parallelism.data_parallel_shard_degree,
            cp=parallelism.context_parallel_degree,
            tp=parallelism.tensor_parallel_degree,
        )
        self.mesh = build_mesh(degrees, self.device.type, dist.get_rank())
        logger.info(f"mesh {degrees} on {dist.get_world_size()} x {devices.device_name()}")

        self.model = build_model(config, model_config, self.mesh, self.device)
        self.loss = GlobalBatchLoss(self.device)
        self.optimizer = self._build_optimizer()
        self._log_model()

        self.loader = Loader(
            source,
            global_batch_size=config.training.global_batch_size,
            batch_rank=self.mesh.batch_rank,
            batch_degree=degrees.batch,
            seed=config.debug.seed,
            num_workers=config.training.dataloader.num_workers,
            prefetch_factor=config.training.dataloader.prefetch_factor,
        )
        self.held_out = held_out

        self.checkpoints: CheckpointManager | None = None
        if config.checkpoint.enable:
            self.checkpoints = CheckpointManager(
                Path(config.job.dump_folder) / config.checkpoint.folder,
                keep_latest_k=config.checkpoint.keep_latest_k,
                async_mode=config.checkpoint.async_mode,
            )
            self._load()
        self._save_config()

    # --- building -----------------------------------------------------------------------------

    def _build_optimizer(self) -> torch.optim.Optimizer:
        options = self.config.optimizer
        with torch.device("meta"):
            from torchtitan_lite.models.decoder import Decoder

            whole = [name for name, _ in Decoder(self.model.config).named_parameters()]
        user_wrote_no_decay = "optimizer.no_decay" in self.config.user_set
        return build_optimizer(
            self.model.named_parameters,
            name=options.name,
            lr=options.lr,
            beta1=options.beta1,
            beta2=options.beta2,
            eps=options.eps,
            weight_decay=options.weight_decay,
            momentum=options.momentum,
            implementation=options.implementation,
            no_decay=options.no_decay,
            lr_multipliers=options.lr_multipliers,
            all_names=whole,
            strict_patterns=None if user_wrote_no_decay else (),
        )

    def _log_model(self) -> None:
        pipeline = self.model.pipeline
        if pipeline is not None:
            given = self.config.parallelism.module_fqns_per_model_part
            stages = stage_modules(self.model.config, pipeline.num_stages, given=given)
            for index, modules in enumerate(stages):
                logger.info(f"stage {index}: {', '.join(modules)}")
        logger.info(f"parameter groups of this rank:\n{group_table(self.optimizer)}")

    def _save_config(self) -> None:
        name = self.config.job.save_config_file
        if dist.get_rank() != 0 or not name:
            return
        folder = Path(self.config.job.dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(to_toml(self.config), encoding="utf-8")

    # --- one step -----------------------------------------------------------------------------

    def train_step(self) -> Record:
        """Train on the next global batch; return its grad_norm and lr, and whether it counted."""
        with self.timer.waiting_for_data():
            batch = next(self.loader)
        self.forward_backward(batch)
        norm = self.gradient_norm()
        learning_rate = self.learning_rate(self.step)
        applied = math.isfinite(norm)
        if applied:
            self._apply_gradients(norm, learning_rate)
        self.optimizer.zero_grad()
        self.step += 1
        training = self.config.training
        tokens = training.global_batch_size * training.seq_len
        self.tokens_seen += tokens
        self.timer.step(tokens)
        self._count_skipped(applied, norm)
        record = {"step": self.step, "grad_norm": norm, "lr": learning_rate}
        return record if applied else {**record, "event": "skipped"}

    def forward_backward(self, batch: Batch) -> None:
        """Leave the gradient of the whole global batch's loss in the parameters."""
        num_valid = torch.tensor(0, dtype=torch.int64, device=self.device)
        self.num_local_tokens = int((batch.labels != IGNORE_LABEL).sum())
        if self.mesh.owns_data and self.mesh.place["pp"] == 0:
            num_valid += self.num_local_tokens
        dist.all_reduce(num_valid)
        self.loss.begin(int(num_valid))
        pipelined = self.model.pipeline is not None
        self.model.train(
            batch.tokens.to(self.device, non_blocking=True),
            batch.labels.to(self.device, non_blocking=True),
            loss=self.loss,
            micro_batch_size=self.config.parallelism.pipeline_parallel_microbatch_size
            if pipelined
            else self.config.training.local_batch_size,
        )

    def gradient_norm(self) -> float:
        """The norm over the whole model, before clipping; the same number on every rank."""
        return gradient_norm(
            self.model.named_parameters.values(),
            norm_type=self.config.training.norm_type,
            ranks_per_stage=self.mesh.ranks_per_stage,
            device=self._gradient_device(),
        )

    def learning_rate(self, step: int) -> float:
        """Of the 0-based `step`, before the multipliers of the groups."""
        schedule = self.config.lr_scheduler
        return self.config.optimizer.lr * lr_factor(
            step,
            total_steps=num_schedule_steps(self.config),
            warmup_steps=num_warmup_steps(self.config),
            decay_ratio=schedule.decay_ratio,
            decay_type=schedule.decay_type,
            min_lr_factor=schedule.min_lr_factor,
        )

    def _apply_gradients(self, norm: float, learning_rate: float) -> None:
        scale_gradients(
            self.model.named_parameters.values(), norm=norm, max_norm=self.config.training.max_norm
        )
        set_learning_rate(self.optimizer, learning_rate)
        if self.checkpoints is not None:
            self.checkpoints.wait_for_staging()
        self.optimizer.step()
        self.model.after_update()

    def _count_skipped(self, applied: bool, norm: float) -> None:
        if applied:
            self.skipped_in_a_row = 0
            return
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        limit = self.config.training.max_skipped_steps
        logger.warning(
            f"step {self.step}: the gradient norm is {norm}; weights and moments are left as they "
            f"were ({self.skipped_in_a_row} in a row, {self.skipped_steps} in all)"
        )
        if self.skipped_in_a_row >= limit:
            raise TrainingStopped(
                f"the gradient norm was not finite in {limit} steps in a row, the last of them "
                f"step {self.step}: lower optimizer.lr, lengthen lr_scheduler.warmup_steps or look "
                "at the data (training.max_skipped_steps is the limit)"
            )

    def _gradient_device(self) -> torch.device:
        return torch.device("cpu") if self.config.training.enable_cpu_offload else self.device

    # --- the loop -----------------------------------------------------------------------------

    def train(self) -> None:
        """Train until training.steps; log, validate and save on the way."""
        config, rank = self.config, dist.get_rank()
        if self.step >= config.training.steps:
            logger.warning(
                f"nothing to train: the run is at step {self.step} and training.steps is "
                f"{config.training.steps}"
            )
            return
        options = config.profiling
        with ExitStack() as stack:
            metrics = self._open_metrics()
            stack.callback(metrics.close)
            stack.callback(self.loader.close)
            garbage = stack.enter_context(devices.GarbageCollection(config.training.gc_freq))
            profiler = stack.enter_context(
                profiling(
                    enabled=options.enable_profiling,
                    dump_folder=config.job.dump_folder,
                    traces_folder=options.save_traces_folder,
                    freq=options.profile_freq,
                    active=options.profiler_active,
                    warmup=options.profiler_warmup,
                    rank=rank,
                    start_step=self.step,
                )
            )
            snapshot = stack.enter_context(
                memory_snapshot(
                    enabled=options.enable_memory_snapshot,
                    dump_folder=config.job.dump_folder,
                    snapshot_folder=options.save_memory_snapshot_folder,
                    freq=options.profile_freq,
                    rank=rank,
                    start_step=self.step,
                )
            )
            first_step = self.step + 1
            self.timer = self._new_timer()
            while self.step < config.training.steps:
                if self.checkpoints is not None:
                    self.checkpoints.poll()  # a failed save surfaces here
                record = self.train_step()
                if self.step == first_step:
                    set_timeout(self.mesh, config.comm.train_timeout_seconds)
                if self._is_due(config.metrics.log_freq, first_step) or "event" in record:
                    self._log(metrics, record)
                with self.timer.not_training():
                    if self.held_out is not None and self._is_due(config.validation.freq):
                        self._log_validation(metrics)
                    if self.checkpoints is not None and self._is_due(config.checkpoint.interval):
                        self._save()
                garbage.step(self.step)
                profiler.step()
                snapshot.step()
            if self.checkpoints is not None:
                self.checkpoints.finish()
        logger.info(f"done: {self.step} steps, {self.tokens_seen:,} tokens")

    def _is_due(self, freq: int, first_step: int = -1) -> bool:
        return self.step % freq == 0 or self.step in (first_step, self.config.training.steps)

    def _new_timer(self) -> StepTimer:
        return StepTimer(
            num_devices=dist.get_world_size(),
            flops_per_token=flops_per_token(self.model.config, self.config.training.seq_len),
            peak_flops=devices.peak_flops(
                devices.device_name(),
                getattr(torch, self.config.training.mixed_precision_param),
            ),
        )

    def _open_metrics(self) -> MetricsWriter:
        options = self.config.metrics
        return MetricsWriter(
            self.config.job.dump_folder,
            enabled=dist.get_rank() == 0,
            tensorboard_folder=options.save_tb_folder if options.enable_tensorboard else None,
            wandb=options.enable_wandb,
            run_config=to_dict(self.config),
        )

    def _log(self, metrics: MetricsWriter, record: Record) -> None:
        loss, largest = self._global_loss()
        record |= {"loss": loss[1], "loss_max": largest}
        if self.config.loss.z_loss_weight:
            record["z_loss"] = self.config.loss.z_loss_weight * loss[2]
        record |= {"tokens_seen": self.tokens_seen, **self.timer.read()}
        record |= {"memory_gib": devices.memory_gib(), "skipped_steps": self.skipped_steps}
        metrics.write(record)
        total = self.config.training.steps
        eta = self.timer.eta_seconds(total - self.step)
        color = use_color(not self.config.metrics.disable_color_printing)
        logger.info(format_line(record, total_steps=total, eta_seconds=eta, color=color))

    def _global_loss(self) -> tuple[list[float], float]:
        """([loss, cross-entropy, z] per token of the last global batch, largest local mean)."""
        mine = self._holds_loss()
        sums = self.loss.totals if mine else torch.zeros_like(self.loss.totals)
        sums = sums.clone()
        dist.all_reduce(sums)
        local_mean = -math.inf
        if mine and self.num_local_tokens:
            local_mean = self.loss.totals[1].item() / self.num_local_tokens
        largest = torch.tensor(local_mean, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return (sums / self.loss.num_tokens).tolist(), largest.item()

    def _holds_loss(self) -> bool:
        pipeline = self.model.pipeline
        return self.mesh.owns_data and (pipeline is None or pipeline.has_last)

    # --- validation ---------------------------------------------------------------------------

    def validate(self) -> float:
        """Mean cross-entropy per token of the held-out rows, the same on every mesh.

        Covers validation.steps global batches, or all rows. Moves no state of the training.
        """
        assert self.held_out is not None
        options = self.config.validation
        held_out: Any = self.held_out
        if options.steps >= 0:
            num_rows = min(len(held_out), options.steps * self.config.training.global_batch_size)
            held_out = torch.utils.data.Subset(held_out, range(num_rows))
        loss = GlobalBatchLoss(self.device)
        num_tokens = 0
        for batch in held_out_batches(
            held_out,
            batch_rank=self.mesh.batch_rank,
            batch_degree=self.mesh.degrees.batch,
            local_batch_size=options.local_batch_size,
        ):
            num_tokens += int((batch.labels != IGNORE_LABEL).sum())
            self.model.evaluate(
                batch.tokens.to(self.device), batch.labels.to(self.device), loss=loss
            )
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self._holds_loss():
            totals[0], totals[1] = loss.totals[1], num_tokens
        dist.all_reduce(totals)
        return (totals[0] / totals[1]).item()

    def _log_validation(self, metrics: MetricsWriter) -> None:
        record = {"step": self.step, "event": "validation", "validation_loss": self.validate()}
        metrics.write(record)
        total = self.config.training.steps
        color = use_color(not self.config.metrics.disable_color_printing)
        logger.info(format_line(record, total_steps=total, color=color))

    # --- checkpoints --------------------------------------------------------------------------

    def _state(self) -> State:
        """Everything a run needs to go on, sharing memory with it where it is a tensor."""
        return {
            **model_state(self.model.named_parameters),
            **optimizer_state(self.optimizer, self.model.named_parameters),
            **train_state(
                {
                    "step": self.step,
                    "tokens_seen": self.tokens_seen,
                    "skipped_steps": self.skipped_steps,
                }
            ),
            **train_state(self.loader.state_dict(), part="dataloader"),
        }

    def _save(self) -> None:
        assert self.checkpoints is not None
        options = self.config.checkpoint
        state, last = self._state(), self.step == self.config.training.steps
        model_only = last and options.last_save_model_only
        if model_only:
            state = cast_state(state, getattr(torch, options.export_dtype))
        self.checkpoints.save(self.step, state, model_only=model_only)

    def _load(self) -> None:
        """Resume from the newest valid checkpoint, else start from initial_load_path, else fresh."""
        assert self.checkpoints is not None
        options = self.config.checkpoint
        exclude = options.exclude_from_loading
        materialise_state(self.optimizer)
        state = self._state()
        step = self.checkpoints.load(state, step=options.load_step, exclude=exclude)
        if step is not None:
            if options.initial_load_path:
                logger.info(
                    f"checkpoint.initial_load_path has no effect: the run resumes from its own "
                    f"step {step}"
                )
            self._restore(state)
        elif options.initial_load_path:
            self.checkpoints.load_from(
                options.initial_load_path,
                state,
                model_only=options.initial_load_model_only,
                exclude=exclude,
            )
            self._restore(state)
        else:
            logger.info("no checkpoint to load: fresh weights")
        self.model.after_update()

    def _restore(self, state: State) -> None:
        """Take from a loaded state what is not shared memory."""
        restore_optimizer_state(self.optimizer, self.model.named_parameters, state)
        values = read_train_state(state)
        self.step = int(values["step"])
        self.tokens_seen = int(values["tokens_seen"])
        self.skipped_steps = int(values["skipped_steps"])
        self.loader.load_state_dict(
            {key: int(value) for key, value in read_train_state(state, part="dataloader").items()}
        )


def _local_rank() -> int:
    import os

    return int(os.environ.get("LOCAL_RANK", "0"))

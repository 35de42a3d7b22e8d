"""The rest of the building in reading order, then the loop.

    global batch -> micro-batches -> forward/backward -> norm -> clip -> step -> log -> checkpoint

One step communicates, beside what the plans do inside forward and backward: the number of valid
labels (one integer), the gradient norm (one fp64), and on logged steps the loss. A step whose
gradient norm is not finite changes no weight and no moment, on any rank, since every rank reads
the same norm.
"""

from __future__ import annotations

import dataclasses
import math
import os
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_lite import device as devices
from torchtitan_lite.build import build_model
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state import (
    State,
    cast_state,
    materialise_state,
    model_state,
    optimizer_state,
    read_train_state,
    train_state,
)
from torchtitan_lite.checkpoint.weights import find_weights, load_weights, write_hugging_face
from torchtitan_lite.config import (
    Config,
    micro_batch_size,
    num_schedule_steps,
    num_warmup_steps,
    save_config,
)
from torchtitan_lite.data.loader import Batch, Loader
from torchtitan_lite.data.sources import IGNORE_LABEL, Source
from torchtitan_lite.evaluate import evaluate
from torchtitan_lite.loss import GlobalBatchLoss
from torchtitan_lite.mesh import Degrees, build_mesh, set_timeout
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import exact_names, parameter_shapes
from torchtitan_lite.observe.flops import flops_per_token
from torchtitan_lite.observe.logging import logger
from torchtitan_lite.observe.metrics import Record
from torchtitan_lite.observe.report import RunReport, instruments_of
from torchtitan_lite.ops.dropout import sample_keys
from torchtitan_lite.optim.balance import ExpertBalance
from torchtitan_lite.optim.clip import gradient_norm, scale_gradients
from torchtitan_lite.optim.optimizer import build_optimizer, group_table, set_learning_rate
from torchtitan_lite.optim.schedule import lr_factor
from torchtitan_lite.parallel.compile import CompiledParts


class TrainingStopped(RuntimeError):
    """The run cannot go on; the message says why and what to try."""


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
        self.device = devices.local_device(int(os.environ.get("LOCAL_RANK", "0")))
        devices.set_device(self.device)
        devices.seed_all(config.debug.seed)
        if config.debug.deterministic:
            devices.make_deterministic()

        degrees = Degrees.of(config)
        self.mesh = build_mesh(degrees, self.device.type, dist.get_rank())
        kinds = devices.names_of_all_ranks()
        logger.info(f"mesh {degrees} on {dist.get_world_size()} x {' or '.join(kinds)}")
        if len(kinds) > 1:
            logger.warning("devices of different kinds draw different weights: load a checkpoint")

        self.model = build_model(config, model_config, self.mesh, self.device)
        self.compiled = CompiledParts(self.model.parts)
        self.loss = GlobalBatchLoss(self.device)
        user_wrote_no_decay = "optimizer.no_decay" in config.user_set
        self.optimizer = build_optimizer(
            self.model.named_parameters,
            **vars(config.optimizer),
            seed=config.debug.seed,
            all_names=list(parameter_shapes(model_config)),
            strict_patterns=None if user_wrote_no_decay else (),
        )
        self.balance: ExpertBalance | None = None
        if model_config.num_experts:
            self.balance = ExpertBalance(self.model.parts, model_config, config, self.device)
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
                model=dataclasses.asdict(model_config),
                hf_assets_path=config.model.hf_assets_path,
            )
            self._load()

    # --- building -----------------------------------------------------------------------------

    def _log_model(self) -> None:
        if self.model.pipeline is not None:
            for index, modules in enumerate(self.model.stages):
                logger.info(f"stage {index}: {', '.join(modules)}")
        table = group_table(self.optimizer)
        logger.info(f"parameter groups of this rank, sizes before any cut:\n{table}")

    # --- one step -----------------------------------------------------------------------------

    def train_step(self) -> Record:
        """Train on the next global batch; return its grad_norm and lr, and whether it counted."""
        with self.timer.waiting_for_data():
            batch = next(self.loader)
        if self.balance is not None:
            self.balance.begin()
        self.forward_backward(batch)
        norm = self.gradient_norm()
        learning_rate = self.learning_rate(self.step)
        applied = math.isfinite(norm)
        if applied:
            self._apply_gradients(norm, learning_rate)
        if self.balance is not None:
            self.balance.end(applied=applied)
        self.optimizer.zero_grad()
        self.step += 1
        tokens = self.config.training.global_batch_size * self.config.training.seq_len
        self.tokens_seen += tokens
        self.timer.step(tokens)
        self._count_skipped(applied, norm)
        record = {"step": self.step, "grad_norm": norm, "lr": learning_rate}
        return record if applied else {**record, "event": "skipped"}

    def forward_backward(self, batch: Batch) -> None:
        """Leave the gradient of the whole global batch's loss in the parameters."""
        num_valid = torch.tensor(0, dtype=torch.int64, device=self.device)
        num_local = int((self.model.own_tokens(batch.labels) != IGNORE_LABEL).sum())
        if self.mesh.owns_data and self.mesh.place["pp"] == 0:
            num_valid += num_local
        dist.all_reduce(num_valid)
        self.loss.begin(int(num_valid), num_local)
        keys = None
        if self.model.config.has_dropout:
            seed, num_rows = self.config.debug.seed, len(batch.tokens)
            keys = sample_keys(seed, batch.first_sample, num_rows, self.device)
        size, rows = micro_batch_size(self.config), batch.to(self.device)
        self.model.train(
            rows.tokens, rows.labels, keys, rows.positions, loss=self.loss, micro_batch_size=size
        )

    def gradient_norm(self) -> float:
        """The norm over the whole model, before clipping; the same number on every rank."""
        return gradient_norm(
            self.model.named_parameters.values(),
            norm_type=self.config.training.norm_type,
            ranks_per_stage=self.mesh.ranks_per_stage,
            # Where the gradients lie, also on a rank that might have none.
            device=torch.device("cpu") if self.config.training.enable_cpu_offload else self.device,
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
        self.model.scaling.end()

    def _count_skipped(self, applied: bool, norm: float) -> None:
        if applied:
            self.skipped_in_a_row = 0
            return
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        logger.warning(
            f"step {self.step}: the gradient norm is {norm}; weights and moments are left as they "
            f"were ({self.skipped_in_a_row} in a row, {self.skipped_steps} in all)"
        )

    # --- the loop -----------------------------------------------------------------------------

    def train(self) -> None:
        """Train until training.steps; log, validate and save on the way."""
        config = self.config
        if self.step >= config.training.steps:
            logger.warning(
                f"nothing to train: the run is at step {self.step} and training.steps is "
                f"{config.training.steps}"
            )
            return
        with ExitStack() as stack:
            report = self._open_report()
            stack.callback(report.close)
            if dist.get_rank() == 0 and config.job.save_config_file:
                path = Path(config.job.dump_folder) / config.job.save_config_file
                for change in save_config(config, path, resumed=self.step > 0):
                    logger.warning(f"resumed with another setting than before: {change}")
            stack.callback(self.loader.close)
            instruments = stack.enter_context(
                instruments_of(config, rank=dist.get_rank(), start_step=self.step)
            )
            first_step = self.step + 1
            self.timer = report.start_timer()
            limit = config.training.max_skipped_steps
            while self.step < config.training.steps and self.skipped_in_a_row < limit:
                if self.checkpoints is not None:
                    self.checkpoints.poll()  # a failed save surfaces here
                record = self.train_step()
                if self.step == first_step:
                    set_timeout(self.mesh, config.comm.train_timeout_seconds)
                    self.compiled.log_after_first_step(logger)
                if self._is_due(config.metrics.log_freq, first_step) or "event" in record:
                    report.write(self._complete(record))
                with self.timer.not_training():
                    self._validate_and_save(report)
                instruments(self.step)
            if self.checkpoints is not None:
                self.checkpoints.finish()
        if self.skipped_in_a_row >= limit:
            raise TrainingStopped(
                f"the gradient norm was not finite in {limit} steps in a row, the last of them "
                f"step {self.step}: lower optimizer.lr, lengthen lr_scheduler.warmup_steps or look "
                "at the data (training.max_skipped_steps is the limit)"
            )
        logger.info(f"done: {self.step} steps, {self.tokens_seen:,} tokens")

    def _validate_and_save(self, report: RunReport) -> None:
        if self.held_out is not None and self._is_due(self.config.validation.freq):
            loss = self.validate()
            report.write({"step": self.step, "event": "validation", "validation_loss": loss})
        if self.checkpoints is not None and self._is_due(self.config.checkpoint.interval):
            self._save()

    def _is_due(self, freq: int, first_step: int = -1) -> bool:
        return self.step % freq == 0 or self.step in (first_step, self.config.training.steps)

    def _open_report(self) -> RunReport:
        return RunReport(
            self.config,
            flops_per_token=flops_per_token(self.model.config, self.config.training.seq_len),
            rank=dist.get_rank(),
            num_devices=dist.get_world_size(),
        )

    def _complete(self, record: Record) -> Record:
        """Add what only a logged step asks for, in part from the other ranks."""
        mine = self.mesh.owns_data and self.model.has_loss
        loss, largest = self.loss.over_ranks(mine=mine)
        record |= {"loss": loss[1], "loss_max": largest}
        if self.config.loss.z_loss_weight:
            record["z_loss"] = self.config.loss.z_loss_weight * loss[2]
        if self.balance is not None:
            record |= self.balance.report()
        if self.compiled.pieces:
            record["recompilations"] = self.compiled.recompilations
        record |= {"tokens_seen": self.tokens_seen, **self.timer.read()}
        record |= {"memory_gib": devices.memory_gib(), "skipped_steps": self.skipped_steps}
        return record

    def validate(self) -> float:
        """Mean cross-entropy per token of validation.steps global batches of held-out rows."""
        assert self.held_out is not None
        options = self.config.validation
        num_rows = options.steps * self.config.training.global_batch_size
        return evaluate(
            self.model,
            self.held_out,
            mesh=self.mesh,
            device=self.device,
            local_batch_size=options.local_batch_size,
            num_rows=None if options.steps < 0 else num_rows,
        ).loss

    # --- checkpoints --------------------------------------------------------------------------

    def _state(self) -> State:
        """Everything a run needs to go on, sharing memory with it where it is a tensor."""
        return {
            **model_state(self.model.stored),
            **({} if self.balance is None else {"trainer.expert_shares": self.balance.shares}),
            **self.model.scaling.state(),
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
            exact, dtype = exact_names(self.model.config), getattr(torch, options.export_dtype)
            state = cast_state(state, dtype, exact=exact)
        self.checkpoints.save(self.step, state, model_only=model_only)
        if last and options.last_save_in_hf:
            write_hugging_face(
                self.checkpoints.folder / f"step-{self.step}-hf",
                model_state(self.model.stored),
                self.model.config,
                hf_assets_path=Path(self.config.model.hf_assets_path),
                dtype=options.export_dtype,
                replace=True,
            )

    def _load(self) -> None:
        """Resume from the newest valid checkpoint, else begin from initial_load_path or fresh."""
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
            weights = find_weights(options.initial_load_path, key="checkpoint.initial_load_path")
            assert weights.is_hf == options.initial_load_in_hf, "the configuration is checked"
            if not weights.is_hf:
                self.checkpoints.load_from(
                    weights.folder,
                    state,
                    model_only=options.initial_load_model_only,
                    exclude=exclude,
                )
                self._restore(state)
            elif "model" not in exclude:
                load_weights(weights, self.model.stored, config=self.model.config)
        else:
            logger.info("no checkpoint to load: fresh weights")
        self.model.after_update()

    def _restore(self, state: State) -> None:
        """Take from a loaded state what is not shared memory."""
        values = read_train_state(state)
        self.step = int(values["step"])
        self.tokens_seen = int(values["tokens_seen"])
        self.skipped_steps = int(values["skipped_steps"])
        self.loader.load_state_dict(
            {key: int(value) for key, value in read_train_state(state, part="dataloader").items()}
        )

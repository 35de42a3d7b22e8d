"""What the Trainer costs beside a bare loop over the same model, optimizer and batches.

    python scripts/bench_overhead.py [--rounds 8] [--steps 4] [--section.key value ...]

Both run in this one process and take turns, round by round, so that a busy machine slows both;
compared is CPU time a token (time.process_time), the median of the rounds' ratios. The bare loop
is what a page of PyTorch does: forward, backward, clip, step; in bf16 under autocast, where the
Trainer has FSDP's mixed precision. Further flags are those of train.py.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_lite.config import Config, ConfigError, load_and_check
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.data.opening import open_sources
from torchtitan_lite.data.sources import Source
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.families import model_config
from torchtitan_lite.models.init import draw_parameter
from torchtitan_lite.observe.logging import init_logging
from torchtitan_lite.observe.metrics import Record
from torchtitan_lite.optim.schedule import lr_factor
from torchtitan_lite.trainer import Trainer

DEBUG_RECIPE = ["--job.config_file", "train_configs/debug.toml"]


class BareLoop:
    """A page of PyTorch over the same decoder."""

    def __init__(self, config: Config, model: ModelConfig, source: Source) -> None:
        self.config = config
        self.model = Decoder(model)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                cpu = torch.device("cpu")
                weights = draw_parameter(
                    name, parameter.shape, model, seed=config.debug.seed, device=cpu
                )
                parameter.copy_(weights)
        assert self.model.lm_head is not None
        self.model.lm_head.token_loss.num_chunks = config.loss.num_chunks
        named = dict(self.model.named_parameters())
        vectors = [p for n, p in named.items() if p.ndim == 1 or n == "embed_tokens.weight"]
        matrices = [p for n, p in named.items() if p.ndim > 1 and n != "embed_tokens.weight"]
        groups: list[dict[str, Any]] = [{"params": matrices}]
        groups += [{"params": vectors, "weight_decay": 0.0}]
        options = config.optimizer
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
            fused=True,
        )
        self.batches = Loader(
            source,
            global_batch_size=config.training.global_batch_size,
            batch_rank=0,
            batch_degree=1,
            seed=config.debug.seed,
        )
        self.step = 0

    def train_step(self) -> float:
        training = self.config.training
        tokens, labels, _ = next(self.batches)
        num_tokens = int((labels != -100).sum())
        loss = 0.0
        for token_rows, label_rows in zip(
            tokens.split(training.local_batch_size),
            labels.split(training.local_batch_size),
            strict=True,
        ):
            bf16 = training.mixed_precision_param == "bfloat16"
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                share = self.model(token_rows, labels=label_rows)[0] / num_tokens
            share.backward()
            loss += share.item()
        limit = training.max_norm or math.inf
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        factor = lr_factor(
            self.step,
            total_steps=training.steps,
            warmup_steps=self.config.lr_scheduler.warmup_steps,
            decay_ratio=None,
            decay_type=self.config.lr_scheduler.decay_type,
            min_lr_factor=self.config.lr_scheduler.min_lr_factor,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.optimizer.lr * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="of each, a round")
    arguments, rest = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        off = ["--checkpoint.no_enable", "--validation.no_enable", "--job.dump_folder", folder]
        off += ["--training.steps", str((arguments.rounds + 1) * arguments.steps)]
        try:
            config, model = load_and_check(
                [*DEBUG_RECIPE, *off, *rest],
                world_size=1,
                resolve_model=lambda c: model_config(
                    c.model.name, c.model.flavor, c.model.overrides, c.model.hf_assets_path
                ),
            )
            source, _ = open_sources(config, model.vocab_size)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        init_logging(rank=1)  # errors only
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        bare = BareLoop(config, model, source)
        trainer = AlternatingTrainer(
            config, model, source=source, bare=bare, steps_a_round=arguments.steps
        )
        trainer.train()
        print(trainer.report())
        dist.destroy_process_group()
    return 0


class AlternatingTrainer(Trainer):
    """The Trainer, in whose loop the bare one gets every other turn.

    All that `train` does between two turns of the bare loop is the Trainer's own time: batches,
    norm, metrics, log line, garbage collection.
    """

    def __init__(self, *args: Any, bare: BareLoop, steps_a_round: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bare = bare
        self.steps_a_round = steps_a_round
        self.seconds: dict[str, list[float]] = {"trainer": [], "bare": []}
        self.bare_loss = math.nan
        self.mark = math.nan

    def train_step(self) -> Record:
        if self.step % self.steps_a_round == 0:
            begin = time.process_time()
            for _ in range(self.steps_a_round):
                self.bare_loss = self.bare.train_step()
            end = time.process_time()
            if self.step >= self.steps_a_round:  # the first round of each warms up
                self.seconds["trainer"].append(begin - self.mark)
                self.seconds["bare"].append(end - begin)
            self.mark = time.process_time()
        return super().train_step()

    def report(self) -> str:
        training = self.config.training
        tokens = self.steps_a_round * training.global_batch_size * training.seq_len
        ours, bare = self.seconds["trainer"], self.seconds["bare"]
        lines = [
            f"{name:8} {statistics.median(seconds) / tokens * 1e6:7.1f} CPU us a token (median of "
            f"{len(seconds)} rounds), {min(seconds) / tokens * 1e6:.1f} at best"
            for name, seconds in self.seconds.items()
        ]
        ratio = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
        lines.append(f"ratio    {ratio:7.3f} (median), {min(ours) / min(bare):.3f} (best rounds)")
        loss = self.loss.over_ranks(mine=True)[0][1]
        lines.append(f"loss     trainer {loss:.5f}, bare {self.bare_loss:.5f}")
        return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

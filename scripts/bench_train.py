"""A bare loop, this Trainer, compiled, in float8, and Hugging Face's: the same steps, in turns.

    OMP_NUM_THREADS=1 PYTHONPATH=. python scripts/bench_train.py [--rounds 8] [--steps 4]
        [--of bare,eager,compiled,float8,hugging_face] [--section.key value ...]

All train the same weights on the same rows in this one process. Each has a thread, and a baton that
it hands on after a few steps, so that a busy machine slows all alike; what one does between two
turns of the others is its own time: batches, norm, metrics, log lines, garbage collection. Compared
is CPU time a token (time.process_time; on an accelerator time on the clock), by the median of the
rounds' ratios. The first round of each, in which it compiles, is left out.

The bare loop is what a page of PyTorch does: forward, backward, clip, step; in bf16 under autocast,
where the Trainer casts parameters. `float8` is compiled, with rowwise scales if no
--quantize.linear.float8.recipe_name says otherwise; the others have none. Hugging Face's Trainer
needs the package accelerate. Further flags are those of train.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.build import initialise
from torchtitan_lite.config import Config, ConfigError, load_and_check
from torchtitan_lite.data.loader import Loader
from torchtitan_lite.data.opening import open_sources
from torchtitan_lite.data.sources import Source
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.families import config_to_hf, model_of
from torchtitan_lite.observe.logging import init_logging
from torchtitan_lite.observe.metrics import Record
from torchtitan_lite.optim.schedule import lr_factor
from torchtitan_lite.trainer import Trainer

DEBUG_RECIPE = ["--job.config_file", "train_configs/debug.toml"]
ACCELERATOR = torch.accelerator.is_available()


class Baton:
    """Who may run, and how long each did, a round after the other."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.losses = dict.fromkeys(names, math.nan)
        self.error: BaseException | None = None
        self._turn, self._begun, self._changed = 0, math.nan, threading.Condition()

    def begin_round(self, name: str) -> None:
        """End the round before, if there was one, and wait until it is the turn of `name` again."""
        with self._changed:
            if not math.isnan(self._begun) and self.names[self._turn] == name:
                self._hand_on()
            self._changed.wait_for(lambda: self.error or self.names[self._turn] == name)
            if self.error:
                raise RuntimeError(f"{name} stops: another contestant failed")
            self._begun = _clock()

    def leave(self, name: str, error: BaseException | None = None) -> None:
        """After the last round."""
        with self._changed:
            self.error = self.error or error
            if error is None:
                self._hand_on()
            self._changed.notify_all()

    def _hand_on(self) -> None:
        self.seconds[self.names[self._turn]].append(_clock() - self._begun)
        self._turn = (self._turn + 1) % len(self.names)
        self._begun = math.nan
        self._changed.notify_all()


def _clock() -> float:
    if not ACCELERATOR:
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def run_bare(config: Config, model: ModelConfig, source: Source, turn: Callable[[], None]) -> float:
    """A page of PyTorch over the same decoder; returns the last loss."""
    device = torch.accelerator.current_accelerator() if ACCELERATOR else torch.device("cpu")
    assert device is not None
    decoder = first_weights(config, model).to(device)
    assert decoder.lm_head is not None
    decoder.lm_head.token_loss.num_chunks = config.loss.num_chunks
    named = dict(decoder.named_parameters())
    vectors = [p for n, p in named.items() if p.ndim == 1 or n == "embed_tokens.weight"]
    matrices = [p for n, p in named.items() if p.ndim > 1 and n != "embed_tokens.weight"]
    options, training = config.optimizer, config.training
    groups: list[dict[str, Any]] = [{"params": matrices}]
    groups += [{"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups,
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        weight_decay=options.weight_decay,
        fused=True,
    )
    batches = batches_of(config, source)
    bf16, loss = training.mixed_precision_param == "bfloat16", math.nan
    for step in range(training.steps):
        turn()
        tokens, labels, *_ = next(batches)
        num_tokens, loss = int((labels != -100).sum()), 0.0
        size = training.local_batch_size
        for token_rows, label_rows in zip(tokens.split(size), labels.split(size), strict=True):
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                sums = decoder(token_rows.to(device), labels=label_rows.to(device))
            share = sums[0] / num_tokens
            share.backward()
            loss += share.item()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), training.max_norm or math.inf)
        factor = lr_factor(
            step,
            total_steps=training.steps,
            warmup_steps=config.lr_scheduler.warmup_steps,
            decay_ratio=None,
            decay_type=config.lr_scheduler.decay_type,
            min_lr_factor=config.lr_scheduler.min_lr_factor,
        )
        for group in optimizer.param_groups:
            group["lr"] = options.lr * factor
        optimizer.step()
        optimizer.zero_grad()
    return loss


class TrainerInTurns(Trainer):
    """The Trainer, which waits for its turn before each step."""

    turn: Callable[[], None]

    def train_step(self) -> Record:
        self.turn()
        return super().train_step()


def run_trainer(
    config: Config, model: ModelConfig, source: Source, turn: Callable[[], None]
) -> float:
    """This Trainer as `config` has it."""
    trainer = TrainerInTurns(config, model, source=source)
    trainer.turn = turn
    trainer.train()
    return trainer.loss.over_ranks(mine=True)[0][1]


def run_hugging_face(
    config: Config, model: ModelConfig, source: Source, turn: Callable[[], None]
) -> float:
    """Hugging Face's Trainer on its own Llama, with the same weights and rows in the same order."""
    import transformers

    training = config.training
    batches = batches_of(config, source)
    rows = []
    for _ in range(training.steps):
        tokens, labels, *_ = next(batches)
        # Its loss looks one place ahead, so the last label of a row has no place.
        ahead = torch.cat((torch.full_like(labels[:, :1], -100), labels[:, :-1]), dim=1)
        rows += [{"input_ids": t, "labels": a} for t, a in zip(tokens, ahead, strict=True)]

    class InTurns(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turn()

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

    with tempfile.TemporaryDirectory() as folder:
        options = config.optimizer
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=training.local_batch_size,
            gradient_accumulation_steps=training.global_batch_size // training.local_batch_size,
            max_steps=training.steps,
            learning_rate=options.lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.beta1,
            adam_beta2=options.beta2,
            max_grad_norm=training.max_norm,
            lr_scheduler_type="cosine",
            warmup_steps=config.lr_scheduler.warmup_steps,
            optim="adamw_torch_fused",
            bf16=training.mixed_precision_param == "bfloat16",
            use_cpu=not ACCELERATOR,
            logging_steps=min(config.metrics.log_freq, training.steps),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=config.debug.seed,
        )
        trainer = InOrder(
            hugging_face_model(config, model), arguments, train_dataset=rows, callbacks=[InTurns()]
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log][-1]


def hugging_face_model(config: Config, model: ModelConfig) -> Any:
    """transformers' Llama with the first weights of a run."""
    import transformers

    content = config_to_hf(model, dtype="float32", bos_token_id=None, eos_token_id=None)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig.from_dict({**content, "use_cache": False})
    )
    weights: dict[str, Tensor] = {}
    for name, parameter in first_weights(config, model).named_parameters():
        padded = name in ("embed_tokens.weight", "lm_head.weight")
        weight = parameter.detach()[: model.vocab_size] if padded else parameter.detach()
        weights[name if name.startswith("lm_head") else f"model.{name}"] = weight
    theirs.load_state_dict(weights, strict=not model.tie_word_embeddings)
    return theirs


def first_weights(config: Config, model: ModelConfig) -> Decoder:
    """The decoder with the weights that `debug.seed` names."""
    decoder = Decoder(model)
    initialise(decoder, seed=config.debug.seed, device=torch.device("cpu"))
    return decoder


def batches_of(config: Config, source: Source) -> Loader:
    return Loader(
        source,
        global_batch_size=config.training.global_batch_size,
        batch_rank=0,
        batch_degree=1,
        seed=config.debug.seed,
    )


CONTESTANTS: dict[str, Callable[..., float]] = {
    "bare": run_bare,
    "eager": run_trainer,
    "compiled": run_trainer,
    "float8": run_trainer,
    "hugging_face": run_hugging_face,
}


def config_of(name: str, config: Config) -> Config:
    """What the contestant `name` makes of `config`."""
    own = deepcopy(config)
    own.job.dump_folder = f"{config.job.dump_folder}/{name}"
    own.compile.enable |= name in ("compiled", "float8")
    recipe = own.quantize.linear.float8.recipe_name or "rowwise"
    own.quantize.linear.float8.recipe_name = recipe if name == "float8" else ""
    return own


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="after one that warms up")
    parser.add_argument("--steps", type=int, default=4, help="of each, a round")
    parser.add_argument("--of", default="bare,eager,compiled", help="who takes part, in this order")
    arguments, rest = parser.parse_known_args(argv)
    names = arguments.of.split(",")
    if unknown := [name for name in names if name not in CONTESTANTS]:
        print(f"--of: no {', '.join(unknown)}; there are {', '.join(CONTESTANTS)}", file=sys.stderr)
        return 2
    if "hugging_face" in names and importlib.util.find_spec("accelerate") is None:
        print("--of hugging_face: its Trainer needs accelerate; pip install it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        off = ["--checkpoint.no_enable", "--validation.no_enable", "--job.dump_folder", folder]
        off += ["--training.steps", str((arguments.rounds + 1) * arguments.steps)]
        try:
            config, model = load_and_check(
                [*DEBUG_RECIPE, *off, *rest],
                world_size=1,
                resolve_model=model_of,
            )
            source, _ = open_sources(config, model.vocab_size)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        init_logging(rank=1)  # errors only
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        baton = compete(names, config, model, source, steps_a_round=arguments.steps)
        dist.destroy_process_group()
    tokens = arguments.steps * config.training.global_batch_size * config.training.seq_len
    print_report(baton, tokens)
    return 0


def compete(
    names: list[str], config: Config, model: ModelConfig, source: Source, *, steps_a_round: int
) -> Baton:
    """Every contestant in a thread of its own, one at a time."""
    baton = Baton(names)

    def run(name: str) -> None:
        steps = 0

        def turn() -> None:
            nonlocal steps
            if steps % steps_a_round == 0:
                baton.begin_round(name)
            steps += 1

        try:
            baton.losses[name] = CONTESTANTS[name](config_of(name, config), model, source, turn)
        except BaseException as error:
            baton.leave(name, error)
            raise
        baton.leave(name)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if baton.error is not None:
        raise baton.error
    return baton


def print_report(baton: Baton, tokens: int) -> None:
    """CPU time a token, and the medians of the rounds' ratios to the first contestant."""
    first = baton.seconds[baton.names[0]][1:]
    print(f"us a token, of {len(first)} rounds; tokens a second, x {baton.names[0]}; last loss")
    for name, (_, *seconds) in baton.seconds.items():
        median = statistics.median(seconds)
        speed = statistics.median(a / b for a, b in zip(first, seconds, strict=True))
        print(
            f"{name:13} {median / tokens * 1e6:8.1f} {min(seconds) / tokens * 1e6:8.1f} at best "
            f"{speed:8.3f} {baton.losses[name]:9.5f}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

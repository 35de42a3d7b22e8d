"""What two ranks cost over one: summed CPU time a token of meshes, in turns, on CPU.

    OMP_NUM_THREADS=1 PYTHONPATH=. python scripts/bench_mesh.py [--rounds 8] [--steps 4]
        [--of one,zero0,zero1,zero3,tp,pp,micro,apart] [--section.key value ...]

Each contestant is a world of its own, of one or two forked ranks, and trains the same weights on
the same rows with the Trainer. They take turns of a few steps; who waits, waits in a read of a pipe
and takes no time. Compared is CPU time (time.process_time of all ranks, gloo's threads included),
by the median of the rounds' ratios to the first contestant; the first round is left out.

`micro` is one process that takes the pipeline's micro-batches one by one: what smaller products
cost without any pipeline.

Two ranks that compute at once slow each other down where they share caches and the memory, whatever
they exchange. `apart` says by how much on this machine: two processes that know nothing of each
other and do the work of `one` each, counted by the mean of the two. The last column is a ratio
over that of `apart`: what is left for the mesh.

In fp32 the last losses must agree to 1e-5, or the exit code is 1. Further flags are those of
train.py, for all.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it: once here, not once in each rank
import torch.distributed as dist

from torchtitan_lite.config import Config, ConfigError, load_and_check
from torchtitan_lite.data.opening import open_sources
from torchtitan_lite.data.sources import Source
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.families import model_of
from torchtitan_lite.observe.logging import init_logging
from torchtitan_lite.observe.metrics import Record
from torchtitan_lite.trainer import Trainer

DEBUG_RECIPE = ["--job.config_file", "train_configs/debug.toml"]
# A few tokens of a small vocabulary: pieces of them would only make more, smaller products.
ONE_CHUNK = ["--loss.num_chunks", "1"]
# 4,096 tokens a step: enough that products, and not what each step costs, decide.
BATCH = ["--training.global_batch_size", "32"]
FSDP = ["--parallelism.data_parallel_shard_degree", "2", "--parallelism.zero_stage"]
TP = ["--parallelism.tensor_parallel_degree", "2", "--parallelism.enable_sequence_parallel"]
PP = ["--parallelism.pipeline_parallel_degree", "2"]
PP += ["--parallelism.pipeline_parallel_schedule", "1F1B"]
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Contestant:
    """`worlds` worlds of `ranks` ranks, each with these flags."""

    ranks: int
    flags: list[str]
    worlds: int = 1
    micro_batches: int = 1


CONTESTANTS = {
    "one": Contestant(1, []),
    "zero0": Contestant(2, [*FSDP, "0"]),
    "zero1": Contestant(2, [*FSDP, "1"]),
    "zero3": Contestant(2, [*FSDP, "3"]),
    "tp": Contestant(2, TP),
    "pp": Contestant(2, PP, micro_batches=4),
    "micro": Contestant(1, [], micro_batches=4),
    "apart": Contestant(1, [], worlds=2),
}


class TrainerInTurns(Trainer):
    """The Trainer, which waits for its turn before each step."""

    turn: Callable[[], None]

    def train_step(self) -> Record:
        self.turn()
        return super().train_step()


def run_rank(
    config: Config,
    model: ModelConfig,
    source: Source,
    *,
    steps_a_round: int,
    told: Connection,
) -> None:
    """Train; say on `told` how many CPU seconds each round took, and at the end the last loss."""
    trainer, steps, begun = TrainerInTurns(config, model, source=source), 0, 0.0

    def turn() -> None:
        nonlocal steps, begun
        if steps % steps_a_round == 0:
            if steps:
                told.send(time.process_time() - begun)
            told.recv()
            begun = time.process_time()
        steps += 1

    trainer.turn = turn
    trainer.train()
    told.send(time.process_time() - begun)
    mine = trainer.mesh.owns_data and trainer.model.has_loss
    told.send(trainer.loss.over_ranks(mine=mine)[0][1])


def rank_main(
    store: str, rank: int, world_size: int, told: Connection, others: list[Connection], work: Any
) -> None:
    for pipe in others:  # the parent's ends, which a fork has too: without them, its end is heard
        pipe.close()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    with suppress(EOFError, BrokenPipeError):
        try:
            init_logging(rank=1)  # errors only
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
            )
            work(told=told)
        except Exception:
            told.send(traceback.format_exc())
            while True:  # until the parent has read it
                told.recv()
    os._exit(0)  # what else there is to end belongs to the process that was forked


class Ranks:
    """The forked ranks of all contestants, and the words exchanged with them."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.pipes: dict[str, list[Connection]] = {}
        self.processes: list[Any] = []

    def start(self, name: str, contestant: Contestant, work: Any) -> None:
        """Fork the ranks of `name`, each of which calls work(told=its pipe)."""
        context = multiprocessing.get_context("fork")
        for world in range(contestant.worlds):
            for rank in range(contestant.ranks):
                mine, its = context.Pipe()
                self.pipes.setdefault(name, []).append(mine)
                ours = [pipe for pipes in self.pipes.values() for pipe in pipes]
                store = f"{self.folder}/{name}{world}"
                arguments = (store, rank, contestant.ranks, its, ours, work)
                process = context.Process(target=rank_main, args=arguments)
                process.start()
                its.close()
                self.processes.append(process)

    def hear(self, name: str) -> list[float]:
        """A number from each rank of `name`."""
        numbers = [pipe.recv() for pipe in self.pipes[name]]
        for number in numbers:
            if isinstance(number, str):
                raise RuntimeError(f"{name}: a rank failed:\n{number}")
        return numbers

    def take_turn(self, name: str) -> float:
        """Summed CPU seconds of a round of `name`."""
        for pipe in self.pipes[name]:
            pipe.send("go")
        return sum(self.hear(name))

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()


def configure(
    contestant: Contestant, more: list[str], *, steps: int, folder: str
) -> tuple[Config, ModelConfig]:
    """The checked configuration of a contestant; raises ConfigError."""
    off = ["--checkpoint.no_enable", "--validation.no_enable", "--job.dump_folder", folder]
    flags = [*DEBUG_RECIPE, *off, *ONE_CHUNK, *BATCH, "--training.steps", str(steps)]
    flags += [*more, *contestant.flags]

    def check(flags: list[str]) -> tuple[Config, ModelConfig]:
        return load_and_check(flags, world_size=contestant.ranks, resolve_model=model_of)

    config, model = check(flags)
    if contestant.micro_batches > 1:
        size = config.training.global_batch_size // contestant.micro_batches
        rows = "parallelism.pipeline_parallel_microbatch_size"
        if config.parallelism.pipeline_parallel_degree == 1:
            rows = "training.local_batch_size"
        config, model = check([*flags, f"--{rows}", str(size)])
    return config, model


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="after one that warms up")
    parser.add_argument("--steps", type=int, default=4, help="of each, a round")
    parser.add_argument("--of", default=",".join(CONTESTANTS), help="who takes part, in this order")
    arguments, rest = parser.parse_known_args(argv)
    names, steps = arguments.of.split(","), (arguments.rounds + 1) * arguments.steps
    if unknown := [name for name in names if name not in CONTESTANTS]:
        print(f"--of: no {', '.join(unknown)}; there are {', '.join(CONTESTANTS)}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # a fork has no threads but its own
    with tempfile.TemporaryDirectory() as folder:
        try:
            prepared = {}
            for name in names:
                own = f"{folder}/dump-{name}"
                prepared[name] = configure(CONTESTANTS[name], rest, steps=steps, folder=own)
            config, model = prepared[names[0]]
            source, _ = open_sources(config, model.vocab_size)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        ranks = Ranks(folder)
        gc.freeze()  # a collection in a rank would touch, and so copy, all that there is here
        try:
            for name in names:
                of_name = prepared[name]

                def work(
                    *, told: Connection, of_name: tuple[Config, ModelConfig] = of_name
                ) -> None:
                    run_rank(*of_name, source, steps_a_round=arguments.steps, told=told)

                ranks.start(name, CONTESTANTS[name], work)
            seconds: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(arguments.rounds + 1):
                for name in names:
                    seconds[name].append(ranks.take_turn(name) / CONTESTANTS[name].worlds)
            losses = {name: ranks.hear(name) for name in names}
        finally:
            ranks.end()
    tokens = arguments.steps * config.training.global_batch_size * config.training.seq_len
    return print_report(seconds, losses, tokens, config.training.mixed_precision_param)


def print_report(
    seconds: dict[str, list[float]], losses: dict[str, list[float]], tokens: int, dtype: str
) -> int:
    """CPU time a token, and the medians of the rounds' ratios; 1 if the losses disagree."""
    first, *_ = seconds
    counted = {name: rounds[1:] for name, rounds in seconds.items()}
    alone = counted.get("apart", counted[first])
    print(
        f"us a token, of {len(counted[first])} rounds; at best; over {first}; over apart; last loss"
    )
    for name, rounds in counted.items():
        ratios = [
            statistics.median(own / other for own, other in zip(rounds, others, strict=True))
            for others in (counted[first], alone)
        ]
        micros = statistics.median(rounds) / tokens * 1e6
        over = " ".join(f"{ratio:8.3f}" for ratio in ratios)
        best = min(rounds) / tokens * 1e6
        print(f"{name:6} {micros:8.1f} {best:8.1f} {over} {losses[name][0]:11.7f}")
    largest = max(abs(loss - losses[first][0]) for all in losses.values() for loss in all)
    agree = largest <= TOLERANCE
    print(f"largest difference of a loss: {largest:.1e} (at most {TOLERANCE:.0e} in float32)")
    return 0 if agree or dtype != "float32" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

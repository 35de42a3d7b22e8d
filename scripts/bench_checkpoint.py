"""What a checkpoint costs: how long the training loop waits, and megabytes a second to the disk.

    OMP_NUM_THREADS=1 PYTHONPATH=. python scripts/bench_checkpoint.py [--megabytes 70,1000]
        [--ranks 1,2] [--rounds 5] [--folder outputs/bench_checkpoint]

In turns, each round: torch.save of the same tensors (each rank its own file, brought to disk by
fsync, as the manager does), a synchronous save, an asynchronous one, and a load. The state is that
of a model under AdamW: a weight and two moments of each parameter, sharded over the ranks. 70
megabytes are the debug model's. Printed are medians in seconds on the clock of rank 0, and bytes of
all ranks over them:

    torch.save    write and fsync
    save          the manager's: what DCP plans, write, fsync, SHA-256, manifest, rename
    async waits   as long as `save` blocks the loop, which then goes on
    async done    from then on until the checkpoint counts, with an idle loop
    load          read, hash and compare, then DCP's own reading
    sha256        of as many bytes in memory, one core: a bound for what is hashed

The folder decides much of it, so the default lies beside the runs.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lite.checkpoint.manager import CheckpointManager

PARAMETERS = 24  # of equal size; each with two moments
WIDTH = 1024
WHAT = ("torch.save", "save", "async waits", "async done", "load", "sha256")


def make_state(megabytes: float, ranks: int) -> dict[str, Tensor]:
    """fp32, `megabytes` of all ranks together."""
    rows = max(round(megabytes * 1e6 / 4 / 3 / PARAMETERS / WIDTH / ranks), 1)
    mesh = init_device_mesh("cpu", (ranks,))
    state: dict[str, Tensor] = {}
    for index in range(PARAMETERS):
        name = f"layers.{index}.weight"
        for key in (
            name,
            f"optimizer.state.{name}.exp_avg",
            f"optimizer.state.{name}.exp_avg_sq",
        ):
            local = torch.randn(rows, WIDTH)
            state[key] = DTensor.from_local(local, mesh, [Shard(0)]) if ranks > 1 else local
    return state


def locals_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: t.to_local() if isinstance(t, DTensor) else t for k, t in state.items()}


def seconds(work: Callable[[], object]) -> float:
    """Of `work` on all ranks: from when all begin until all are done."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def save_plainly(state: dict[str, Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(locals_of(state), file)
        file.flush()
        os.fsync(file.fileno())


def one_round(folder: Path, state: dict[str, Tensor], spare: dict[str, Tensor]) -> list[float]:
    """Seconds of each of WHAT."""
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    times = [seconds(lambda: save_plainly(state, folder / f"plain-{rank}.pt"))]
    manager = CheckpointManager(folder / "sync")
    times.append(seconds(lambda: manager.save(1, state)))
    # A loop saves more than once: the second time buffers for the copy are there.
    manager = CheckpointManager(folder / "async", async_mode="async")
    manager.save(1, state)
    while manager._in_flight is not None:
        manager.poll()
        time.sleep(0.01)
    times.append(seconds(lambda: manager.save(2, state)))
    times.append(seconds(manager.finish))
    times.append(seconds(lambda: CheckpointManager(folder / "sync").load(spare)))
    for key, tensor in locals_of(spare).items():
        assert torch.equal(tensor, locals_of(state)[key]), f"{key} came back as something else"
    arrays: list[Any] = [tensor.numpy() for tensor in locals_of(state).values()]
    times.append(seconds(lambda: [hashlib.sha256(array) for array in arrays]))
    return times


def rank_main(
    told: Connection, store: str, rank: int, ranks: int, megabytes: float, rounds: int
) -> None:
    """All rounds of one rank; rank 0 sends what they took."""
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    folder = Path(store).parent / "checkpoints"
    state = make_state(megabytes, ranks)
    spare = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    found = [one_round(folder, state, spare) for _ in range(rounds)]
    if rank == 0:
        told.send(found)
    dist.destroy_process_group()
    os._exit(0)


def measure(folder: Path, *, megabytes: float, ranks: int, rounds: int) -> list[list[float]]:
    """For each round the seconds of each of WHAT."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    hears, told = context.Pipe(duplex=False)
    store = str(folder / "store")
    processes = [
        context.Process(
            target=rank_main, args=(told, store, rank, ranks, megabytes, rounds), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    told.close()
    try:
        return hears.recv()
    except EOFError:
        raise RuntimeError(f"a rank failed, of {ranks}") from None
    finally:
        for process in processes:
            process.join()
        shutil.rmtree(folder)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", default="70,1000", help="of state, of all ranks together")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="outputs/bench_checkpoint", help="made, and removed")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # a fork has no threads but its own
    print("seconds (MB/s)  ranks  " + "  ".join(f"{what:>15}" for what in WHAT))
    for megabytes in map(float, arguments.megabytes.split(",")):
        for ranks in map(int, arguments.ranks.split(",")):
            rounds = measure(
                Path(arguments.folder).resolve(),
                megabytes=megabytes,
                ranks=ranks,
                rounds=arguments.rounds,
            )
            medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
            cells = "  ".join(f"{s:7.3f} ({megabytes / s:5.0f})" for s in medians)
            print(f"{megabytes:11.0f} MB  {ranks:5}  {cells}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

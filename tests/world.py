"""N real ranks in half a second.

`run_ranks(function, N, ...)` forks N copies of this process. torch is already imported, so a
rank costs milliseconds instead of seconds. The ranks talk gloo through a file store; each
hands its pickled result, or its traceback, back through a pipe. The first rank that fails ends
the others, and its traceback becomes the test's. Ranks that outlive the time limit are killed:
a hang is a failure, never a stuck suite.

A thread of gloo crashes now and then (a segmentation fault in about one of a thousand worlds on a
loaded machine, none of our code on its stack), so a world in which a rank died of a signal is
started once more, with a warning. What crashes twice fails.

    results = run_ranks(add_ranks, 4)            # [6, 6, 6, 6]

Proven in tests/test_world.py: results, a failing rank, a hanging rank and a rank that dies.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process imports it: a second of CPU for each rank
import torch.distributed as dist

# A forked child must not inherit a pool of OpenMP threads that no longer run: one thread each.
torch.set_num_threads(1)


class RankFailure(AssertionError):
    """A rank raised, died or ran out of time; the message holds its traceback."""


class RankCrash(RankFailure):
    """A rank was ended by a signal that a crash raises."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Run `function(*args)` on `world_size` gloo ranks; return their results in rank order.

    Inside, the default process group is up and RANK, LOCAL_RANK and WORLD_SIZE are set, as
    torchrun would set them. Raises RankFailure with the traceback of the first rank that failed.
    """
    try:
        return _run_once(function, world_size, args, timeout)
    except RankCrash as crash:
        warnings.warn(f"{function.__name__}: {crash}; started once more", stacklevel=2)
        return _run_once(function, world_size, args, timeout)


def _run_once(
    function: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float
) -> list[Any]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes, ranks = [], []
        gc.freeze()  # a collection in a rank would touch, and so copy, every object of this process
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(function, args, rank, world_size, store, sender, timeout)
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            ranks.append(process)
        gc.unfreeze()
        try:
            return _collect(pipes, ranks, timeout)
        except RankFailure:
            time.sleep(0.2)  # a rank that crashed may be noticed by another rank first
            for rank, process in enumerate(ranks):
                if process.exitcode in (-signal.SIGSEGV, -signal.SIGABRT):
                    raise RankCrash(f"rank {rank} died of signal {-process.exitcode}") from None
            raise
        finally:
            for process in ranks:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
                process.join()


def _collect(pipes: list[Connection], ranks: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes):
        pending = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(pending, max(0.0, deadline - time.monotonic()))
        if not ready:
            waiting = [rank for rank in range(len(pipes)) if rank not in results]
            raise RankFailure(f"ranks {waiting} did not finish within {timeout:.0f} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                succeeded, value = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                ranks[rank].join()
                raise RankFailure(f"rank {rank} died, exit code {ranks[rank].exitcode}") from None
            if not succeeded:
                raise RankFailure(f"rank {rank} of {len(pipes)} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    store: str,
    sender: Connection,
    timeout: float,
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        result = function(*args)
        dist.barrier()
        # Plain pickle copies tensors; the pipe's own would hand over memory that dies with us.
        sender.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        # BaseException: a DCP failure is one, and a rank must never fail in silence.
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        sender.close()
        # Skip destructors of the forked interpreter: they belong to the parent's objects.
        os._exit(0)

"""How every command starts and ends: one process group, one line for a user's mistake.

    exit code 0 done    2 a mistake of the user's, told in a line    anything else a crash

Imports torch only when there is work: a wrong argument is told at once.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

from torchtitan_lite.config import ConfigError

USER_MISTAKE = 2
MANY_FILES = 1 << 14  # a process of 1,000 ranks has a few thousand


class Parser(argparse.ArgumentParser):
    """The options of a script, whose docstring is their help; a mistake is a ConfigError."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the options)")


def world_size() -> int:
    """Ranks of this job, as torchrun says; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def told(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run `command(argv)`; return its exit code, or 2 with the message of a ConfigError.

    One rank of each machine says what is wrong, and the launcher ends the others. They wait for
    that: one that exits first would have the launcher end the one that speaks. A rank that is not
    ended is alone with its mistake, a damaged row say, and speaks for itself.
    """
    try:
        return command(argv)
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(5)
        print(error, file=sys.stderr, flush=True)
        return USER_MISTAKE


@contextmanager
def process_group(*, timeout_seconds: int = 300, cpu_offload: bool = False) -> Iterator[None]:
    """The default process group, of torchrun's ranks or of this process alone.

    Raises ConfigError when this rank has no device.
    """
    import torch.distributed as dist

    from torchtitan_lite import device

    try:
        kind = device.local_device(int(os.environ.get("LOCAL_RANK", "0"))).type
    except ValueError as error:
        raise ConfigError(str(error)) from None
    backend = device.backend(kind, cpu_offload=cpu_offload)
    _allow_sockets()
    timeout = timedelta(seconds=timeout_seconds)
    if world_size() > 1:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    try:
        yield
        # Without it a rank may be gone while another still talks to it.
        dist.barrier()
    except BaseException:
        # NCCL's end waits for the other ranks, which know nothing of the error: its traceback
        # would come after they gave up, if at all.
        if backend == "gloo" or world_size() == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _allow_sockets() -> None:
    """Each group of gloo has one for each rank, and the usual limit is 1,024 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

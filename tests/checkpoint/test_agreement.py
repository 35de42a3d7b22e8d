"""One rank's failure is every rank's, at the same point and with the same words."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.world import run_ranks
from torchtitan_lite.checkpoint.agreement import CheckpointError, agree, on_first_rank
from torchtitan_lite.config import ConfigError


def outcome(work: Any, gather: Any = agree) -> tuple[str, str]:
    try:
        gather(work, doing="reading x", group=dist.group.WORLD)
    except (CheckpointError, ConfigError) as error:
        return type(error).__name__, str(error)
    return "none", ""


def failing_ranks() -> list[Any]:
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None

    def fails_on_1() -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")

    def fails_everywhere() -> None:
        raise ConfigError(f"key = {rank}")

    def fails() -> None:
        raise ValueError("bad")

    return [
        agree(lambda: rank, doing="counting", group=world),
        on_first_rank(lambda: f"from {rank}", doing="asking", group=world),
        outcome(fails_on_1),
        outcome(fails_everywhere),
        outcome(fails, on_first_rank),
    ]


def test_results_and_errors_are_the_same_on_all_ranks() -> None:
    results = run_ranks(failing_ranks, 2)
    assert results[0] == results[1]
    assert results[0] == [
        [0, 1],
        "from 0",
        ("CheckpointError", "reading x: rank 1: OSError: [Errno 28] No space left on device"),
        ("ConfigError", "key = 0 (and 1 more failures)"),
        ("CheckpointError", "reading x: rank 0: ValueError: bad"),
    ]

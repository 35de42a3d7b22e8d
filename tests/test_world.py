"""The harness itself: a result, a failure, a hang and a death each look like what they are."""

import faulthandler
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.world import RankFailure, run_ranks


def _sum_of_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the chosen rank fails")
    dist.barrier()


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def test_every_rank_hands_back_its_result() -> None:
    assert run_ranks(_sum_of_ranks, 4) == [6, 6, 6, 6]


def test_the_first_failing_rank_is_the_tests_traceback() -> None:
    with pytest.raises(RankFailure, match="(?s)rank .*the chosen rank fails|Connection"):
        run_ranks(_fail_on, 3, 1)


def test_a_hanging_rank_is_killed_at_the_time_limit() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match="did not finish within 2 s"):
        run_ranks(_sleep_on, 2, 1, timeout=2.0)
    assert time.monotonic() - started < 20


def _crash(marker: Path) -> int:
    """Rank 1 crashes unless the marker is there, which the crash leaves."""
    if dist.get_rank() == 1 and not marker.exists():
        if marker.name == "once":
            marker.touch()
        faulthandler.disable()  # this one is on purpose
        os.kill(os.getpid(), signal.SIGSEGV)
    return _sum_of_ranks()


def test_a_crash_is_tried_once_more_and_what_crashes_twice_fails(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="rank 1 died of signal 11; started once more"):
        assert run_ranks(_crash, 2, tmp_path / "once") == [1, 1]
    with pytest.warns(UserWarning), pytest.raises(RankFailure, match="rank 1 died of signal 11"):
        run_ranks(_crash, 2, tmp_path / "always")


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankFailure, match="rank"):
        run_ranks(_die_on, 2, 1)

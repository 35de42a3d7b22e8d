"""All ranks hear the same news.

A checkpoint is work of all ranks on one folder. If one of them cannot write its file, the others
must learn it at the same point: a rank that raises alone leaves the rest waiting in their next
collective until the group's timeout. So each piece of local work runs inside `agree`, which
exchanges what came of it:

    every rank succeeds   -> every rank gets the list of all results, in rank order
    any rank raises       -> every rank raises the same error, which names the rank and the cause

Proven in tests/checkpoint/test_agreement.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from torchtitan_lite.config import ConfigError

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A save or a load failed; all ranks raise the same, and its message names the folder."""


def agree(work: Callable[[], Result], *, doing: str, group: dist.ProcessGroup) -> list[Result]:
    """Run `work()` on every rank of `group`; return all results in rank order, on every rank.

    A collective of `group`, which must carry CPU tensors; results must be picklable and small.
    Raises CheckpointError on every rank when `work` raises on any, saying what was being done
    (`doing`), on which rank, and why; ConfigError instead where the failure is one.
    """
    kind: type[Exception] | None = None
    result: Result | str
    cause: BaseException | None = None
    try:
        result = work()
    except (ConfigError, CheckpointError) as error:  # their messages are complete already
        cause, kind, result = error, type(error), str(error)
    except (Exception, CheckpointException) as error:
        rank, cause, kind = dist.get_rank(group), error, CheckpointError
        # DCP's own is no Exception and a page of tracebacks; every rank gets it, with all causes.
        if isinstance(error, CheckpointException):
            rank, (cause, _) = min(error.failures.items())
        result = f"{doing}: rank {rank}: {type(cause).__name__}: {cause}"
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, (kind, result), group=group)
    failures = [outcome for outcome in outcomes if outcome[0] is not None]
    if failures:
        raised, message = failures[0]
        others = len({text for _, text in failures}) - 1
        raise raised(message + (f" (and {others} more failures)" if others else "")) from cause
    return [result for _, result in outcomes]


def on_first_rank(work: Callable[[], Result], *, doing: str, group: dist.ProcessGroup) -> Result:
    """Run `work()` on rank 0 of `group` alone; every rank returns its result, or raises its error.

    What rank 0 sees of a folder is what counts: two ranks that list it at different moments could
    decide differently.
    """
    is_first = dist.get_rank(group) == 0
    results = agree(lambda: work() if is_first else None, doing=doing, group=group)
    return results[0]  # type: ignore[return-value]

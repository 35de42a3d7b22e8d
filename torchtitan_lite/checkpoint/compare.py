"""Does this checkpoint belong to this run? Asked before the first byte is copied.

DCP stops at the first name it misses, says nothing of names that nobody asks for, and shows both
in a traceback. Here the index of the checkpoint is compared with what all ranks together want,
and everything that differs comes in one line.

Proven in tests/checkpoint/test_load.py.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from torchtitan_lite.checkpoint.agreement import agree
from torchtitan_lite.checkpoint.state import PARTS, is_excluded, is_model_key
from torchtitan_lite.config import ConfigError

logger = logging.getLogger(__name__)

NUM_NAMES_SHOWN = 5


def without_excluded(
    state: Mapping[str, Tensor], exclude: Collection[str], *, group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """`state` less what checkpoint.exclude_from_loading covers.

    A collective: a name may live on one pipeline stage only. Raises ConfigError for an entry that
    is no part and that matches no name on any rank; a part of which there is nothing is a warning.
    """
    if not exclude:
        return dict(state)
    used_here = [entry for entry in exclude if any(is_excluded(key, entry) for key in state)]
    used = set().union(
        *agree(lambda: used_here, doing="checkpoint.exclude_from_loading", group=group)
    )
    for entry in exclude:
        if entry not in used and entry not in PARTS:
            raise ConfigError(
                f"checkpoint.exclude_from_loading = {entry!r}: nothing has this name; give a part "
                f"({', '.join(PARTS)}) or the name of a module or weight"
            )
        if entry not in used and dist.get_rank(group) == 0:
            logger.warning("checkpoint.exclude_from_loading: %s has no effect here", entry)
    return {
        key: tensor
        for key, tensor in state.items()
        if not any(is_excluded(key, entry) for entry in exclude)
    }


def refuse_other_state(
    folder: Path,
    wanted: Mapping[str, Tensor],
    exclude: Collection[str],
    *,
    group: dist.ProcessGroup,
) -> None:
    """Raise ConfigError, on all ranks, unless `folder` holds what all ranks together want.

    Listed: tensors that the checkpoint lacks, that have another shape there, and weights there
    that no rank wants (unless excluded). A collective. Optimizer state that nobody wants is a
    warning.
    """
    doing = f"comparing with {folder}"
    stored_keys: list[str] = []
    missing: set[str] = set()
    shapes: set[str] = set()

    def compare() -> tuple[set[str], set[str]]:
        stored = FileSystemReader(folder).read_metadata().state_dict_metadata
        stored_keys.extend(sorted(stored))
        sizes = {key: list(getattr(stored[key], "size", [])) for key in wanted if key in stored}
        differing = {
            f"{key} {sizes[key]} there, {list(wanted[key].shape)} here"
            for key in sizes
            if sizes[key] != list(wanted[key].shape)
        }
        return wanted.keys() - stored.keys(), differing

    for missing_there, shapes_there in agree(compare, doing=doing, group=group):
        missing |= missing_there
        shapes |= shapes_there
    unwanted = [
        key
        for key in _wanted_by_nobody(stored_keys, wanted, group)
        if not any(is_excluded(key, entry) for entry in exclude)
    ]
    extra = [key for key in unwanted if is_model_key(key)]
    if missing or shapes or extra:
        raise ConfigError(_difference(folder, missing=missing, shapes=shapes, extra=extra))
    if unwanted and dist.get_rank(group) == 0:
        logger.warning("%s: not used by this run: %s", folder, _shortened(unwanted))


def _wanted_by_nobody(
    keys: list[str], wanted: Mapping[str, Tensor], group: dist.ProcessGroup
) -> list[str]:
    """Those of `keys` (equal on all ranks) that no rank wants; a byte a key goes over the wire."""
    if not keys:
        return []
    used = torch.tensor([key in wanted for key in keys], dtype=torch.uint8)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    return [key for key, is_used in zip(keys, used.tolist(), strict=True) if not is_used]


def _difference(
    folder: Path, *, missing: Collection[str], shapes: Collection[str], extra: Collection[str]
) -> str:
    parts = [
        f"{len(names)} {what} ({_shortened(names)})"
        for what, names in (
            ("missing there", missing),
            ("not in this model", extra),
            ("of another shape", shapes),
        )
        if names
    ]
    if extra or any(is_model_key(entry) for entry in (*missing, *shapes)):
        title = "checkpoint of another model"
        fix = "set model.flavor and model.overrides as in the run that wrote it"
    else:
        title = "checkpoint of another optimizer or trainer"
        fix = "leave the part out with checkpoint.exclude_from_loading, or set optimizer as there"
    return f"{title}: {folder}: {'; '.join(parts)}; {fix}"


def _shortened(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:NUM_NAMES_SHOWN])
    rest = len(ordered) - NUM_NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown

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
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from torchtitan_lite.checkpoint.agreement import agree
from torchtitan_lite.checkpoint.state import BEGINS_ANEW, State, part_of
from torchtitan_lite.config import ConfigError

logger = logging.getLogger(__name__)

NUM_NAMES_SHOWN = 5


def what_to_load(
    folder: Path,
    state: Mapping[str, Tensor],
    exclude: Collection[str],
    *,
    group: dist.ProcessGroup,
) -> State:
    """`state` without the parts in `exclude`, once `folder` is known to hold just that.

    Raises ConfigError, on all ranks, that lists the tensors which the checkpoint lacks, which have
    another shape there, and weights there that no rank wants. Other tensors that nobody wants are
    a warning, and so are those that begin anew where they are not there. A collective.
    """
    wanted = {key: tensor for key, tensor in state.items() if part_of(key) not in exclude}
    stored: dict[str, Any] = {}
    anew: list[str] = []

    def compare() -> tuple[set[str], set[str], bytes]:
        stored.update(FileSystemReader(folder).read_metadata().state_dict_metadata)
        for key in [key for key in wanted if key.startswith(BEGINS_ANEW)]:
            if key not in stored or stored[key].size != wanted[key].shape:
                anew.append(key)
                del wanted[key]
        shapes = {
            f"{key} {list(stored[key].size)} there, {list(tensor.shape)} here"
            for key, tensor in wanted.items()
            if key in stored and stored[key].size != tensor.shape
        }
        # A byte a name: a thousand ranks that send names would send gigabytes.
        return wanted.keys() - stored.keys(), shapes, bytes(key in wanted for key in sorted(stored))

    missing_on, shapes_on, used_by = zip(
        *agree(compare, doing=f"comparing with {folder}", group=group), strict=True
    )
    unused = [
        key
        for key, *uses in zip(sorted(stored), *used_by, strict=True)
        if not any(uses) and part_of(key) not in exclude
    ]
    differences = {
        "missing there": set().union(*missing_on),
        "not in this model": {key for key in unused if part_of(key) == "model"},
        "of another shape": set().union(*shapes_on),
    }
    if any(differences.values()):
        title = "checkpoint of another optimizer or trainer"
        fix = "leave the part out with checkpoint.exclude_from_loading, or set optimizer as there"
        if any(part_of(name) == "model" for names in differences.values() for name in names):
            title = "checkpoint of another model"
            fix = "set model.flavor and model.overrides as in the run that wrote it"
        raise ConfigError(f"{title}: {folder}: {listed(differences)}; {fix}")
    if anew:
        logger.warning("%s: not there as here, begins anew: %s", folder, shortened(anew))
    if unused:
        logger.warning("%s: not used by this run: %s", folder, shortened(unused))
    return wanted


def model_changes(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """In which settings a saved model is another one than ours; empty if in none.

    A setting that the writer did not know stands at what it was before there was a choice.
    """
    changed = [name for name in ours if name in saved and saved[name] != ours[name]]
    return ", ".join(f"{name} {saved[name]!r}, not {ours[name]!r}" for name in changed)


def listed(differences: Mapping[str, Collection[str]], limit: int | None = NUM_NAMES_SHOWN) -> str:
    """Names by what is wrong with them, as one line; `limit` of each kind, None: all."""
    return "; ".join(
        f"{len(names)} {what} ({shortened(names, limit)})"
        for what, names in differences.items()
        if names
    )


def shortened(names: Iterable[str], limit: int | None = NUM_NAMES_SHOWN) -> str:
    """The first of `names`, sorted, and how many more there are; `limit` None: all."""
    ordered = sorted(names)
    shown = ordered[:limit]
    rest = len(ordered) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")

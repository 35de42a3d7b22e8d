"""A step folder counts only with its manifest.

DCP writes one file a rank and an index, and knows nothing of damage: a flipped bit in a file of it
loads silently. So each save goes through three states, and a crash in any of them leaves either
nothing that counts or a whole checkpoint:

    step-8.tmp/   __0_0.distcp  __1_0.distcp  .metadata                  DCP has written
    step-8.tmp/   __0_0.distcp  __1_0.distcp  .metadata  manifest.json   all hashed, all on disk
    step-8/       the same, renamed: from here on it counts

The manifest holds size and SHA-256 of each file, and a hash of itself. Removal goes the other
way: the manifest first, then the rest. No finished folder is ever written into.

Proven in tests/checkpoint/test_manifest.py (damage of each file) and test_crash.py (a rank killed
at each point).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
# Large enough that hashing is not bound by system calls.
HASH_BLOCK_BYTES = 1 << 22
_STEP_FOLDER = re.compile(r"step-(\d+)(\.tmp)?")


class FileRecord(TypedDict):
    """What a file of a checkpoint must look like: bytes and hexadecimal SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a finished step folder says about itself."""

    step: int
    model_only: bool
    files: dict[str, FileRecord]
    # The model's configuration: tensors of equal shapes may be of another model.
    model: dict[str, Any] = field(default_factory=dict)
    hf_assets_path: str = ""  # folder of the run's tokenizer
    torch_version: str = version("torch")
    format_version: int = FORMAT_VERSION


def step_folder(root: Path, step: int) -> Path:
    """The folder of `step`, there or not."""
    return root / f"step-{step}"


def temporary_folder(root: Path, step: int) -> Path:
    """The folder in which `step` is written until it is complete; it never counts."""
    return root / f"step-{step}.tmp"


def list_steps(root: Path) -> tuple[list[int], list[tuple[int, Path]]]:
    """(steps that count, step and folder of those that do not), ascending.

    A step counts if its folder holds a manifest; damage shows only in `verify`. The others are
    saves or removals that were cut short.
    """
    counted, others = [], []
    for folder in root.glob("step-*"):
        match = _STEP_FOLDER.fullmatch(folder.name)
        if match and folder.is_dir():
            if match[2] is None and (folder / MANIFEST).is_file():
                counted.append(int(match[1]))
            else:
                others.append((int(match[1]), folder))
    return sorted(counted), sorted(others)


def measure(path: Path) -> FileRecord:
    """Size and hash of a file, read back from it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
        return {"size": file.tell(), "sha256": digest.hexdigest()}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the last file of `folder` and bring it and the folder's entries to disk.

    Raises ValueError when the folder holds a file that no rank has measured: someone else writes
    there too.
    """
    strange = {entry.name for entry in folder.iterdir()} - set(manifest.files)
    if strange:
        raise ValueError(f"{folder}: no rank wrote these files: {', '.join(sorted(strange))}")
    content = asdict(manifest)
    with (folder / MANIFEST).open("w") as file:
        json.dump({**content, "manifest_sha256": _hash_of(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`. Raises ValueError with the reason when it is damaged."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
        expected = content.pop("manifest_sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{MANIFEST}: not readable ({error})") from None
    if _hash_of(content) != expected:
        raise ValueError(f"{MANIFEST}: its content does not have the hash that it states")
    if content["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{MANIFEST}: format {content['format_version']}, this program reads {FORMAT_VERSION}"
        )
    return Manifest(**content)


def _hash_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def verify(
    folder: Path, *, rank: int = 0, world_size: int = 1, sizes_only: bool = False
) -> list[str]:
    """What is wrong with `folder`, one line a file, naming it; empty when all is well.

    Of `world_size` ranks each reads its share of the files: join the lists of all ranks.
    `sizes_only` reads none of them, and sees no flipped byte.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    problems = []
    if folder.name.startswith("step-") and folder.name != f"step-{manifest.step}":
        problems.append(f"{MANIFEST}: it is the manifest of step {manifest.step}")
    # Dealt out from the largest on, so that the ranks' shares of the bytes are about equal.
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name]["size"], name))
    for name in by_size[rank::world_size]:
        expected = manifest.files[name]
        try:
            size = (folder / name).stat().st_size
            if size != expected["size"]:
                problems.append(f"{name}: {size} bytes instead of {expected['size']}")
            elif not sizes_only and measure(folder / name) != expected:
                problems.append(f"{name}: its bytes are not those that were written (SHA-256)")
        except OSError as error:
            problems.append(f"{name}: cannot be read ({error.strerror})")
    return problems


def publish(root: Path, step: int) -> None:
    """Make the finished temporary folder of `step` count, in place of a damaged one if need be."""
    remove(step_folder(root, step))
    os.rename(temporary_folder(root, step), step_folder(root, step))
    sync(root)


def remove(folder: Path) -> None:
    """Remove `folder` if it is there, its manifest first: cut short, it leaves nothing counted."""
    if folder.exists():
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)


def prune(
    root: Path, *, keep_latest_k: int, saved_step: int, damaged: Collection[int] = ()
) -> list[str]:
    """Remove what is older than the newest `keep_latest_k` whole checkpoints (0: nothing).

    Returns the names removed. What counts is what the disk holds, not what this run has written.
    `saved_step` has just been hashed and always stays, so the newest valid one does too; the
    others are judged by their manifest and file sizes, since reading them all at each save would
    cost more than the save, and by `damaged`, the steps whose hash failed at load. A damaged one
    newer than the oldest kept stays, for whoever looks into it. Of folders that do not count, those
    up to `saved_step` go.
    """
    if keep_latest_k == 0:
        return []
    counted, others = list_steps(root)
    doomed = [folder for step, folder in others if step <= saved_step]
    num_kept = 0
    for step in reversed(counted):
        folder = step_folder(root, step)
        if num_kept >= keep_latest_k and step != saved_step:
            doomed.append(folder)
        elif step == saved_step or not (step in damaged or verify(folder, sizes_only=True)):
            num_kept += 1
    for folder in doomed:
        remove(folder)
    return sorted(folder.name for folder in doomed)


def sync(path: Path) -> None:
    """Bring a file, or the entries of a folder, to disk: power cuts lose unsynced renames too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

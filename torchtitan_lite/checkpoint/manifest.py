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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
# Large enough that hashing is not bound by system calls.
HASH_BLOCK_BYTES = 1 << 22
_STEP_FOLDER = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"step-(\d+)(\.tmp|\.damaged)?")


@dataclass(frozen=True)
class FileRecord:
    """What a file of a checkpoint must look like: bytes and hexadecimal SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a finished step folder says about itself."""

    step: int
    model_only: bool
    files: dict[str, FileRecord]
    torch_version: str = torch.__version__
    format_version: int = FORMAT_VERSION


def step_folder(root: Path, step: int) -> Path:
    """The folder of `step`, there or not."""
    return root / f"step-{step}"


def temporary_folder(root: Path, step: int) -> Path:
    """The folder in which `step` is written until it is complete; it never counts."""
    return root / f"step-{step}.tmp"


def counted_steps(root: Path) -> list[int]:
    """Steps whose folder holds a manifest, ascending; damage shows only in `verify`."""
    return [step for step in _steps(root) if (step_folder(root, step) / MANIFEST).is_file()]


def uncounted_steps(root: Path) -> list[int]:
    """Steps whose folder has no manifest (a removal that was cut short, a lost file), ascending."""
    return [step for step in _steps(root) if not (step_folder(root, step) / MANIFEST).is_file()]


def _steps(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    matches = (_STEP_FOLDER.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir())
    return sorted(int(match.group(1)) for match in matches if match)


def measure(folder: Path, names: list[str]) -> dict[str, FileRecord]:
    """Size and hash of each of `names` in `folder`, read back from it."""
    return {name: _record(folder / name) for name in names}


def _record(path: Path) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


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
    _sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`. Raises ValueError with the reason when it is damaged."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
        expected = content.pop("manifest_sha256")
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST}: missing") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{MANIFEST}: not readable ({error})") from None
    if _hash_of(content) != expected:
        raise ValueError(f"{MANIFEST}: its content does not have the hash that it states")
    if content["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{MANIFEST}: format {content['format_version']}, this program reads {FORMAT_VERSION}"
        )
    files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
    return Manifest(files=files, **content)


def _hash_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def verify(folder: Path, *, rank: int = 0, world_size: int = 1) -> list[str]:
    """What is wrong with `folder`, one line a file, naming it; empty when all is well.

    Of `world_size` ranks each reads its share of the files: join the lists of all ranks.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    problems = []
    if folder.name.startswith("step-") and folder.name != f"step-{manifest.step}":
        problems.append(f"{MANIFEST}: it is the manifest of step {manifest.step}")
    # Dealt out from the largest on, so that the ranks' shares of the bytes are about equal.
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    for name in by_size[rank::world_size]:
        problem = _problem(folder / name, manifest.files[name])
        if problem:
            problems.append(f"{name}: {problem}")
    return problems


def _problem(path: Path, expected: FileRecord) -> str | None:
    problem = _size_problem(path, expected)
    if problem:
        return problem
    try:
        found = _record(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if found == expected else "its bytes are not those that were written (SHA-256)"


def _size_problem(path: Path, expected: FileRecord) -> str | None:
    if not path.is_file():
        return "missing"
    size = path.stat().st_size
    return None if size == expected.size else f"{size} bytes instead of {expected.size}"


def publish(root: Path, step: int) -> None:
    """Make the finished temporary folder of `step` count.

    A damaged folder of the same step steps aside for it and is removed only afterwards.
    """
    final, aside = step_folder(root, step), root / f"step-{step}.damaged"
    replaces = final.exists()
    if replaces:
        remove(aside)
        os.rename(final, aside)
    os.rename(temporary_folder(root, step), final)
    _sync_folder(root)
    if replaces:
        remove(aside)


def remove(folder: Path) -> None:
    """Remove `folder` if it is there, its manifest first: cut short, it leaves nothing counted."""
    if folder.is_dir():
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


def prune(root: Path, *, keep_latest_k: int, saved_step: int) -> list[str]:
    """Remove what is older than the newest `keep_latest_k` whole checkpoints (0: nothing).

    Returns the names removed. What counts is what the disk holds, not what this run has written.
    `saved_step` has just been hashed and always stays, so the newest valid one does too; the
    others are judged by their manifest and file sizes, since reading them all at each save would
    cost more than the save. A damaged one newer than the oldest kept stays, for whoever looks
    into it. Of folders that do not count, those up to `saved_step` go.
    """
    if keep_latest_k == 0 or not root.is_dir():
        return []
    doomed = []
    kept = 0
    for step in reversed(counted_steps(root)):
        if kept == keep_latest_k and step != saved_step:
            doomed.append(step_folder(root, step))
        elif step == saved_step or _looks_whole(step_folder(root, step)):
            kept = min(kept + 1, keep_latest_k)
    for entry in root.iterdir():
        match = _LEFTOVER.fullmatch(entry.name)
        counts = match and match.group(2) is None and (entry / MANIFEST).is_file()
        if match and not counts and int(match.group(1)) <= saved_step:
            doomed.append(entry)
    for folder in doomed:
        remove(folder)
    return sorted(folder.name for folder in doomed)


def resumable_steps(root: Path) -> list[int]:
    """Steps that a run could resume from, ascending, judged by manifest and file sizes."""
    folders = [(step, step_folder(root, step)) for step in counted_steps(root)]
    return [
        step
        for step, folder in folders
        if _looks_whole(folder) and not read_manifest(folder).model_only
    ]


def _looks_whole(folder: Path) -> bool:
    try:
        files = read_manifest(folder).files
    except ValueError:
        return False
    return not any(_size_problem(folder / name, record) for name, record in files.items())


def _sync_folder(folder: Path) -> None:
    """Bring the entries of `folder` to disk: a renamed file can be lost in a power cut without."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

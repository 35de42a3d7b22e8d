"""Hugging Face folders, from and into the shards of any mesh, without a gather.

A region (models/families/family.py) says that a block of one of our parameters holds the same
numbers as a block of a tensor on disk. A rank holds a box of each parameter. Where the box meets a
region lies a piece, and pieces are all that moves:

    our k_proj.weight, rows cut in two         on disk q, k and v are fused and transposed
                in                                         out of q    of k    of v
           +----------+                                  +----------+---+---+----------+
    rank 0 |  piece   |   region: the whole,          in |          | p |   |          |
           +----------+   transposed, columns of k       |          | p |   |          |
    rank 1 |          |                                  +----------+---+---+----------+
           +----------+

To read, a rank takes its pieces out of the files. To write, rank 0 lays out the files and writes
their headers, then every rank puts its pieces in place: each number is written once. The folder is
called `<name>.tmp` until it is whole. Ranks on several nodes need a file system on which many may
write into one file.

Why not torch's HuggingFaceStorageReader and Writer: a name there is one tensor of one shape, so
nothing can be fused, transposed or padded; the writer writes everything twice, as shards and then
consolidated; the reader takes each safetensors file of a folder, whether the index names it or
not, and keeps it mapped while it reads from it, so columns cost the memory of the whole file.

Proven in tests/checkpoint/test_hugging_face.py.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, product
from math import prod
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.agreement import agree, on_first_rank
from torchtitan_lite.checkpoint.compare import listed, shortened
from torchtitan_lite.checkpoint.manifest import sync
from torchtitan_lite.config import ConfigError
from torchtitan_lite.models.families.family import Box, Region

State = Mapping[str, Tensor]  # parameters of this rank by name
Regions = Mapping[str, Sequence[Region]]  # of each parameter
Shape = tuple[int, ...]
# Tensor to write -> file, its first byte there, shape, dtype
Slots = dict[str, tuple[str, int, Shape, torch.dtype]]

INDEX = "model.safetensors.index.json"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
READABLE_DTYPES = {"F64", *DTYPES.values()}
MAX_SHARD_BYTES = 5 * 10**9  # a broken upload or download costs one file


class Stored(NamedTuple):
    """A tensor in a safetensors file."""

    path: Path
    key: str  # its name there
    shape: Shape
    dtype: str  # F32, BF16, ...


def read_index(folder: Path, *, key: str) -> dict[str, Stored]:
    """The tensors of a Hugging Face folder by name; only headers are read.

    They are those that model.safetensors.index.json names, else those of model.safetensors, else
    of the only other safetensors file. Raises ConfigError, which begins with `key` (the option and
    its value), when files or tensors are missing or damaged.
    """
    index = folder / INDEX
    if not index.is_file():
        return _read_header(_single_file(folder, key), key)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        path_of = {name: folder / file for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{key}: {index} has no weight_map to read ({error!r})") from error
    missing = {path.name for path in path_of.values() if not path.is_file()}
    if missing:
        raise ConfigError(f"{key}: {index} names files that are missing: {shortened(missing)}")
    headers = {path: _read_header(path, key) for path in set(path_of.values())}
    lacking = [f"{name} in {path}" for name, path in path_of.items() if name not in headers[path]]
    if lacking:
        raise ConfigError(f"{key}: {index} names tensors that are missing: {shortened(lacking)}")
    return {name: headers[path][name] for name, path in path_of.items()}


def _single_file(folder: Path, key: str) -> Path:
    if (folder / "model.safetensors").is_file():
        return folder / "model.safetensors"
    found = list(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    pickled = [*folder.glob("*.bin"), *folder.glob("*.pth")]
    names = shortened(path.name for path in found or pickled)
    reason = "no safetensors files" if folder.is_dir() else "no such folder"
    if found:
        reason = f"no {INDEX} says which of {names} to read"
    elif pickled:
        reason += f", only {names}: load it with transformers and save it with save_pretrained"
    raise ConfigError(f"{key}: {reason}")


def _read_header(path: Path, key: str) -> dict[str, Stored]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{key}: {path} is no whole safetensors file ({error})") from error
    return {name: Stored(path, name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices}


def check_tensors(
    stored: Mapping[str, Stored],
    regions: Regions,
    *,
    key: str,
    prefix: str = "",
    ignorable: Collection[str] = (),
) -> dict[str, Stored]:
    """`stored` by full names, once it is known to hold what `regions`, of the whole model, name.

    Where no name in the folder begins with `prefix`, all lack it. Raises ConfigError, which begins
    with `key` and lists tensors that are missing, that this model lacks and no shell pattern in
    `ignorable` allows, of another shape, and of a type that cannot be cast (quantised ones).
    """
    if not any(name.startswith(prefix) for name in stored):
        stored = {prefix + name: tensor for name, tensor in stored.items()}
    shapes = _shapes(regions)
    wanted = {name: tensor for name, tensor in stored.items() if name in shapes}
    ignored = {name for pattern in ignorable for name in fnmatch.filter(stored, pattern)}
    differences = {
        "missing there": shapes.keys() - stored.keys(),
        "not in this model": {stored[name].key for name in stored.keys() - shapes.keys() - ignored},
        "of another shape": {
            f"{name} {list(tensor.shape)} there, {list(shapes[name])} here"
            for name, tensor in wanted.items()
            if tensor.shape != shapes[name]
        },
        "of a type that is not read": {
            f"{name} {dtype}"
            for name, (*_, dtype) in wanted.items()
            if dtype not in READABLE_DTYPES
        },
    }
    if any(differences.values()):
        raise ConfigError(
            f"{key}: tensors of another model: {listed(differences, None)}; the folder must hold "
            "the model that the configuration describes, not quantised"
        )
    return dict(stored)


def _shapes(regions: Regions) -> dict[str, Shape]:
    """The shape of each tensor on disk: the regions cover it whole."""
    shapes: dict[str, Shape] = {}
    for region in chain.from_iterable(regions.values()):
        stops = tuple(block.stop for block in region.theirs)
        shapes[region.tensor] = tuple(map(max, stops, shapes.get(region.tensor, stops)))
    return shapes


@torch.no_grad()
def read_tensors(stored: Mapping[str, Stored], state: State, regions: Regions) -> None:
    """Fill `state` (on any device and mesh) in place, cast to its dtypes.

    `stored` is from `check_tensors`. What no region covers (rows that pad the vocabulary) becomes
    zero. No collective: each rank reads its pieces.
    """
    for name, parameter in state.items():
        _local_shard(parameter)[0].zero_()
        for tensor, box, piece in _pieces(parameter, regions[name]):
            # Opened for each piece: the pages of a mapped file that were read count as memory of
            # this process until it is closed.
            with safe_open(stored[tensor].path, framework="pt") as file:
                piece.copy_(file.get_slice(stored[tensor].key)[box])


def _local_shard(parameter: Tensor) -> tuple[Tensor, Shape]:
    """This rank's box of `parameter`: its numbers, and where in the whole it begins."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    (chunk,), local = parameter.__create_chunk_list__(), parameter.to_local()
    assert local.shape == chunk.sizes, (local.shape, chunk.sizes)
    return local, tuple(chunk.offsets)


def _pieces(parameter: Tensor, regions: Sequence[Region]) -> Iterator[tuple[str, Box, Tensor]]:
    """Each piece of this rank: tensor on disk, box in it, view of the local shard in its shape."""
    local, offsets = _local_shard(parameter)
    for region in regions:
        ours = [  # in the coordinates of the local shard
            slice(max(block.start - offset, 0), min(block.stop - offset, size))
            for block, offset, size in zip(region.ours, offsets, local.shape, strict=True)
        ]
        if any(cut.start >= cut.stop for cut in ours):
            continue
        # A dimension of size one is never cut, and may be on one side only. The others pair up.
        cuts = [
            (cut.start + offset - block.start, cut.stop + offset - block.start)
            for cut, offset, block in zip(ours, offsets, region.ours, strict=True)
            if block.stop - block.start > 1
        ]
        order = list(range(len(region.theirs)))
        if region.transposed:
            order[-2:] = order[-1], order[-2]
        theirs = [region.theirs[dim] for dim in order]
        wide = [dim for dim, block in enumerate(theirs) if block.stop - block.start > 1]
        for dim, (start, stop) in zip(wide, cuts, strict=True):
            theirs[dim] = slice(theirs[dim].start + start, theirs[dim].start + stop)
        piece = local[tuple(ours)].view([block.stop - block.start for block in theirs])
        yield region.tensor, tuple(theirs[dim] for dim in order), piece.permute(order)


def write_folder(
    folder: Path,
    state: State,
    regions: Regions,
    *,
    dtype: torch.dtype,
    files: Mapping[str, str | bytes | Path],
    group: dist.ProcessGroup,
    exact: Collection[str] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write what all ranks of `group` hold as safetensors in `dtype`, with index and `files`.

    A collective of `group`, which must carry CPU tensors. `state` has this rank's parameters;
    those that `exact` names are written in fp32, before all others, so that each begins aligned;
    `regions` are of the whole model, the same on all ranks, in the order of the files. `files`
    counts on rank 0: name -> content, or the file to copy. Raises on all ranks, leaving nothing,
    when any rank fails (CheckpointError) or `folder` is there and not empty (ConfigError).
    """
    temporary = folder.with_name(folder.name + ".tmp")
    in_fp32 = {name: places for name, places in regions.items() if name in exact}
    shapes, dtypes = _shapes({**in_fp32, **regions}), dict.fromkeys(_shapes(in_fp32), torch.float32)
    tensors = {name: (shape, dtypes.get(name, dtype)) for name, shape in shapes.items()}
    headers, slots = _lay_out(tensors, max_shard_bytes)
    size = sum(prod(shape) for shape, _ in tensors.values())
    num_bytes = sum(prod(shape) * kind.itemsize for shape, kind in tensors.values())
    index = {
        "metadata": {"total_size": num_bytes},
        "weight_map": {name: file for name, (file, *_) in slots.items()},
    }
    together: Any = {"doing": f"writing {folder}", "group": group}
    try:
        on_first_rank(lambda: _begin(folder, temporary, headers), **together)
        written = agree(lambda: _write(temporary, state, regions, slots), **together)
        # More is no mistake: both ends of a pipeline hold a tied embedding.
        assert sum(written) >= size, "no rank holds some of the parameters"
        content = {INDEX: json.dumps(index, indent=2), **files}
        on_first_rank(lambda: _finish(folder, temporary, content), **together)
    except Exception:
        on_first_rank(lambda: shutil.rmtree(temporary, ignore_errors=True), **together)
        raise


def _lay_out(
    tensors: Mapping[str, tuple[Shape, torch.dtype]], max_shard_bytes: int
) -> tuple[dict[str, bytes], Slots]:
    """(header of each file, place of each tensor); tensors keep their order.

    A file is the length of its header in 8 bytes, the header in JSON, the numbers:
    https://huggingface.co/docs/safetensors.
    """
    contents: list[dict[str, Any]] = [{}]
    end = 0
    for name, (shape, dtype) in tensors.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        if contents[-1] and end > max_shard_bytes:
            contents.append({})
            start, end = 0, end - start
        span = start, end
        contents[-1][name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": span}
    headers: dict[str, bytes] = {}
    slots: Slots = {}
    for number, content in enumerate(contents, start=1):
        file = f"model-{number:05d}-of-{len(contents):05d}.safetensors"
        text = json.dumps({"__metadata__": {"format": "pt"}, **content}).encode()
        text += b" " * (-len(text) % 8)  # so that the numbers are aligned
        headers[file] = len(text).to_bytes(8, "little") + text
        for name, tensor in content.items():
            slots[name] = file, len(headers[file]) + tensor["data_offsets"][0], *tensors[name]
    return headers, slots


def _begin(folder: Path, temporary: Path, headers: Mapping[str, bytes]) -> None:
    if folder.is_file() or any(folder.glob("*")):
        raise ConfigError(f"{folder} is there and not empty; name another folder or remove it")
    shutil.rmtree(temporary, ignore_errors=True)  # of an attempt that was cut short
    temporary.mkdir(parents=True)
    for name, header in headers.items():
        (temporary / name).write_bytes(header)


@torch.no_grad()
def _write(folder: Path, state: State, regions: Regions, slots: Slots) -> int:
    """Put this rank's pieces in place and on disk; returns how many numbers those are."""
    num_written, paths = 0, set()
    for name, parameter in state.items():
        if not _is_first_replica(parameter):
            continue
        for tensor, box, piece in _pieces(parameter, regions[name]):
            file_name, begin, shape, dtype = slots[tensor]
            path, starts = folder / file_name, _starts_of_runs(box, shape)
            # A copy: a view with a dimension of size one may keep a stride that bytes cannot have.
            flat = piece.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
            runs = flat.view(len(starts), -1).view(torch.uint8).numpy()
            # No mapped file: where the disk is full, writing into one kills the process.
            with open(os.open(path, os.O_WRONLY), "wb") as file:
                for start, run in zip(starts, runs, strict=True):
                    file.seek(begin + start * dtype.itemsize)
                    file.write(run)
            paths.add(path)
            num_written += piece.numel()
    for path in paths:
        sync(path)
    return num_written


def _is_first_replica(parameter: Tensor) -> bool:
    """Whether this rank is the one that writes its shard of `parameter`."""
    if not isinstance(parameter, DTensor):
        return True
    replicas = [axis for axis, p in enumerate(parameter.placements) if p.is_replicate()]
    return not any(parameter.device_mesh.get_local_rank(axis) for axis in replicas)


def _starts_of_runs(box: Box, shape: Shape) -> list[int]:
    """Where the parts of `box` that are contiguous in a tensor of `shape` begin, in elements."""
    last = len(shape) - 1
    while last > 0 and box[last] == slice(0, shape[last]):  # whole rows follow each other
        last -= 1
    strides = [prod(shape[dim + 1 :]) for dim in range(last + 1)]
    rows = product(*(range(block.start, block.stop) for block in box[:last]))
    return [sum(map(mul, (*row, box[last].start), strides)) for row in rows]


def _finish(folder: Path, temporary: Path, files: Mapping[str, str | bytes | Path]) -> None:
    """Add `files`, bring all to disk, and give the folder its name."""
    for name, content in files.items():
        if isinstance(content, Path):
            content = content.read_bytes()
        (temporary / name).write_bytes(content.encode() if isinstance(content, str) else content)
    for path in (*temporary.iterdir(), temporary):
        sync(path)
    os.rename(temporary, folder)
    sync(folder.parent)

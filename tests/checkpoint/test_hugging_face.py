"""Hugging Face folders: any mesh writes the same bytes, and any mesh reads them back bit by bit."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.checkpoint.worlds import draw, mesh_of
from tests.world import run_ranks
from torchtitan_lite.checkpoint import hugging_face
from torchtitan_lite.checkpoint.agreement import CheckpointError
from torchtitan_lite.checkpoint.hugging_face import (
    INDEX,
    Stored,
    check_tensors,
    read_index,
    read_tensors,
    write_folder,
)
from torchtitan_lite.config import ConfigError
from torchtitan_lite.models.families.family import Region

ROOT = Path(__file__).parents[2]
KEY = "checkpoint.initial_load_path = 'x'"
Tensors = dict[str, Tensor]
Axes = dict[str, int] | None


# --- a model with every kind of region --------------------------------------------------------

VOCABULARY, EXPERTS = 10, 4  # 2 rows pad the vocabulary
ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()
# Whole shape, and how a rank of tp holds it. 5 rows of `up` a tp rank are an uneven shard on
# fsdp, and 3 rows of `odd` leave a rank without any.
PARAMETERS: dict[str, tuple[tuple[int, ...], Any]] = {
    "embed.weight": ((12, 8), ROWS),
    "q.weight": ((8, 8), ROWS),
    "k.weight": ((4, 8), ROWS),
    "v.weight": ((4, 8), ROWS),
    "q.bias": ((8,), ROWS),
    "k.bias": ((4,), ROWS),
    "v.bias": ((4,), ROWS),
    "out.weight": ((8, 8), COLUMNS),
    "up.weight": ((10, 8), ROWS),
    "down.weight": ((8, 10), COLUMNS),
    "conv.weight": ((8, 4), ROWS),
    "experts_up.weight": ((EXPERTS, 6, 8), ROWS),
    "experts_down.weight": ((EXPERTS, 8, 6), ROWS),
    "odd.weight": ((3, 8), WHOLE),
    "norm.weight": ((8,), WHOLE),
}
MESHES: dict[str, Axes] = {
    "one process": None,
    "fsdp 2": {"fsdp": 2},
    "tp 2": {"tp": 2},
    "fsdp 4": {"fsdp": 4},
    "tp 4": {"tp": 4},
    "fsdp 2 x tp 2": {"fsdp": 2, "tp": 2},
    "replicate 2 x fsdp 2": {"dp_replicate": 2, "fsdp": 2},
    "replicate 2 x fsdp 1 x tp 2": {"dp_replicate": 2, "fsdp": 1, "tp": 2},
}


def box(*spans: int | tuple[int, int]) -> tuple[slice, ...]:
    """One slice a dimension: a size, or where it starts and stops."""
    return tuple(slice(0, span) if isinstance(span, int) else slice(*span) for span in spans)


def one(name: str, shape: Sequence[int], *, transposed: bool = False) -> list[Region]:
    theirs = [*shape[:-2], shape[-1], shape[-2]] if transposed else shape
    return [Region(name, box(*theirs), box(*shape), transposed)]


REGIONS: dict[str, Sequence[Region]] = {
    "embed.weight": [Region("wte.weight", box(VOCABULARY, 8), box(VOCABULARY, 8))],
    **{
        f"{name}.weight": [Region("attn.weight", box(8, columns), box(rows, 8), True)]
        for name, rows, columns in [("v", 4, (12, 16)), ("q", 8, (0, 8)), ("k", 4, (8, 12))]
    },
    **{
        f"{name}.bias": [Region("attn.bias", box(rows), box(rows[1] - rows[0]))]
        for name, rows in [("q", (0, 8)), ("k", (8, 12)), ("v", (12, 16))]
    },
    "out.weight": one("out.weight", (8, 8)),
    "up.weight": one("mlp.up.weight", (10, 8)),
    "down.weight": one("mlp.down.weight", (8, 10), transposed=True),
    "conv.weight": [Region("conv.weight", box(8, 1, 4), box(8, 4))],
    "experts_up.weight": [
        Region(f"experts.{e}.up.weight", box(6, 8), box((e, e + 1), 6, 8)) for e in range(EXPERTS)
    ],
    "experts_down.weight": [
        Region(f"experts.{e}.down.weight", box(6, 8), box((e, e + 1), 8, 6), True)
        for e in range(EXPERTS)
    ],
    "odd.weight": one("odd.weight", (3, 8)),
    "norm.weight": one("norm.weight", (8,)),
}


def on_disk(ours: Mapping[str, Tensor]) -> Tensors:
    """What the regions say, in torch's words."""
    return {
        "wte.weight": ours["embed.weight"][:VOCABULARY],
        "attn.weight": torch.cat([ours[f"{name}.weight"] for name in "qkv"]).T,
        "attn.bias": torch.cat([ours[f"{name}.bias"] for name in "qkv"]),
        "out.weight": ours["out.weight"],
        "mlp.up.weight": ours["up.weight"],
        "mlp.down.weight": ours["down.weight"].T,
        "conv.weight": ours["conv.weight"][:, None],
        **{f"experts.{e}.up.weight": ours["experts_up.weight"][e] for e in range(EXPERTS)},
        **{f"experts.{e}.down.weight": ours["experts_down.weight"][e].T for e in range(EXPERTS)},
        "odd.weight": ours["odd.weight"],
        "norm.weight": ours["norm.weight"],
    }


def whole(dtype: torch.dtype = torch.float32) -> Tensors:
    return {name: draw(name, shape).to(dtype) for name, (shape, _) in PARAMETERS.items()}


def placed(axes: Axes, tensors: Mapping[str, Tensor]) -> Tensors:
    """This rank's parameters: tp by hand as parallel/tensor.py cuts them, then fsdp over it."""
    if axes is None:
        return {name: tensor.clone() for name, tensor in tensors.items()}
    mesh, model = mesh_of(axes), nn.Module()
    for name, tensor in tensors.items():
        owner, leaf = name.split(".")
        if "tp" in axes:
            on_tp = [PARAMETERS[name][1]]
            tensor = distribute_tensor(tensor, mesh["tp"], on_tp, src_data_rank=None)
        if not hasattr(model, owner):
            model.add_module(owner, nn.Module())
        getattr(model, owner).register_parameter(leaf, nn.Parameter(tensor))
    data_axes = tuple(axis for axis in axes if axis != "tp")
    if data_axes:
        fully_shard(model, mesh=mesh[data_axes])
    return dict(model.named_parameters())


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def write(folder: Path, state: Mapping[str, Tensor], **options: Any) -> None:
    options = {"dtype": torch.float32, "files": {"config.json": "{}"}, **options}
    write_folder(folder, state, REGIONS, group=world(), **options)


def read(folder: Path, state: Mapping[str, Tensor]) -> None:
    read_tensors(check_tensors(read_index(folder, key=KEY), REGIONS, key=KEY), state, REGIONS)


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> set[str]:
    """Names that are not bit for bit the same."""
    names = found.keys() & expected.keys()
    different = {
        name
        for name in names
        if found[name].dtype != expected[name].dtype or not found[name].equal(expected[name])
    }
    return different | (found.keys() ^ expected.keys())


def load(folder: Path) -> Tensors:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def meshes_of(world_size: int) -> dict[str, Axes]:
    sizes = {name: 1 for name in MESHES}
    for name, axes in MESHES.items():
        for degree in (axes or {}).values():
            sizes[name] *= degree
    return {name: MESHES[name] for name, size in sizes.items() if size == world_size}


# --- round trips ------------------------------------------------------------------------------


def _write_on_meshes(folder: Path) -> None:
    for name, axes in meshes_of(dist.get_world_size()).items():
        write(folder / name, placed(axes, whole()))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each mesh, each holding what it wrote of the same parameters."""
    folder = tmp_path_factory.mktemp("written")
    for world_size in (1, 2, 4):
        run_ranks(_write_on_meshes, world_size, folder)
    return folder


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_writes_the_same_bytes(mesh: str, written: Path) -> None:
    assert differing(load(written / mesh), on_disk(whole())) == set()
    names = {path.name for path in (written / mesh).iterdir()}
    assert names == {"model-00001-of-00001.safetensors", INDEX, "config.json"}
    for name in names:
        alone = (written / "one process" / name).read_bytes()
        assert (written / mesh / name).read_bytes() == alone, name


def _read_on_meshes(folder: Path) -> dict[str, set[str]]:
    """Into parameters of garbage, from what an unlike mesh wrote."""
    expected = whole()
    expected["embed.weight"][VOCABULARY:] = 0
    found = {}
    for name, axes in meshes_of(dist.get_world_size()).items():
        state = placed(axes, {name: tensor * float("nan") for name, tensor in whole().items()})
        read(folder, state)
        found[name] = differing(
            {name: local(tensor) for name, tensor in state.items()},
            {name: local(tensor) for name, tensor in placed(axes, expected).items()},
        )
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_mesh_reads_its_own_shards_bit_by_bit_and_zeros_as_padding(
    world_size: int, written: Path
) -> None:
    meshes = run_ranks(_read_on_meshes, world_size, written / "fsdp 2 x tp 2")
    assert all(found == dict.fromkeys(meshes_of(world_size), set()) for found in meshes)


def _cast(folder: Path) -> dict[str, set[str]]:
    """{direction: what differs from torch's own cast}."""
    axes, found = {"fsdp": 2}, {}
    for stored, ours in [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
    ]:
        name = f"{stored} {ours}"
        write(folder / name, placed(axes, whole(ours)), dtype=stored)
        found[f"write {name}"] = differing(
            load(folder / name), {k: v.to(stored) for k, v in on_disk(whole(ours)).items()}
        )
        state = placed(axes, whole(ours))
        expected = {k: local(v).to(stored).to(ours) for k, v in state.items()}
        read(folder / name, state)
        del state["embed.weight"], expected["embed.weight"]  # the padding
        found[f"read {name}"] = differing({k: local(v) for k, v in state.items()}, expected)
    return found


def test_numbers_are_cast_as_torch_casts(tmp_path: Path) -> None:
    for found in run_ranks(_cast, 2, tmp_path):
        assert len(found) == 6 and not any(found.values()), found


def test_a_file_of_doubles_is_read(tmp_path: Path) -> None:
    tensors = {name: tensor.double().contiguous() for name, tensor in on_disk(whole()).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    state = {name: torch.empty_like(tensor) for name, tensor in whole().items()}
    read(tmp_path, state)
    assert differing(on_disk(state), on_disk(whole())) == set()


def _several_files(folder: Path) -> None:
    write(folder, placed({"fsdp": 2}, whole()), max_shard_bytes=600)


def test_large_models_are_cut_into_files_that_the_index_names(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "on" / "the way"
    run_ranks(_several_files, 2, folder)
    index, expected = json.loads((folder / INDEX).read_text()), on_disk(whole())
    in_order = dict.fromkeys(region.tensor for blocks in REGIONS.values() for region in blocks)
    assert list(index["weight_map"]) == list(in_order)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    numbers = range(1, len(files) + 1)
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in numbers]
    assert len(files) > 3 and list(dict.fromkeys(index["weight_map"].values())) == files
    for file in files:
        tensors = load_file(folder / file)
        assert set(tensors) == {name for name, at in index["weight_map"].items() if at == file}
        assert sum(t.nbytes for t in tensors.values()) <= 600 or len(tensors) == 1
        assert int.from_bytes((folder / file).read_bytes()[:8], "little") % 8 == 0
        with safe_open(folder / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert differing(load(folder), expected) == set()
    state = {name: torch.empty_like(tensor) for name, tensor in whole().items()}
    read(folder, state)
    assert differing(on_disk(state), expected) == set()


# --- who writes what --------------------------------------------------------------------------


def _perturbed(folder: Path) -> list[set[str]]:
    """Which tensors on disk change with one number of each parameter, on one rank that has any."""
    axes, found = {"fsdp": 2, "tp": 2}, []
    hugging_face.sync = lambda path: None  # the disk is not what is tested here, but slow
    for name in PARAMETERS:
        state = placed(axes, whole())
        if dist.get_rank() == 0:
            with torch.no_grad():
                local(state[name]).view(-1)[-1].add_(1)
        write(folder / name, state)
        found.append(differing(load(folder / name), on_disk(whole())))
    return found


def test_a_changed_number_changes_the_tensor_that_its_region_names_and_no_other(
    tmp_path: Path,
) -> None:
    found = run_ranks(_perturbed, 4, tmp_path)[0]
    # Rank 0 of 4 has expert 0.
    assert found == [{REGIONS[name][0].tensor} for name in PARAMETERS]


def _perturbed_replicas(folder: Path) -> set[str]:
    state = placed({"dp_replicate": 2, "fsdp": 1, "tp": 2}, whole())
    if dist.get_rank() > 0:
        with torch.no_grad():
            local(state["norm.weight"]).add_(1)
    if dist.get_rank() > 1:
        with torch.no_grad():
            local(state["up.weight"]).add_(1)
    write(folder, state)
    return differing(load(folder), on_disk(whole()))


def test_of_equal_shards_the_first_rank_writes_alone(tmp_path: Path) -> None:
    assert run_ranks(_perturbed_replicas, 4, tmp_path / "x")[0] == set()


def _stages(folder: Path) -> set[str]:
    """Plain tensors, half of them on each rank, an embedding on both."""
    names = list(PARAMETERS)
    mine = {*names[dist.get_rank() :: 2], "embed.weight"}
    write(folder / "whole", {name: tensor for name, tensor in whole().items() if name in mine})
    state = {name: torch.empty_like(whole()[name]) for name in mine}
    read(folder / "whole", state)
    state["embed.weight"][VOCABULARY:] = whole()["embed.weight"][VOCABULARY:]
    with pytest.raises(AssertionError, match="no rank holds some"):
        write(folder / "lacking", {name: whole()[name] for name in mine - {"embed.weight"}})
    return differing(state, {name: whole()[name] for name in state})


def test_pipeline_stages_write_and_read_what_each_of_them_holds(tmp_path: Path) -> None:
    assert run_ranks(_stages, 2, tmp_path) == [set(), set()]
    assert differing(load(tmp_path / "whole"), on_disk(whole())) == set()
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


# --- nothing half-written ---------------------------------------------------------------------


def _failures(folder: Path) -> list[str]:
    state, rank, messages = placed({"fsdp": 2}, whole()), dist.get_rank(), []
    write_pieces = hugging_face._write

    def full_disk(*args: Any) -> int:
        written = write_pieces(*args)
        if rank == 1:
            raise OSError(28, "No space left on device")
        return written

    full, busy = folder / "full", folder / "busy"
    for path, patch, options in [
        (full, full_disk, {}),
        (full, write_pieces, {"files": {"tokenizer.json": folder / "absent"}}),
        (busy, write_pieces, {}),
        (busy / "file", write_pieces, {}),
    ]:
        hugging_face._write = patch  # type: ignore[assignment]
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            write(path, state, **options)
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    return messages


def test_a_failure_on_any_rank_is_told_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "file").write_text("mine")
    first, second = run_ranks(_failures, 2, tmp_path)
    assert first == second
    full, no_tokenizer, busy, file = first
    assert full.startswith(f"CheckpointError: writing {tmp_path / 'full'}: rank 1: OSError: ")
    assert "No space left" in full
    assert no_tokenizer.startswith("CheckpointError: ") and "absent" in no_tokenizer
    for message, path in [(busy, tmp_path / "busy"), (file, tmp_path / "busy" / "file")]:
        assert message.startswith(f"ConfigError: {path} is there and not empty; ")
    assert [path.name for path in tmp_path.rglob("*")] == ["busy", "file"]
    assert (tmp_path / "busy" / "file").read_text() == "mine"


def _write_after_a_crash(folder: Path) -> None:
    tokenizer = folder.parent / "tokenizer.json"
    files = {"config.json": "é", "a.bin": b"\xff", "tokenizer.json": tokenizer}
    write(folder, placed({"fsdp": 2}, whole()), files=files)


def test_an_empty_folder_and_the_rest_of_a_crash_are_no_obstacle(tmp_path: Path) -> None:
    folder, rest = tmp_path / "x", tmp_path / "x.tmp"
    folder.mkdir()
    rest.mkdir()
    (rest / "model-00001-of-00099.safetensors").write_text("half")
    (tmp_path / "tokenizer.json").write_text("copied")
    run_ranks(_write_after_a_crash, 2, folder)
    assert differing(load(folder), on_disk(whole())) == set() and not rest.exists()
    assert (folder / "config.json").read_text(encoding="utf-8") == "é"
    assert (folder / "a.bin").read_bytes() == b"\xff"
    assert (folder / "tokenizer.json").read_text() == "copied"


# --- what is refused --------------------------------------------------------------------------

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _two_files(folder: Path, index: str = "") -> None:
    save_file({"a": torch.ones(4)}, folder / A)
    save_file({"b": torch.ones(4)}, folder / B)
    (folder / INDEX).write_text(index or json.dumps({"weight_map": {"a": A, "b": B}}))


def _truncated(folder: Path) -> None:
    _two_files(folder)
    os.truncate(folder / B, (folder / B).stat().st_size - 1)


def _without_files(folder: Path) -> None:
    _two_files(folder)
    for name in (A, B):
        os.remove(folder / name)


def _index(text: str) -> Callable[[Path], None]:
    return partial(_two_files, index=text)


def _files(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name in names:
            (folder / name).write_bytes(b"PK")

    return make


BROKEN: dict[str, tuple[Callable[[Path], Any], Sequence[str]]] = {
    "no folder": (Path.rmdir, ["no such folder"]),
    "empty": (_files(), ["no safetensors files"]),
    "pickled": (
        _files("pytorch_model.bin", "x.pth"),
        ["no safetensors files", "pytorch_model.bin, x.pth", "save_pretrained"],
    ),
    "ambiguous": (_files("a.safetensors", "b.safetensors"), [INDEX, "a.safetensors, b.safet"]),
    "no safetensors": (_files("model.safetensors"), ["/model.safetensors is no whole"]),
    "truncated": (_truncated, [f"/{B} is no whole safetensors file"]),
    "no JSON": (_index("{"), [f"/{INDEX} has no weight_map"]),
    "no map": (_index("[]"), [f"/{INDEX} has no weight_map"]),
    "strange map": (_index('{"weight_map": {"a": 1}}'), [f"/{INDEX} has no weight_map"]),
    "missing files": (
        _without_files,
        [f"/{INDEX} names files that are missing: {A}, {B}"],
    ),
    "missing tensor": (
        _index(json.dumps({"weight_map": {"a": A, "b": A, "c": B}})),
        [f"/{INDEX} names tensors that are missing: b in ", A, "c in ", B],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_one_line_that_names_the_file(case: str, tmp_path: Path) -> None:
    breaks, words = BROKEN[case]
    breaks(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_index(tmp_path, key=KEY)
    message = str(caught.value)
    assert message.startswith(f"{KEY}: ") and "\n" not in message
    assert all(word in message for word in words), message


def test_the_index_comes_before_a_single_file_and_that_before_others(tmp_path: Path) -> None:
    save_file({"c": torch.ones(2, 3, dtype=torch.bfloat16)}, tmp_path / "other.safetensors")
    other = Stored(tmp_path / "other.safetensors", "c", (2, 3), "BF16")
    assert read_index(tmp_path, key=KEY) == {"c": other}
    save_file({"d": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(read_index(tmp_path, key=KEY)) == ["d"]
    _two_files(tmp_path)
    assert list(read_index(tmp_path, key=KEY)) == ["a", "b"]


def stored(shapes: Mapping[str, tuple[int, ...]], dtype: str = "F32") -> dict[str, Stored]:
    return {name: Stored(Path("f"), name, shape, dtype) for name, shape in shapes.items()}


SHAPES = {f"m.{i}": (4, 4) for i in range(8)}
MODEL = {name: one(name, shape) for name, shape in SHAPES.items()}


def refusal(tensors: dict[str, Stored], **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_tensors(tensors, MODEL, key=KEY, **options)
    message = str(caught.value)
    assert message.startswith(f"{KEY}: ") and "\n" not in message
    return message


def test_all_differences_come_at_once_by_name() -> None:
    shapes = {name: SHAPES[name] for name in ("m.1", "m.2")} | {"m.0": (4, 5), "x": (1,), "y": ()}
    message = refusal(stored(shapes) | stored({"m.2": (4, 4)}, "F8_E4M3"), ignorable=["y*"])
    for words in [
        "5 missing there (m.3, m.4, m.5, m.6, m.7)",
        "1 not in this model (x)",
        "1 of another shape (m.0 [4, 5] there, [4, 4] here)",
        "1 of a type that is not read (m.2 F8_E4M3)",
    ]:
        assert words in message
    assert "8 missing there (m.0, m.1, m.2, m.3, m.4, m.5, m.6, m.7)" in refusal({})


def test_ignorable_tensors_of_any_type_are_no_difference() -> None:
    tensors = stored(SHAPES) | stored({"m.0.attn.bias": (1, 1, 4, 4)}, "BOOL")
    assert "m.0.attn.bias" in refusal(tensors)
    check_tensors(tensors, MODEL, key=KEY, ignorable=["*.attn.bias"])


def test_a_folder_of_the_base_model_lacks_the_prefix_in_all_names() -> None:
    tensors = stored({name.removeprefix("m."): shape for name, shape in SHAPES.items()})
    found = check_tensors(tensors, MODEL, key=KEY, prefix="m.")
    assert found == {f"m.{name}": tensor for name, tensor in tensors.items()}
    assert check_tensors(stored(SHAPES), MODEL, key=KEY, prefix="m.") == stored(SHAPES)
    some = stored({"m.0": (4, 4)}) | {name: tensors[name] for name in tensors if name != "0"}
    assert "7 missing" in refusal(some, prefix="m.")


def test_the_shape_on_disk_is_that_of_all_regions_together() -> None:
    wrong = stored({name: tuple(t.shape) for name, t in on_disk(whole()).items()})
    wrong["attn.weight"] = wrong["attn.weight"]._replace(shape=(8, 12))
    with pytest.raises(ConfigError, match=r"attn.weight \[8, 12\] there, \[8, 16\] here"):
        check_tensors(wrong, REGIONS, key=KEY)


# --- memory -----------------------------------------------------------------------------------

GB = 10**9
BIG = {"embed.weight": (64_000, 1024), **{f"{i}.weight": (4096, 1024) for i in range(44)}}
BIG_REGIONS = {name: one(name, shape) for name, shape in BIG.items()}


def _save_big(folder: Path) -> None:
    tensors = {name: torch.rand(shape) for name, shape in BIG.items()}
    save_file(tensors, folder / "model.safetensors")


def _read_big(folder: Path, axis: str) -> int:
    mesh = mesh_of({axis: 2})
    state: Tensors = {}
    for name, (rows, columns) in BIG.items():
        shape = (rows // 2, columns) if axis == "fsdp" else (rows, columns // 2)
        placement = ROWS if axis == "fsdp" else COLUMNS
        state[name] = DTensor.from_local(torch.empty(shape), mesh, [placement])
    tensors = read_index(folder, key=KEY)
    read_tensors(check_tensors(tensors, BIG_REGIONS, key=KEY), state, BIG_REGIONS)
    assert all(local(tensor).std() > 0.2 for tensor in state.values())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def print_peaks(folder: str, axis: str) -> None:
    print(*run_ranks(_read_big, 2, Path(folder), axis))


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["fsdp", "tp"])
def test_a_gigabyte_is_read_on_two_ranks_below_one_and_a_half_gigabytes_each(
    axis: str, tmp_path: Path
) -> None:
    run_ranks(_save_big, 1, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) >= GB
    command = f"from {__name__} import print_peaks; print_peaks({str(tmp_path)!r}, {axis!r})"
    # In a fresh process: ranks begin with what the process that forked them has in memory.
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    peaks = [int(peak) for peak in done.stdout.split()]
    assert len(peaks) == 2 and max(peaks) < 1.5 * GB, peaks

"""The manifest knows each byte of a step folder; without it a folder does not count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan_lite.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    list_steps,
    measure,
    prune,
    publish,
    remove,
    temporary_folder,
    verify,
    write_manifest,
)

FILES = {".metadata": b"index", "__0_0.distcp": b"x" * 5000, "__1_0.distcp": b"y" * 3000}


def make_step(root: Path, step: int) -> Path:
    temporary = temporary_folder(root, step)
    temporary.mkdir(parents=True)
    for name, content in FILES.items():
        (temporary / name).write_bytes(content)
    records = {name: measure(temporary / name) for name in FILES}
    write_manifest(temporary, Manifest(step, False, records))
    publish(root, step)
    return root / f"step-{step}"


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def delete(path: Path) -> None:
    path.unlink()


DAMAGES = [flip_a_byte, truncate, delete]


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_found_and_the_file_named(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    folder = make_step(tmp_path, 4)
    assert verify(folder) == []
    damage(folder / name)
    problems = verify(folder)
    assert len(problems) == 1 and problems[0].startswith(f"{name}: ")


def test_every_single_byte_of_the_manifest_is_guarded(tmp_path: Path) -> None:
    folder = make_step(tmp_path, 4)
    whole = (folder / MANIFEST).read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        (folder / MANIFEST).write_bytes(damaged)
        assert verify(folder), f"byte {position} of {whole!r}"


def test_ranks_share_the_reading_and_miss_nothing(tmp_path: Path) -> None:
    folder = make_step(tmp_path, 4)
    for name in FILES:
        flip_a_byte(folder / name)
    shares = [verify(folder, rank=rank, world_size=2) for rank in range(2)]
    assert [len(share) for share in shares] == [2, 1]
    assert {problem.split(":")[0] for share in shares for problem in share} == set(FILES)


def test_the_manifest_of_another_step_does_not_count_as_ones_own(tmp_path: Path) -> None:
    folder = make_step(tmp_path, 4)
    folder.rename(tmp_path / "step-5")
    assert verify(tmp_path / "step-5") == [f"{MANIFEST}: it is the manifest of step 4"]


def test_a_later_format_is_refused_by_its_number(tmp_path: Path) -> None:
    temporary = temporary_folder(tmp_path, 1)
    temporary.mkdir()
    write_manifest(temporary, Manifest(1, False, {}, format_version=99))
    assert verify(temporary) == [f"{MANIFEST}: format 99, this program reads 1"]


def test_a_file_that_no_rank_wrote_stops_the_save(tmp_path: Path) -> None:
    (tmp_path / "stranger").touch()
    with pytest.raises(ValueError, match="no rank wrote these files: stranger"):
        write_manifest(tmp_path, Manifest(1, False, {}))


def test_only_folders_with_a_manifest_are_listed(tmp_path: Path) -> None:
    for step in (10, 2):
        make_step(tmp_path, step)
    temporary_folder(tmp_path, 12).mkdir()
    (tmp_path / "step-11").mkdir()
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-13").touch()
    others = [(11, tmp_path / "step-11"), (12, tmp_path / "step-12.tmp")]
    assert list_steps(tmp_path) == ([2, 10], others)
    assert list_steps(tmp_path / "nowhere") == ([], [])


def test_a_damaged_folder_gives_way_to_its_replacement(tmp_path: Path) -> None:
    flip_a_byte(make_step(tmp_path, 4) / ".metadata")
    folder = make_step(tmp_path, 4)
    assert verify(folder) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-4"]


def test_removal_starts_with_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_step(tmp_path, 4)

    def power_cut(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", power_cut)
        remove(folder)
    assert list_steps(tmp_path) == ([], [(4, folder)])


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def test_the_newest_k_stay_and_leftovers_go(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        make_step(tmp_path, step)
    temporary_folder(tmp_path, 5).mkdir()  # a save cut short
    (tmp_path / "step-3").mkdir()  # a removal cut short
    temporary_folder(tmp_path, 9).mkdir()
    (tmp_path / "notes").mkdir()
    assert prune(tmp_path, keep_latest_k=0, saved_step=8) == []
    removed = prune(tmp_path, keep_latest_k=2, saved_step=8)
    assert sorted(removed) == ["step-2", "step-3", "step-4", "step-5.tmp"]
    assert names(tmp_path) == ["notes", "step-6", "step-8", "step-9.tmp"]


@pytest.mark.parametrize("damage", [truncate, delete])
def test_damaged_checkpoints_fill_no_place_among_the_newest_k(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    for step in (2, 4, 6, 8):
        make_step(tmp_path, step)
    damage(tmp_path / "step-6" / "__0_0.distcp")
    assert prune(tmp_path, keep_latest_k=2, saved_step=8) == ["step-2"]
    assert names(tmp_path) == ["step-4", "step-6", "step-8"]


def test_the_step_just_saved_stays_even_beside_newer_ones(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        make_step(tmp_path, step)
    flip_a_byte(tmp_path / "step-8" / "__0_0.distcp")  # not seen without reading it all
    assert prune(tmp_path, keep_latest_k=1, saved_step=4) == ["step-2", "step-6"]
    assert names(tmp_path) == ["step-4", "step-8"]

"""Each kind of input gives its documents; each bad one is named with file and place."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from torchtitan_lite.config import ConfigError
from torchtitan_lite.data import documents
from torchtitan_lite.data.documents import find_source, read_pieces
from torchtitan_lite.data.tokenizer import Tokenizer

KEY = "training.dataset_path"


def read(path: Path, *, kind: str = "auto", column: str = "text") -> list[str]:
    """The documents at `path`, put together from their pieces."""
    found, parts = [], []
    for piece in read_pieces(find_source(kind, path, text_column=column, key=KEY)):
        parts.append(piece.text)
        if piece.ends_document:
            found.append("".join(parts))
            parts = []
    assert not parts
    return found


def test_form_feeds_separate_the_documents_of_a_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo\n\n\f\nthree  \n\f\f\n  four\n")
    assert read(file) == ["one\ntwo", "three  ", "", "  four"]


def test_a_text_without_form_feeds_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n\ntwo é\n")
    assert read(file) == ["one\n\ntwo é"]
    file.write_text("one\f")
    assert read(file) == ["one", ""]
    file.write_text("")
    assert read(file) == [""]


def test_a_folder_gives_its_files_in_the_order_of_their_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.txt").write_text("three")
    (tmp_path / "notes.md").touch()
    assert read(tmp_path) == ["one", "two", "three"]
    assert read(tmp_path, kind="text") == ["two", "three"]
    assert "reads 3 files, and not 1 others" in caplog.text


def test_jsonl_gives_the_text_of_its_column(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "one\\n", "n": 1}\n\n{"body": ""}\n{"body": "\\u00e9"}')
    assert read(file, column="body") == ["one\n", "", "é"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "cut', "line 3 is not JSON"),
        ('["text"]', "line 3 has no text that UTF-8 can hold"),
        ('{"body": "x", "a": 1}', "line 3 has no text that UTF-8 can hold"),
        ('{"text": 7}', "line 3 has no text that UTF-8 can hold"),
        ('{"text": "\\ud800"}', "line 3 has no text that UTF-8 can hold"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(
    tmp_path: Path, line: str, reason: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n\n' + line + '\n{"text": "fine"}\n')
    with pytest.raises(ConfigError) as error:
        read(file)
    assert f"{file} {reason}" in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith("training.dataset_path: ")


def test_a_row_without_the_column_is_shown_with_the_key_and_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "x", "a": 1}')
    with pytest.raises(
        ConfigError,
        match=r"in the field 'text'; it has a \(int\), body \(str\): name .*dataset_text_column",
    ):
        read(file)


def test_a_hugging_face_dataset_on_disk_gives_its_rows(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"body": ["one", "", "é"], "n": [1, 2, 3]})
    rows.save_to_disk(tmp_path / "rows", num_shards=2)
    assert read(tmp_path / "rows", column="body") == ["one", "", "é"]
    with pytest.raises(ConfigError, match=r"dataset_text_column = 'text'.*body"):
        read(tmp_path / "rows")
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ConfigError, match="it has splits, name one of them: test, train"):
        read(tmp_path / "splits")
    assert read(tmp_path / "splits" / "train", column="body") == ["one", "", "é"]


def test_a_damaged_hugging_face_dataset_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="`datasets` cannot load it") as error:
        read(tmp_path)
    assert "\n" not in str(error.value)


def test_paths_that_hold_nothing_are_errors_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a")
    for path, reason in [
        (tmp_path / "absent.txt", "no such file"),
        (tmp_path / "a.csv", "no file whose name ends in .jsonl or .txt"),
        (tmp_path, "no file whose name ends in .jsonl or .txt"),
    ]:
        with pytest.raises(ConfigError, match=r"^training\.dataset_path = ") as error:
            read(path)
        assert reason in str(error.value)
    with pytest.raises(ConfigError, match="`datasets` cannot load it"):
        read(tmp_path, kind="hf")
    assert read(tmp_path / "a.csv", kind="text") == ["a"]


def test_text_that_is_not_utf8_is_named_with_its_byte(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl"):
        file = tmp_path / name
        for padding in (0, 8190, 8191, 8192, 200_000):  # a stream decodes 8192 bytes at once
            text = b" " * padding + "aé漢".encode()
            file.write_bytes(text + b"bcd\xffe")
            with pytest.raises(ConfigError, match=rf"{name} is not UTF-8 at byte {padding + 9} "):
                read(file)
            file.write_bytes(text[:-1])
            with pytest.raises(ConfigError, match=rf"{name} is not UTF-8 at byte {padding + 3} "):
                read(file)


def random_text(length: int) -> str:
    choose = random.Random(0)
    words = ["hack", "it's", "é漢", "12345", "()!", "\n", "\n\n", "  ", "\f", "A"]
    return " ".join(choose.choice(words) for _ in range(length))


def test_pieces_put_together_are_the_documents_whatever_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = random_text(3000)
    file = tmp_path / "a.txt"
    file.write_bytes(text.encode())
    expected = [document.strip("\n") for document in text.split("\f")]
    for piece_size in (1 << 16, 1000, 40):
        monkeypatch.setattr(documents, "PIECE_SIZE", piece_size)
        assert read(file) == expected


def test_the_tokens_of_pieces_are_those_of_the_whole_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr(documents, "PIECE_SIZE", 120)
    text = random_text(3000).replace("\f", "B").strip()
    file = tmp_path / "a.txt"
    file.write_bytes(text.encode())
    pieces = list(read_pieces(find_source("text", file, text_column="text", key=KEY)))
    assert len(pieces) > 50 and all(len(piece.text) <= 120 for piece in pieces[:-1])
    ids = [tokenizer.encode(piece.text) for piece in pieces]
    assert sum(ids, []) == tokenizer.encode(text)
    # A cut that does not look where it falls is seen.
    blind = [tokenizer.encode(text[start : start + 120]) for start in range(0, len(text), 120)]
    assert sum(blind, []) != tokenizer.encode(text)


def test_a_long_document_without_a_place_to_cut_is_cut_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x" * (1 << 20))
    pieces = list(read_pieces(find_source("text", file, text_column="text", key=KEY)))
    assert max(len(piece.text) for piece in pieces) <= 2 * documents.PIECE_SIZE
    assert read(file) == ["x" * (1 << 20)]


def test_progress_ends_at_all_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("漢" * 5000)
    (tmp_path / "b.jsonl").write_text('{"text": "é"}\n' * 1000)
    read(tmp_path)
    assert "100%" in capsys.readouterr().err


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(ConfigError, match="b.txt is a link to nothing"):
        read(tmp_path)


def test_linked_folders_are_read_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "z.txt").write_bytes(b"\xef\xbb\xbfwords")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "outside")
    assert read(tmp_path / "inside") == ["words"]

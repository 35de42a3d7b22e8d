"""Each kind of input gives its documents; each bad one is named with file and place."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from torchtitan_lite.config import ConfigError
from torchtitan_lite.data import documents
from torchtitan_lite.data.documents import detect_kind, find_source, read_pieces
from torchtitan_lite.data.tokenizer import Tokenizer

KEY = "training.dataset_path"


def read(path: Path, *, kind: str = "auto", column: str = "text") -> list[str]:
    """The documents at `path`, put together from their pieces."""
    source = find_source(detect_kind(kind, path, key=KEY), path, text_column=column, key=KEY)
    found, parts, position = [], [], 0
    for piece in read_pieces(source):
        assert piece.position >= position
        position = piece.position
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
    assert read(file) == ["one"]
    file.write_text("")
    assert read(file) == [""]


def test_a_folder_gives_its_files_in_the_order_of_their_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.txt").write_text("three")
    assert read(tmp_path) == ["one", "two", "three"]
    assert read(tmp_path, kind="text") == ["two", "three"]
    assert "not the other 1" in caplog.text


def test_jsonl_gives_the_text_of_its_column(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "one\\n", "n": 1}\n\n{"body": ""}\n{"body": "\\u00e9"}')
    assert read(file, column="body") == ["one\n", "", "é"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "cut', "line 3 is not JSON"),
        ('["text"]', "line 3 is list, not a JSON object"),
        ('{"body": "x", "a": 1}', "line 3 has no such field; it has a, body"),
        ('{"text": 7}', "line 3 holds int there"),
        ('{"text": "\\ud800"}', "line 3 is no text"),
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
    assert str(error.value).startswith(("training.dataset_path", "training.dataset_text_column"))


def test_a_hugging_face_dataset_on_disk_gives_its_rows(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"body": ["one", "", "é"], "n": [1, 2, 3]})
    rows.save_to_disk(tmp_path / "rows", num_shards=2)
    assert read(tmp_path / "rows", column="body") == ["one", "", "é"]
    with pytest.raises(ConfigError, match=r"dataset_text_column = 'text'.*it has body, n"):
        read(tmp_path / "rows")
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ConfigError, match=r"it has splits \(test, train\)"):
        read(tmp_path / "splits")
    assert read(tmp_path / "splits" / "train", column="body") == ["one", "", "é"]


def test_a_damaged_hugging_face_dataset_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="does not load as a dataset") as error:
        read(tmp_path)
    assert "\n" not in str(error.value)


def test_paths_that_hold_nothing_are_errors_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a")
    for path, reason in [
        (tmp_path / "absent.txt", "no such file"),
        (tmp_path / "a.csv", "neither in .txt nor in .jsonl"),
        (tmp_path, "holds no .jsonl or .txt file"),
    ]:
        with pytest.raises(ConfigError, match=r"^training\.dataset_path = ") as error:
            read(path)
        assert reason in str(error.value)
    with pytest.raises(ConfigError, match="no dataset on disk"):
        read(tmp_path, kind="hf")
    assert read(tmp_path / "a.csv", kind="text") == ["a"]


def test_text_that_is_not_utf8_is_named_with_its_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    for block_size in (1 << 20, 4, 3):
        monkeypatch.setattr(documents, "BLOCK_SIZE", block_size)
        file.write_bytes("aé漢".encode() + b"bcd\xffe")
        with pytest.raises(ConfigError, match=r"a\.txt is not UTF-8 at byte 9 "):
            read(file)
        file.write_bytes("aé漢".encode()[:-1])
        with pytest.raises(ConfigError, match=r"a\.txt is not UTF-8 at byte 3 "):
            read(file)


def random_text(length: int) -> str:
    choose = random.Random(0)
    words = ["hack", "it's", "é漢", "12345", "()!", "\n", "\n\n", "  ", "\f", "A"]
    return " ".join(choose.choice(words) for _ in range(length))


def test_pieces_put_together_are_the_documents_whatever_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = random_text(3000)
    file = tmp_path / "a.txt"
    file.write_bytes(text.encode())
    expected = [document.strip("\n") for document in text.split("\f")]
    for block_size, piece_size in [(1 << 20, 1 << 17), (7, 1 << 17), (64, 40), (1 << 20, 40)]:
        monkeypatch.setattr(documents, "BLOCK_SIZE", block_size)
        monkeypatch.setattr(documents, "PIECE_SIZE", piece_size)
        monkeypatch.setattr(documents, "BORDER_WINDOW", piece_size)
        assert read(file) == expected


def test_the_tokens_of_pieces_are_those_of_the_whole_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr(documents, "PIECE_SIZE", 60)
    monkeypatch.setattr(documents, "BORDER_WINDOW", 60)
    text = random_text(3000).replace("\f", "B")
    pieces = list(documents._cut(text, 0))
    assert len(pieces) > 100 and all(len(piece.text) <= 60 for piece in pieces)
    ids = [tokenizer.encode(piece.text) for piece in pieces]
    assert sum(ids, []) == tokenizer.encode(text)
    # A cut that does not look where it falls is seen.
    blind = [tokenizer.encode(text[start : start + 60]) for start in range(0, len(text), 60)]
    assert sum(blind, []) != tokenizer.encode(text)


def test_a_long_document_without_a_place_to_cut_is_cut_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x" * (1 << 20))
    pieces = list(read_pieces(find_source("text", file, text_column="text", key=KEY)))
    assert max(len(piece.text) for piece in pieces) == documents.PIECE_SIZE
    assert read(file) == ["x" * (1 << 20)]


def test_a_large_jsonl_text_is_cut_too(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    text = "hack it. " * 50_000
    file.write_text(json.dumps({"text": text}) + os.linesep)
    assert read(file) == [text]

"""Shards give back what was written, appear whole or not at all, and name what is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from torchtitan_lite.config import ConfigError
from torchtitan_lite.data.shards import TokenShards
from torchtitan_lite.data.shards import write_shards as write

WriteShards = Callable[..., Path]


def test_any_slice_over_any_number_of_files_is_what_was_written(write_shards: WriteShards) -> None:
    tokens = np.random.default_rng(0).integers(0, 5000, 1050)
    for tokens_a_shard in (7, 100, 1050, 5000):
        folder = write_shards(tokens, tokens_a_shard=tokens_a_shard, name=f"shards{tokens_a_shard}")
        shards = TokenShards(folder)
        assert shards.num_tokens == 1050
        assert len(list(folder.glob("tokens-*.bin"))) == -(-1050 // tokens_a_shard)
        for start, stop in [(0, 1050), (0, 1), (99, 101), (95, 330), (1049, 1050)]:
            read = shards.read(start, stop)
            assert read.dtype == np.int64 and np.array_equal(read, tokens[start:stop])


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65535, "uint16"), (65536, "uint32"), (200_000, "uint32")]
)
def test_ids_are_as_wide_as_the_vocabulary_needs(
    write_shards: WriteShards, vocab_size: int, dtype: str
) -> None:
    shards = TokenShards(write_shards([0, vocab_size - 1, 3], vocab_size=vocab_size))
    assert shards.index["dtype"] == dtype
    assert shards.read(0, 3).tolist() == [0, vocab_size - 1, 3]


def test_files_are_little_endian_and_the_index_counts_them(write_shards: WriteShards) -> None:
    folder = write_shards([1, 258, 3], tokens_a_shard=2)
    assert (folder / "tokens-00000.bin").read_bytes() == b"\x01\x00\x02\x01"
    assert json.loads((folder / "index.json").read_text())["shards"] == [
        {"file": "tokens-00000.bin", "num_tokens": 2, "max_token_id": 258},
        {"file": "tokens-00001.bin", "num_tokens": 1, "max_token_id": 3},
    ]


def test_the_ends_of_documents_are_those_that_were_written(write_shards: WriteShards) -> None:
    ends = [1, 99, 100, 101, 250]  # on a border between files, around it, over several files
    shards = TokenShards(write_shards(range(250), ends=ends, tokens_a_shard=50))
    assert shards.document_ends(key="k").tolist() == ends
    assert shards.index["num_documents"] == 5 and shards.index["format"] == 2
    file = shards.folder / "documents.bin"
    assert file.read_bytes() == b"".join(end.to_bytes(8, "little") for end in ends)


def test_an_end_may_come_a_batch_late_and_a_document_without_tokens_leaves_none(
    tmp_path: Path,
) -> None:
    batches: list[tuple[list[int], list[int]]] = [
        ([], [0]), ([1, 2], [0, 0, 2, 2]), ([], [0]), ([3], []), ([], [0]), ([4, 5], [1, 1, 2])
    ]  # fmt: skip
    index = write(tmp_path / "a", batches, vocab_size=10, notes={})
    assert TokenShards(tmp_path / "a").document_ends(key="k").tolist() == [2, 3, 4, 5]
    assert (index["num_documents"], index["num_tokens"]) == (4, 5)


def as_format_1(folder: Path) -> Path:
    """What a folder of format 1 holds."""
    index = json.loads((folder / "index.json").read_text())
    del index["num_documents"]
    (folder / "index.json").write_text(json.dumps({**index, "format": 1}))
    (folder / "documents.bin").unlink()
    return folder


def test_format_1_is_read_but_knows_no_documents(write_shards: WriteShards) -> None:
    shards = TokenShards(as_format_1(write_shards(range(250))))
    assert shards.read(90, 210).tolist() == list(range(90, 210))
    with pytest.raises(ConfigError) as error:
        shards.document_ends(key="training.document_mask = true")
    assert str(error.value).startswith(f"training.document_mask = true: {shards.folder} does not")
    assert "make it again" in str(error.value) and "\n" not in str(error.value)


def test_ends_that_do_not_fit_the_index_or_the_tokens_are_named(write_shards: WriteShards) -> None:
    folder = write_shards(range(250), ends=[100, 250])
    file = folder / "documents.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=r"documents\.bin has 15 bytes.*it has 16 bytes"):
        TokenShards(folder)
    file.write_bytes(content[:8] * 2)
    with pytest.raises(ConfigError, match=r"documents\.bin does not end where the tokens do"):
        TokenShards(folder)


def test_the_folder_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "shards"

    def batches() -> Iterator[tuple[list[int], list[int]]]:
        for token in (1, 2, 3):
            yield [token], [1]
            assert not folder.exists()

    write(folder, batches(), vocab_size=10, notes={}, tokens_a_shard=2)
    assert folder.exists() and [path.name for path in tmp_path.iterdir()] == ["shards"]


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def batches() -> Iterator[tuple[list[int], list[int]]]:
        yield [1, 2, 3], [3]
        raise KeyError

    with pytest.raises(KeyError):
        write(tmp_path / "a", batches(), vocab_size=10, notes={})
    with pytest.raises(AssertionError, match="outside the vocabulary"):
        write(tmp_path / "a", [([1], []), ([10], [1])], vocab_size=10, notes={})
    with pytest.raises(AssertionError, match="a document goes on behind 2 tokens"):
        write(tmp_path / "a", [([1, 2], [1])], vocab_size=10, notes={})
    assert list(tmp_path.iterdir()) == []


def test_of_two_writers_of_one_folder_one_wins_and_both_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shards"

    def overtaken() -> Iterator[tuple[list[int], list[int]]]:
        yield [1, 2, 3], [3]
        monkeypatch.setattr("os.getpid", lambda: 1)
        write(folder, [([1, 2, 3], [3])], vocab_size=10, notes={})

    write(folder, overtaken(), vocab_size=10, notes={})
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]
    assert TokenShards(folder).num_tokens == 3


def test_a_token_cut_off_is_named_with_its_file(write_shards: WriteShards) -> None:
    folder = write_shards(range(250))
    file = folder / "tokens-00001.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"tokens-00001\.bin has 199 bytes.*it has 200 bytes"):
        TokenShards(folder)


def test_a_short_or_missing_file_is_named(write_shards: WriteShards) -> None:
    folder = write_shards(range(250))
    file = folder / "tokens-00002.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ConfigError, match=r"tokens-00002\.bin has 98 bytes.*it has 100 bytes"):
        TokenShards(folder)
    file.unlink()
    with pytest.raises(ConfigError, match=r"tokens-00002\.bin is missing"):
        TokenShards(folder)


def test_an_id_outside_the_model_s_vocabulary_is_named_at_open(write_shards: WriteShards) -> None:
    shards = TokenShards(write_shards([1] * 150 + [4000], vocab_size=5000))
    shards.check_vocabulary(4001)
    with pytest.raises(ConfigError, match=r"tokens-00001\.bin.*4000.*vocabulary of 4000") as error:
        shards.check_vocabulary(4000)
    assert str(error.value).startswith("training.dataset_path: ")


def test_an_id_that_the_index_does_not_admit_is_named_when_it_is_read(
    write_shards: WriteShards,
) -> None:
    folder = write_shards(range(250), vocab_size=300)
    file = folder / "tokens-00001.bin"
    content = bytearray(file.read_bytes())
    content[41] = 0xFF  # the high byte of token 20
    file.write_bytes(content)
    shards = TokenShards(folder)
    shards.read(0, 120)
    with pytest.raises(
        ConfigError, match=r"tokens-00001\.bin holds token id 65400, outside a vocab"
    ):
        shards.read(90, 130)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": 3, "dtype": "uint16", "vocab_size": 10, "num_documents": 1, "shards": []}',
        '{"format": 1, "dtype": "float16"}',
        '{"format": 1, "dtype": "uint16", "vocab_size": "many", "shards": []}',
        '{"format": 1, "dtype": "uint16", "vocab_size": 10, "shards": [{"file": "a"}]}',
        '{"format": 1, "dtype": "uint16", "vocab_size": 10, "shards": []}',
        '{"format": 2, "dtype": "uint16", "vocab_size": 10, "num_documents": 0, "shards": '
        '[{"file": "a", "num_tokens": 1, "max_token_id": 1}]}',
        '{"format": 2, "dtype": "uint16", "vocab_size": 10, "shards": '
        '[{"file": "a", "num_tokens": 1, "max_token_id": 1}]}',
    ],
)
def test_a_bad_or_empty_index_is_one_line_with_its_path(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ConfigError) as error:
        TokenShards(tmp_path, key="validation.dataset_path")
    assert str(error.value).startswith(f"validation.dataset_path: {tmp_path}")
    assert "\n" not in str(error.value)


def test_a_folder_without_an_index_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"index\.json is no index.*No such file"):
        TokenShards(tmp_path / "absent")

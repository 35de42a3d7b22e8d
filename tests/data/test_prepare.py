"""Tokenised once, whoever asks, whatever dies meanwhile."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.data.conftest import ROOT
from tests.world import run_ranks
from torchtitan_lite.config import ConfigError
from torchtitan_lite.data import prepare as prepare_module
from torchtitan_lite.data.prepare import prepare
from torchtitan_lite.data.shards import TokenShards
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer

TEXTS = ["Hack one.", "Hack two, and é.\n\nMore of it.", "", "  \n", "Three."]


class CountingTokenizer(Tokenizer):
    """The shipped tokenizer; each batch it encodes leaves a line in `log`."""

    log: Path
    seconds_a_batch = 0.0
    dies_at_batch = -1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with open(self.log, "a") as log:
            log.write(f"{os.getpid()}\n")
        time.sleep(self.seconds_a_batch)
        if self.num_batches == self.dies_at_batch:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_batch(texts)

    @property
    def num_batches(self) -> int:
        return len(self.log.read_text().split()) if self.log.exists() else 0

    @property
    def num_processes(self) -> int:
        return len(set(self.log.read_text().split())) if self.log.exists() else 0


@pytest.fixture
def counting(tmp_path: Path) -> CountingTokenizer:
    tokenizer = load_tokenizer(ROOT / "assets" / "tokenizer")
    tokenizer.__class__ = CountingTokenizer
    assert isinstance(tokenizer, CountingTokenizer)
    tokenizer.log = tmp_path / "log"
    return tokenizer


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("\n\f\n".join(TEXTS))
    return file


def prepare_into(cache: Path, path: Path, tokenizer: Tokenizer, kind: str = "auto") -> Path:
    return prepare(kind, path, tokenizer, cache=cache, text_column="text")


def tokens_of(folder: Path) -> list[int]:
    shards = TokenShards(folder)
    return shards.read(0, shards.num_tokens).tolist()


def expected_tokens(tokenizer: Tokenizer, texts: Sequence[str] = TEXTS) -> list[int]:
    kept = [text for text in texts if text.strip()]
    return sum((document(tokenizer, text) for text in kept), [])


def document(tokenizer: Tokenizer, text: str) -> list[int]:
    assert tokenizer.bos_id is not None and tokenizer.eos_id is not None
    return [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]


def test_every_document_is_there_between_begin_and_end(
    tmp_path: Path, text_file: Path, tokenizer: Tokenizer
) -> None:
    folder = prepare_into(tmp_path / "cache", text_file, tokenizer)
    assert tokens_of(folder) == expected_tokens(tokenizer)
    index = TokenShards(folder).index
    assert (index["num_documents"], index["num_empty_documents"]) == (3, 2)
    assert index["vocab_size"] == 2048 and index["tokenizer_sha256"] == tokenizer.sha256


def ends_of(folder: Path) -> list[int]:
    ends: list[int] = TokenShards(folder).document_ends(key="k").tolist()
    return ends


def test_the_ends_of_documents_are_kept_whatever_begins_and_ends_them(
    tmp_path: Path, text_file: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "BATCH_PIECES", 2)  # documents in several batches
    kept = [tokenizer.encode(text) for text in TEXTS if text.strip()]
    for name, bos, eos in [("both", 0, 1), ("end", None, 1), ("neither", None, None)]:
        kind = dataclasses.replace(tokenizer, bos_id=bos, eos_id=eos)
        folder = prepare_into(tmp_path / name, text_file, kind)
        more = (bos is not None) + (eos is not None)
        lengths = [len(tokens) + more for tokens in kept]
        assert ends_of(folder) == [sum(lengths[: i + 1]) for i in range(3)]


def test_text_jsonl_and_hugging_face_rows_give_the_same_tokens(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    import datasets

    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "hf")
    for path in (jsonl, tmp_path / "hf"):
        folder = prepare_into(tmp_path / "cache", path, tokenizer)
        assert tokens_of(folder) == expected_tokens(tokenizer)


def test_a_long_document_has_one_begin_one_end_and_the_tokens_of_the_whole(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    text = (ROOT / "assets" / "text" / "train.txt").read_text().replace("\f", "")[:600_000].strip()
    file = tmp_path / "long.txt"
    file.write_text(text)
    folder = prepare_into(tmp_path / "cache", file, tokenizer)
    tokens = tokens_of(folder)
    assert tokens == document(tokenizer, text)
    assert ends_of(folder) == [len(tokens)]


def test_a_second_start_does_not_tokenise_again(
    tmp_path: Path, text_file: Path, counting: CountingTokenizer
) -> None:
    first = prepare_into(tmp_path / "cache", text_file, counting)
    assert counting.num_batches == 1
    moved = text_file.rename(tmp_path / "other_name.txt")
    assert prepare_into(tmp_path / "cache", moved, counting) == first
    assert counting.num_batches == 1


def test_whatever_the_tokens_follow_from_changes_the_cache(
    tmp_path: Path, text_file: Path, counting: CountingTokenizer
) -> None:
    cache = tmp_path / "cache"
    folders = [prepare_into(cache, text_file, counting)]
    text_file.write_text(text_file.read_text().replace("two", "2wo"))
    folders.append(prepare_into(cache, text_file, counting))
    counting.bos_id = None
    folders.append(prepare_into(cache, text_file, counting))
    counting.sha256 = "0" * 64
    folders.append(prepare_into(cache, text_file, counting))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a", "body": "b"}\n')
    for column in ("text", "body"):
        folders.append(prepare("auto", rows, counting, cache=cache, text_column=column))
    assert len(set(folders)) == len(folders) == counting.num_batches
    # The column means nothing to a plain text.
    again = prepare("auto", text_file, counting, cache=cache, text_column="body")
    assert again == folders[3]


def _prepare_on_rank(cache: Path, path: Path, tokenizer: Tokenizer, local_rank: str) -> str:
    if local_rank:
        os.environ["LOCAL_RANK"] = local_rank
    return str(prepare_into(cache, path, tokenizer))


def test_one_of_four_processes_tokenises_and_the_others_wait(
    tmp_path: Path, text_file: Path, counting: CountingTokenizer
) -> None:
    counting.seconds_a_batch = 0.3
    folders = run_ranks(_prepare_on_rank, 4, tmp_path / "cache", text_file, counting, "")
    assert counting.num_processes == 1
    assert len(set(folders)) == 1 and tokens_of(Path(folders[0])) == expected_tokens(counting)


def test_local_ranks_0_of_several_nodes_on_one_disk_do_not_disturb_each_other(
    tmp_path: Path, text_file: Path, counting: CountingTokenizer
) -> None:
    counting.seconds_a_batch = 0.3
    folders = run_ranks(_prepare_on_rank, 3, tmp_path / "cache", text_file, counting, "0")
    assert counting.num_processes == 3  # the count above does tell one process from several
    assert len(set(folders)) == 1 and tokens_of(Path(folders[0])) == expected_tokens(counting)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [Path(folders[0]).name]


def test_a_killed_process_leaves_nothing_that_counts(
    tmp_path: Path,
    text_file: Path,
    counting: CountingTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepare_module, "BATCH_PIECES", 2)
    cache = tmp_path / "cache"
    counting.dies_at_batch = 2
    process = get_context("fork").Process(target=prepare_into, args=(cache, text_file, counting))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    leftovers = [path.name for path in cache.iterdir()]
    assert len(leftovers) == 1 and ".tmp-" in leftovers[0]

    counting.dies_at_batch = -1
    folder = prepare_into(cache, text_file, counting)
    assert tokens_of(folder) == expected_tokens(counting)
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_a_bad_line_leaves_no_cache(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n{"text"\n')
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"a\.jsonl line 2"):
            prepare_into(tmp_path / "cache", file, tokenizer)
        assert list((tmp_path / "cache").iterdir()) == []


def test_data_without_any_text_is_an_error_with_its_path(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file = tmp_path / "empty.txt"
    for content in ("", " \n\f\n"):
        file.write_text(content)
        with pytest.raises(
            ConfigError, match=r"^training\.dataset_path.*empty\.txt'. it holds no text"
        ):
            prepare_into(tmp_path / "cache", file, tokenizer)
    with pytest.raises(ConfigError, match=r"^training\.dataset_path = ''. there is no such"):
        prepare("auto", "", tokenizer, cache=tmp_path, text_column="text")


def test_prepared_shards_are_used_where_they_lie_if_their_tokenizer_fits(
    tmp_path: Path, text_file: Path, counting: CountingTokenizer
) -> None:
    folder = prepare_into(tmp_path / "cache", text_file, counting)
    assert prepare_into(tmp_path / "none", folder, counting) == folder
    assert prepare_into(tmp_path / "none", folder, counting, kind="tokens") == folder
    counting.sha256 = "0" * 64
    with pytest.raises(ConfigError, match="made with another tokenizer"):
        prepare_into(tmp_path / "none", folder, counting)
    (folder / "index.json").unlink()
    with pytest.raises(ConfigError, match=r"index\.json is no index.*No such file"):
        prepare_into(tmp_path / "none", folder, counting)


def test_a_cache_that_cannot_be_made_is_an_error_with_its_key(
    tmp_path: Path, text_file: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^training\.dataset_path.* into training\.token_cache = .*Not a directory",
    ):
        prepare_into(text_file / "cache", text_file, tokenizer)


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_the_script_prepares_shards_that_a_run_uses(
    tmp_path: Path, text_file: Path, tokenizer: Tokenizer
) -> None:
    output, assets = tmp_path / "shards", ROOT / "assets" / "tokenizer"
    options = ("--input", text_file, "--output", output, "--hf_assets_path", assets)
    done = run_script(*options)
    assert done.returncode == 0, done.stderr
    assert "3 documents (2 more were empty)" in done.stdout
    assert tokens_of(prepare_into(tmp_path, output, tokenizer)) == expected_tokens(tokenizer)

    again = run_script(*options)
    assert again.returncode == 2
    assert again.stderr.startswith("error: --output") and again.stderr.count("\n") == 1

"""The shipped tokenizer, and every way in which a tokenizer folder can be wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.conftest import ROOT
from torchtitan_lite.config import ConfigError
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer

SHIPPED = ROOT / "assets" / "tokenizer"
TEXT = 'Hackers say "foo",  bar\n\n\tand baz\r\n — é 漢字 🙂 \x00'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SHIPPED, tmp_path / "tokenizer"))


def test_any_text_round_trips(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_the_shipped_tokenizer_has_2048_entries_a_begin_and_an_end(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 2048
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.decode([0, 1], skip_special_tokens=False).startswith("<|begin_of_text|>")


def test_begin_and_end_are_no_part_of_the_text(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("hack")
    assert not {0, 1} & set(plain)
    assert tokenizer.decode([0, *plain, 1]) == "hack"


def test_transformers_gives_the_same_ids(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(SHIPPED)
    assert theirs.encode(TEXT, add_special_tokens=False) == tokenizer.encode(TEXT)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert len(theirs) == tokenizer.vocab_size


def test_training_again_gives_the_shipped_files_byte_for_byte(tmp_path: Path) -> None:
    script, text = ROOT / "scripts" / "train_tokenizer.py", ROOT / "assets" / "text" / "train.txt"
    command = [sys.executable, str(script), "--input", str(text), "--output", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes()


def test_the_training_script_refuses_a_missing_text_with_exit_code_2(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "train_tokenizer.py"
    command = [sys.executable, str(script), "--input", "absent.txt", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("error: --input absent.txt: no such file\n")


def test_a_truncation_in_the_file_does_not_shorten_texts(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    file.write_text(json.dumps(content))
    assert len(load_tokenizer(folder).encode("one two three four five six seven")) > 3


def test_special_tokens_are_also_found_in_special_tokens_map(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(
        '{"bos_token": {"content": "<|begin_of_text|>", "lstrip": false}}'
    )
    loaded = load_tokenizer(folder)
    assert (loaded.bos_id, loaded.eos_id) == (0, None)


def test_a_missing_folder_or_file_is_named_with_its_key(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=r"^model\.hf_assets_path") as error:
            load_tokenizer(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{}", b"{not json", b"\xff\xfe"])
def test_a_broken_tokenizer_is_named_in_one_line(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.hf_assets_path.*tokenizer\.json") as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)


def test_an_end_token_outside_the_vocabulary_is_an_error(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|none|>"}')
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json.*eos_token '<\|none\|>'"):
        load_tokenizer(folder)


# --- bytes of text ------------------------------------------------------------------------------

UNUSUAL = [
    "",
    "foo",
    "  two  spaces \n\n",
    TEXT,
    "\u00e9 e\u0301 \U0010ffff \ufeff",
    "漢" * 9 + "\x7f\x80",
]


def num_bytes(tokenizer: Tokenizer, ids: list[int]) -> int:
    lengths = tokenizer.byte_lengths()
    assert lengths is not None and len(lengths) == tokenizer.vocab_size
    return sum(lengths[id] for id in ids)


@pytest.mark.parametrize("text", UNUSUAL)
def test_the_bytes_of_its_tokens_are_those_of_a_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert num_bytes(tokenizer, [0, *ids, 1]) == len(text.encode())
    # Where a character is cut in pieces, each piece has its own bytes and no text.
    assert num_bytes(tokenizer, ids[:5]) + num_bytes(tokenizer, ids[5:]) == len(text.encode())


def text_vocabulary(prepend: str) -> Tokenizer:
    """A tiny vocabulary of text, as SentencePiece makes them: a space is ▁, <0xAB> a byte."""
    from tokenizers import Tokenizer as Implementation
    from tokenizers import decoders, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "f", "o", "é", "漢", "fo", "▁f", "漢é"]
    merges = [("f", "o"), ("▁", "f"), ("漢", "é")]
    implementation = Implementation(
        models.BPE({word: id for id, word in enumerate(words)}, merges, byte_fallback=True)
    )
    implementation.add_special_tokens(["<unk>", "<s>", "</s>"])
    implementation.add_tokens(["<tool é>"])
    implementation.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    implementation.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    size = implementation.get_vocab_size()
    return Tokenizer(implementation, bos_id=1, eos_id=2, vocab_size=size, sha256="")


@pytest.mark.parametrize("text", [*UNUSUAL, "漢é<tool é>fo"])
@pytest.mark.parametrize("prepend", ["never", "first"])
def test_so_they_are_for_a_vocabulary_of_text(prepend: str, text: str) -> None:
    tokenizer = text_vocabulary(prepend)
    ids = tokenizer.encode(text)
    puts_a_space = prepend == "first" and text[:1] not in ("", " ")
    assert num_bytes(tokenizer, ids) == len(text.encode()) + puts_a_space
    if puts_a_space:  # which the begin takes back
        assert num_bytes(tokenizer, [1, *ids, 2]) == len(text.encode())


def test_a_tokenizer_that_loses_text_has_no_bytes(tokenizer: Tokenizer) -> None:
    from tokenizers import normalizers

    lossy = text_vocabulary("never")
    lossy.implementation.normalizer = normalizers.Replace("é", "e")
    assert lossy.byte_lengths() is None
    lossless = tokenizer.byte_lengths()
    assert lossless is not None and min(lossless[2:]) == 1

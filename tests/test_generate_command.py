"""scripts/generate.py: what it prints, how a prompt begins, and one line for a mistake.

The folders hold the same tiny random model: as transformers wrote it, and as a step of ours.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders
from tokenizers.models import WordLevel

from scripts.generate import Row, Samples, configure, encode, find_eos_ids, main
from tests.models.hf import tiny_hf_model
from torchtitan_lite.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from torchtitan_lite.checkpoint.weights import Weights, find_weights
from torchtitan_lite.convert import to_step_folder
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.launch import process_group, told

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "assets" / "tokenizer"
TEXTS = ["A hacker is", "The café serves 漢字 to", "Foo"]
CONTEXT = 48


def make_folder(folder: Path, **changes: Any) -> Any:
    """A Hugging Face folder with the shipped tokenizer; returns its model."""
    options = {"vocab_size": 2048, "max_position_embeddings": CONTEXT, "eos_token_id": 1}
    model = tiny_hf_model("llama", **{**options, **changes})
    model.save_pretrained(folder)
    shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as `hf`, as `steps` and as a `run` of three steps; and two that are refused."""
    place = tmp_path_factory.mktemp("generate")
    make_folder(place / "hf")
    make_folder(place / "small", vocab_size=2000)
    shutil.copytree(place / "hf", place / "broken")
    (place / "broken" / "generation_config.json").write_text("[]")
    with process_group():
        to_step_folder(find_weights(place / "hf", key="--hf_path"), place / "steps")
    shutil.copytree(place / "steps" / "step-0", place / "run" / "step-3")
    manifest = dataclasses.replace(read_manifest(place / "run" / "step-3"), step=3)
    (place / "run" / "step-3" / MANIFEST).unlink()
    write_manifest(place / "run" / "step-3", manifest)
    (place / "prompts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    (place / "latin.txt").write_bytes("café".encode("latin-1"))
    (place / "empty.txt").write_text("")
    return place


def flags(place: Path, model: str, *more: str) -> list[str]:
    greedy = ["--temperature", "0", "--max_new_tokens", "12"]
    return ["--checkpoint", str(place / model), *greedy, *more]


def result_of(capsys: pytest.CaptureFixture[str], argv: list[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert told(main, [*argv, "--json"]) == 0
    result: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return result


def test_one_process_and_two_give_what_transformers_gives(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From text to text, each side with its own tokenizer; of two ranks one prints."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(place / "hf")
    tokenizer = AutoTokenizer.from_pretrained(place / "hf")
    expected = []
    for text in TEXTS:
        tokens = torch.tensor([tokenizer.encode(text)])
        out = model.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
        ids = out[tokens.shape[1] :].tolist()
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        expected.append({"prompt": text, "token_ids": ids, "text": whole.rstrip("\ufffd")})
    argv = flags(place, "hf", "--json", "--prompt_file", str(place / "prompts.txt"))
    assert result_of(capsys, argv) == expected
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    words = [*torchrun, "scripts/generate.py", *argv]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout) == expected


def test_a_step_gives_what_its_weights_gave_before(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Converted, the same; of a run with these weights, after the bos that begins a document."""
    bos = load_tokenizer(TOKENIZER).implementation.id_to_token(0)
    converted = result_of(capsys, flags(place, "steps", "--prompt", TEXTS[0]))
    assert converted == result_of(capsys, flags(place, "hf", "--prompt", TEXTS[0]))
    trained = result_of(capsys, flags(place, "run", "--prompt", TEXTS[0]))
    begun = result_of(capsys, flags(place, "hf", "--prompt", f"{bos}{TEXTS[0]}"))
    assert trained[0]["token_ids"] == begun[0]["token_ids"] != converted[0]["token_ids"]


def test_every_option_reaches_it(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(*more: str) -> list[list[int]]:
        argv = ["--checkpoint", str(place / "hf"), "--prompt", TEXTS[0], "--max_new_tokens", "9"]
        argv += more
        return [row["token_ids"] for row in result_of(capsys, argv)]

    greedy = tokens("--temperature", "0")
    assert tokens("--top_k", "1") == tokens("--top_p", "1e-9") == greedy
    first, second = tokens("--n_samples", "2")
    assert first != second
    assert [first] == tokens() == tokens("--seed", "0") != tokens("--seed", "1")
    assert tokens("--temperature", "0.5") != [first]
    assert len(tokens("--dtype", "bfloat16", "--max_new_tokens", "3")[0]) == 3
    monkeypatch.delattr("torchtitan_lite.generate.Cache")
    assert tokens("--no_cache") == [first]


def test_one_text_streams_and_several_come_whole_and_in_order(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = result_of(capsys, flags(place, "hf", "--prompt", TEXTS[1]))
    assert told(main, flags(place, "hf", "--prompt", TEXTS[1])) == 0
    assert capsys.readouterr().out == f"{TEXTS[1]}{row['text']}\n"
    rows = result_of(capsys, flags(place, "hf", "--prompt", TEXTS[0], "--prompt", TEXTS[1]))
    assert told(main, flags(place, "hf", "--prompt", TEXTS[0], "--prompt", TEXTS[1])) == 0
    assert capsys.readouterr().out == "".join(
        f"--- {number} of 2 ---\n{row['prompt']}{row['text']}\n\n"
        for number, row in enumerate(rows, start=1)
    )


def test_other_ranks_print_nothing(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert told(main, flags(place, "hf", "--prompt", TEXTS[0])) == 0
    said = capsys.readouterr()
    assert not said.out and not said.err


def test_a_character_is_shown_when_it_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    ids = tokenizer.encode(" 漢 byte")
    samples = Samples([("A", tokenizer.encode("A"))], 1, tokenizer, (), silent=False)
    shown = []
    for token in ids:
        samples.add(0, token, last=False)
        shown.append(capsys.readouterr().out)
    assert shown[0] == "A " and "".join(shown) == "A 漢 byte"
    assert "" in shown and "\ufffd" not in "".join(shown)


def test_the_text_has_the_space_before_its_first_word_and_not_its_eos() -> None:
    """Of a vocabulary that writes a space before each word, and takes the first one back."""
    implementation = tokenizers.Tokenizer(WordLevel({"▁one": 0, "▁two": 1, "▁end": 2}))
    implementation.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(implementation, None, None, vocab_size=3, sha256="")
    samples = Samples([("one", [0])], 1, tokenizer, {2}, silent=True)
    for token in (1, 0, 2):
        samples.add(0, token, last=token == 2)
    assert samples.rows == [Row("one", [1, 0, 2], " two one")]


def test_a_finished_text_waits_for_those_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    (letter,) = tokenizer.encode("x")
    samples = Samples([("A", [letter]), ("B", [letter])], 2, tokenizer, (), silent=False)
    shown = []
    for row in (1, 3, 0):
        samples.add(row, letter, last=True)
        shown.append(capsys.readouterr().out)
    samples.close()
    shown.append(capsys.readouterr().out)
    one, two = "--- 1 of 4 ---\nAx\n\n", "--- 2 of 4 ---\nAx\n\n"
    assert shown == ["", "", one + two, "--- 3 of 4 ---\nB\n\n--- 4 of 4 ---\nBx\n\n"]


def test_a_prompt_begins_as_the_template_of_the_folder_says(place: Path, tmp_path: Path) -> None:
    """What AutoTokenizer adds, we add; a step of ours begins with bos without any template."""
    from tokenizers import processors
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(TOKENIZER)
    assert encode("Foo", tokenizer, is_hf=False) == [0, *tokenizer.encode("Foo")]
    assert encode("", tokenizer, is_hf=False) == [0]
    bos = tokenizer.implementation.id_to_token(0)
    tokenizer.implementation.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, 0)]
    )
    shutil.copytree(TOKENIZER, tmp_path, dirs_exist_ok=True)
    tokenizer.implementation.save(str(tmp_path / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Foo", ""):
        ours = encode(text, load_tokenizer(tmp_path), is_hf=True)
        assert ours == theirs.encode(text) == [0, *tokenizer.encode(text)]


def test_a_text_ends_with_the_tokens_that_either_file_names(place: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    weights = find_weights(place / "hf", key="--checkpoint")

    def ids(content: Any) -> set[int]:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
        here = Weights(tmp_path, weights.model, TOKENIZER, is_hf=True, dtype="float32")
        return find_eos_ids(here, tokenizer)

    assert ids({}) == ids({"eos_token_id": None}) == {1}
    assert ids({"eos_token_id": 7}) == {1, 7}
    assert ids({"eos_token_id": [7, 8]}) == {1, 7, 8}


def test_the_weights_are_computed_in_what_they_are_stored_in(place: Path) -> None:
    """Also of a model that has an embedding for few positions."""
    model = find_weights(place / "hf", key="--checkpoint").model
    model = dataclasses.replace(model, learned_positions=True)
    found = {}
    for stored in ("float32", "bfloat16", "float16"):
        weights = Weights(place, model, TOKENIZER, is_hf=True, dtype=stored)
        training = configure(weights, "auto", 1).training
        assert training.dtype == training.mixed_precision_param
        found[stored] = training.dtype
    assert found == {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}


MISTAKES = {
    "--checkpoint absent": "--checkpoint = 'absent': there is no such folder",
    "--checkpoint {place}/small": "knows 2048 ids and the model's vocabulary has 2000",
    "--checkpoint {place}/broken": "broken/generation_config.json: it cannot be read",
    "--tokenizer absent": "--tokenizer = 'absent': there is no ",
    "--prompt_file absent": "argument --prompt_file: not allowed with argument --prompt",
    "--temperature -1": "--temperature -1.0: it must be 0 (greedy) or more",
    "--temperature nan": "--temperature nan: it must be 0 (greedy) or more",
    "--temperature warm": "argument --temperature: invalid float value: 'warm'",
    "--top_p 0": "--top_p 0.0: it must be above 0, and 1 at most",
    "--top_p 1.5": "--top_p 1.5: it must be above 0, and 1 at most",
    "--top_k 0": "--top_k 0: it must be 1 or more",
    "--max_new_tokens 0": "--max_new_tokens 0: it must be 1 or more",
    "--n_samples 0": "--n_samples 0: it must be 1 or more",
    "--dtype float64": "argument --dtype: invalid choice",
    "--max_new 5": "unrecognized arguments: --max_new 5",
    "--prompt " + "x." * CONTEXT: f"tokens and the context of the model {CONTEXT}; shorten it",
}


def assert_refused(capsys: pytest.CaptureFixture[str], argv: list[str], line: str) -> None:
    capsys.readouterr()
    assert told(main, argv) == 2
    said = capsys.readouterr()
    assert line in said.err and said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    place: Path, mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--checkpoint", str(place / "hf"), "--prompt", "A"]
    assert_refused(capsys, argv + mistake.format(place=place).split(), MISTAKES[mistake])


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        (["--prompt", ""], "prompt '': it has no tokens, and no token begins a text; give one"),
        (["--prompt_file", "{place}/absent.txt"], "absent.txt: it cannot be read: [Errno 2]"),
        (["--prompt_file", "{place}/latin.txt"], "latin.txt: it cannot be read: 'utf-8' codec"),
        (["--prompt_file", "{place}/empty.txt"], "empty.txt: it holds no prompt"),
        ([], "one of the arguments --prompt --prompt_file is required"),
    ],
)
def test_a_missing_prompt_is_one_line_too(
    place: Path, prompt: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(place=place) for word in prompt]
    assert_refused(capsys, ["--checkpoint", str(place / "hf"), *words], line)


def test_ranks_that_cannot_share_the_heads_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    line = "= 4 (from torchrun --nproc_per_node): 4 does not divide the model's num_attention_heads"
    assert_refused(capsys, ["--checkpoint", str(place / "hf"), "--prompt", "A"], line)


def test_options_without_effect_are_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = flags(place, "hf", "--prompt", "A", "--top_k", "5", "--seed", "1", "--n_samples", "2")
    assert told(main, argv) == 0
    said = capsys.readouterr().err
    assert "takes the likeliest token: --top_k, --seed, --n_samples make no difference" in said

"""The numbers of scripts/evaluate.py: those of transformers on the same tokens, on every mesh.

The text has characters of one to four bytes and fills neither the last row nor the last batch. The
expected sums are added up in this file from the logits of transformers, one row at a time.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from scripts.evaluate import byte_lengths_of, configure, main, measure, parse
from tests.parity.harness import TINY, Mesh, RecordingTrainer, run
from tests.world import run_ranks
from torchtitan_lite.checkpoint.weights import find_weights
from torchtitan_lite.config import Config, load_config
from torchtitan_lite.convert import to_hugging_face
from torchtitan_lite.data.opening import open_held_out
from torchtitan_lite.data.sources import Source
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.evaluate import Totals
from torchtitan_lite.launch import told, world_size
from torchtitan_lite.models.config import ModelConfig

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "assets" / "tokenizer"
SEQ_LEN, LONGEST = 24, 64  # tokens of a row, of the model's context
DOCUMENTS = [
    "A café is no kludge: 漢字 has two characters of three bytes each, 🙂 one of four.",
    "Foo.",
    "Hackers speak of a byte, a nybble and a playte, and of a dynner of thirty-two bits. " * 3,
]
TOLERANCE = 1e-6


def make_folder(folder: Path, **changes: Any) -> Path:
    """A Hugging Face folder of a tiny random model and the shipped tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    options: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": LONGEST,
        "initializer_range": 0.1,  # far from uniform, so that rows differ in their loss
    }
    LlamaForCausalLM(LlamaConfig(**{**options, **changes})).save_pretrained(folder)
    shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model `hf`, its tied sister `tied`, and the text."""
    place = tmp_path_factory.mktemp("evaluate")
    make_folder(place / "hf")
    make_folder(place / "tied", tie_word_embeddings=True)
    (place / "text.txt").write_text("\f".join(DOCUMENTS), encoding="utf-8")
    return place


def flags(place: Path, model: str = "hf", *more: str) -> list[str]:
    argv = ["--checkpoint", str(place / model), "--dataset", str(place / "text.txt")]
    argv += ["--training.seq_len", str(SEQ_LEN), "--validation.local_batch_size", "3"]
    return [*argv, "--training.token_cache", str(place / "cache"), *more]


def on_rank(argv: list[str]) -> Totals:
    """What the script does between its command line and its print."""
    options, keys = parse(argv)
    weights = find_weights(options.checkpoint, key="--checkpoint")
    config = configure(options, load_config(keys), weights, world_size())
    rows = open_held_out(config, weights.model.vocab_size, to_the_end=True)
    lengths = byte_lengths_of(config, weights)
    return measure(config, weights, rows, num_rows=options.num_rows, byte_lengths=lengths)


def evaluate_on(mesh: Mesh, argv: list[str]) -> Totals:
    argv = [
        *argv,
        f"--parallelism.pipeline_parallel_degree={mesh.pp}",
        f"--parallelism.data_parallel_replicate_degree={mesh.dp_replicate}",
        f"--parallelism.tensor_parallel_degree={mesh.tp}",
    ]
    first, *others = run_ranks(on_rank, mesh.world, argv)
    assert all(totals == first for totals in others)
    return first


def stream_of(documents: list[str]) -> list[int]:
    tokenizer = load_tokenizer(TOKENIZER)
    return [id for text in documents for id in (0, *tokenizer.encode(text), 1)]


def nats_of_rows(folder: Path, stream: list[int], seq_len: int) -> list[float]:
    """The summed cross-entropy of each row, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sums = []
    for start in range(0, len(stream) - 1, seq_len):
        row = torch.tensor(stream[start : start + seq_len + 1])
        with torch.no_grad():
            logits = model(row[None, :-1]).logits[0].double()
        sums.append(F.cross_entropy(logits, row[1:], reduction="sum").item())
    return sums


@pytest.fixture(scope="module")
def expected(place: Path) -> Totals:
    stream = stream_of(DOCUMENTS)
    nats = sum(nats_of_rows(place / "hf", stream, SEQ_LEN))
    return Totals(nats, len(stream) - 1, len("".join(DOCUMENTS).encode()))


def assert_same(totals: Totals, expected: Totals) -> None:
    assert totals.nats == pytest.approx(expected.nats, rel=TOLERANCE)
    assert (totals.num_tokens, totals.num_bytes) == (expected.num_tokens, expected.num_bytes)


# --- the sums -----------------------------------------------------------------------------------


def test_every_token_but_the_first_counts_once_and_bytes_are_those_of_the_text(
    place: Path, expected: Totals
) -> None:
    num_rows = -(-expected.num_tokens // SEQ_LEN)
    assert expected.num_tokens % SEQ_LEN and num_rows % 3  # neither row nor batch is full
    assert_same(evaluate_on(Mesh(), flags(place)), expected)


@pytest.mark.parametrize(
    "mesh", [Mesh(tp=2), Mesh(pp=2), Mesh(dp_shard=2, tp=2), Mesh(dp_replicate=3)], ids=str
)
def test_every_mesh_gives_the_same_sums(place: Path, expected: Totals, mesh: Mesh) -> None:
    assert_same(evaluate_on(mesh, flags(place)), expected)


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_rows_that_fill_up_a_batch_count_nothing(place: Path, expected: Totals, rows: int) -> None:
    argv = flags(place, "hf", f"--validation.local_batch_size={rows}")
    assert_same(evaluate_on(Mesh(dp_shard=2), argv), expected)


def test_a_tied_head_is_loaded_on_the_stage_without_an_embedding_too(place: Path) -> None:
    argv = flags(place, "tied")
    assert_same(evaluate_on(Mesh(pp=2), argv), evaluate_on(Mesh(), argv))


def test_the_first_rows_alone_are_those_of_num_rows(place: Path) -> None:
    expected = nats_of_rows(place / "hf", stream_of(DOCUMENTS), SEQ_LEN)[:2]
    totals = evaluate_on(Mesh(dp_shard=2), flags(place, "hf", "--num_rows", "2"))
    assert totals.nats == pytest.approx(sum(expected), rel=TOLERANCE)
    assert totals.num_tokens == 2 * SEQ_LEN


def test_a_text_shorter_than_a_row_is_evaluated(place: Path) -> None:
    (place / "short.txt").write_text("Foo.")
    totals = evaluate_on(Mesh(), [*flags(place), "--dataset", str(place / "short.txt")])
    assert totals.num_bytes == 4
    assert totals.nats == pytest.approx(
        sum(nats_of_rows(place / "hf", stream_of(["Foo."]), SEQ_LEN)), rel=TOLERANCE
    )


def test_a_mean_of_row_means_would_be_seen(place: Path, expected: Totals) -> None:
    sums = nats_of_rows(place / "hf", stream_of(DOCUMENTS), SEQ_LEN)
    sizes = [SEQ_LEN] * (len(sums) - 1) + [expected.num_tokens - SEQ_LEN * (len(sums) - 1)]
    mean = sum(nats / size for nats, size in zip(sums, sizes, strict=True)) / len(sums)
    assert abs(mean / expected.loss - 1) > 1000 * TOLERANCE


def test_bfloat16_is_near_and_storing_it_changes_nothing(place: Path, expected: Totals) -> None:
    argv = flags(place, "hf", "--dtype", "bfloat16")
    totals = evaluate_on(Mesh(tp=2), argv)
    assert totals.nats == pytest.approx(expected.nats, rel=1e-2)
    assert totals.nats != pytest.approx(expected.nats, rel=TOLERANCE)
    assert totals == evaluate_on(Mesh(tp=2), [*argv, "--training.dtype", "float32"])


def test_what_is_divided_by_nothing_is_no_number() -> None:
    assert math.isnan(Totals(0.0, 0).loss) and math.isnan(Totals(1.0, 1, 0).bits_per_byte)
    assert Totals(1e6, 1).perplexity == math.inf
    assert Totals(2 * math.log(2), 1, 4).bits_per_byte == pytest.approx(0.5)


# --- a run and its checkpoint ---------------------------------------------------------------------


class ReadsText(RecordingTrainer):
    """Validates on the text that the configuration names, where the harness has rows of its own."""

    def __init__(
        self, config: Config, model: ModelConfig, *, source: Source, held_out: Source | None
    ) -> None:
        held_out = open_held_out(config, model.vocab_size)
        super().__init__(config, model, source=source, held_out=held_out)


@pytest.fixture(scope="module")
def trained(place: Path) -> tuple[Path, float]:
    """The folder of a run on two data ranks, and its last validation loss."""
    options = {
        "checkpoint.enable": True,
        "model.hf_assets_path": str(TOKENIZER),
        "training.token_cache": str(place / "cache"),
        "validation.enable": True,
        "validation.dataset_path": str(place / "text.txt"),
    }
    model = dataclasses.replace(
        TINY,
        model_type="llama",
        vocab_size=2048,
        max_position_embeddings=LONGEST,
        num_attention_heads=8,
    )
    folder = place / "run"
    result = run(Mesh(dp_shard=2), options, model, folder=folder, trainer=ReadsText)
    return folder, result.series("validation_loss")[-1]


def test_a_checkpoint_has_the_loss_that_its_run_measured(
    place: Path, trained: tuple[Path, float], expected: Totals
) -> None:
    folder, validation_loss = trained
    argv = ["--checkpoint", str(folder / "checkpoint"), "--dataset", str(place / "text.txt")]
    argv += ["--training.token_cache", str(place / "cache")]
    whole_rows = expected.num_tokens // SEQ_LEN  # training leaves out what fills none
    totals = evaluate_on(Mesh(tp=2), [*argv, "--num_rows", str(whole_rows)])
    assert totals.num_tokens == whole_rows * SEQ_LEN  # the rows are as long as those of the run
    assert totals.loss == pytest.approx(validation_loss, rel=TOLERANCE)


def test_rows_are_as_long_as_the_model_and_the_run_allow(
    place: Path, trained: tuple[Path, float]
) -> None:
    def seq_len(checkpoint: Path, *more: str) -> int:
        argv = ["--checkpoint", str(checkpoint), "--dataset", str(place / "text.txt"), *more]
        options, keys = parse(argv)
        weights = find_weights(options.checkpoint, key="--checkpoint")
        return configure(options, load_config(keys), weights, 1).training.seq_len

    assert seq_len(place / "hf") == LONGEST
    assert seq_len(trained[0] / "checkpoint") == SEQ_LEN
    assert seq_len(place / "hf", "--training.seq_len=9") == 9
    assert seq_len(place / "hf", "--validation.seq_len=7") == 7


# --- the command --------------------------------------------------------------------------------


def test_json_is_all_that_the_script_prints(place: Path, expected: Totals) -> None:
    words = [sys.executable, "scripts/evaluate.py", *flags(place), "--json", "--optimizer.lr", "1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result == {
        "checkpoint": str(place / "hf"),
        "dataset": str(place / "text.txt"),
        "loss": pytest.approx(expected.loss, rel=TOLERANCE),
        "perplexity": pytest.approx(expected.perplexity, rel=1e-5),
        "bits_per_byte": pytest.approx(expected.bits_per_byte, rel=TOLERANCE),
        "tokens": expected.num_tokens,
        "bytes": expected.num_bytes,
        "rows": -(-expected.num_tokens // SEQ_LEN),
        "rows_of_dataset": -(-expected.num_tokens // SEQ_LEN),
        "seq_len": SEQ_LEN,
        "dtype": "float32",
    }
    assert "no effect on an evaluation: optimizer.lr" in done.stderr


def test_rows_that_are_no_text_have_no_bytes(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*flags(place), "--dataset", "synthetic", "--num_rows", "2"]
    assert told(main, [*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == 2 * SEQ_LEN
    assert result["bytes"] is result["bits_per_byte"] is None
    assert told(main, argv) == 0
    assert "bits per byte" not in capsys.readouterr().out


MISTAKES = {
    "--checkpoint absent": "--checkpoint = 'absent': there is no such folder",
    "--dataset absent.txt": "(from --dataset): no such file or folder",
    "--dataset text --dataset_path absent.txt": "(from --dataset_path): no such file or folder",
    "--dataset text": "--dataset text: it is a kind of data; give --dataset_path too",
    "--dataset txt --dataset_path a.txt": "--dataset txt: beside --dataset_path it must be one of",
    "--dataset synthetic": "--dataset synthetic: it has no end; give --num_rows",
    "--num_rows 0": "--num_rows 0: the data has",
    "--num_rows many": "argument --num_rows: invalid int value: 'many'",
    "--dtype float64": "argument --dtype: invalid choice",
    "--training.seqlen 5": "training.seqlen = ",
    "--parallelism.data_parallel_replicate_degree 3": "dp_replicate 3 x dp_shard -1 x cp 1 x tp 1",
    "--checkpoint {place}/learned": f"the model has an embedding for {SEQ_LEN - 1} positions",
    "--checkpoint {place}/small": "knows 2048 ids and the model's vocabulary has 2000",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    place: Path, mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config, LlamaConfig

    GPT2Config(vocab_size=2048, n_positions=SEQ_LEN - 1).save_pretrained(place / "learned")
    LlamaConfig(vocab_size=2000, max_position_embeddings=LONGEST).save_pretrained(place / "small")
    for name in ("learned", "small"):
        shutil.copytree(TOKENIZER, place / name, dirs_exist_ok=True)
    argv = [*flags(place), *mistake.format(place=place).split()]
    capsys.readouterr()
    assert told(main, argv) == 2
    said = capsys.readouterr()
    assert MISTAKES[mistake] in said.err.splitlines()[-1] and not said.out
    assert len([line for line in said.err.splitlines() if "WARNING" not in line]) == 1


def test_a_missing_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(main, ["--dataset", "text.txt"]) == 2
    assert "--checkpoint" in capsys.readouterr().err


# --- the harness --------------------------------------------------------------------------------

HARNESS = ROOT / "tests" / "harness"  # the tasks that docs/evaluation.md names


@pytest.fixture(scope="module")
def exported(trained: tuple[Path, float], place: Path) -> Path:
    """The run's last step as scripts/convert_to_hf.py writes it."""
    run_ranks(export, 1, trained[0] / "checkpoint", place / "exported")
    return place / "exported"


def export(checkpoint: Path, output: Path) -> None:
    weights = find_weights(checkpoint, key="--checkpoint")
    to_hugging_face(weights, output, dtype="float32", hf_assets_path=weights.hf_assets_path)


def test_an_exported_folder_gives_transformers_our_likelihoods(
    exported: Path, trained: tuple[Path, float], place: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    stream = [id for text in DOCUMENTS for id in (0, *tokenizer.encode(text), 1)]
    assert stream == stream_of(DOCUMENTS)
    argv = flags(place)
    argv[1] = str(trained[0] / "checkpoint")
    ours = evaluate_on(Mesh(), argv)
    theirs = sum(nats_of_rows(exported, stream, SEQ_LEN))
    assert ours.nats == pytest.approx(theirs, rel=TOLERANCE)


def test_the_harness_gives_our_bits_per_byte(
    exported: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    text = json.loads((HARNESS / "text.jsonl").read_text(encoding="utf-8"))["text"]
    num_rows, seq_len = 2, len(load_tokenizer(TOKENIZER).encode(text)) // 2
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    words = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu"]
    model = f"pretrained={exported},dtype=float32,max_length={seq_len}"
    words += ["--model_args", model, "--include_path", str(HARNESS)]
    words += ["--tasks", "local_text,local_choice", "--output_path", str(place / "lm_eval")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (place / "lm_eval").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]

    argv = [*flags(place, "exported"), "--dataset", str(HARNESS / "text.jsonl")]
    # Rows that the document fills: the harness does not ask for the end of a document.
    argv += ["--training.seq_len", str(seq_len), "--num_rows", str(num_rows)]
    ours = evaluate_on(Mesh(), argv)
    assert ours.num_bytes == len(text.encode())
    theirs = results["local_text"]
    assert theirs["bits_per_byte,none"] == pytest.approx(ours.bits_per_byte, rel=TOLERANCE)
    per_word = math.exp(ours.nats / len(text.split()))
    assert theirs["word_perplexity,none"] == pytest.approx(per_word, rel=1e-5)
    assert results["local_choice"]["acc,none"] in (0, 1 / 3, 2 / 3, 1)

"""Train a byte-level BPE tokenizer: text in, a folder that `model.hf_assets_path` can name out.

Byte-level means that every UTF-8 text round-trips whatever the tokenizer was trained on: the 256
bytes are the first entries of the vocabulary, and each further entry is the most frequent pair
of earlier ones. The same text always gives the same file, byte for byte.

    python scripts/train_tokenizer.py --input assets/text/train.txt --output assets/tokenizer
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

BOS_TOKEN = "<|begin_of_text|>"
EOS_TOKEN = "<|end_of_text|>"
FORM_FEED = "\f"  # between two documents of a .txt file
SMALLEST_VOCABULARY = 256 + 2  # every byte and the two special tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="train a byte-level BPE tokenizer on text files")
    parser.add_argument("--input", type=Path, nargs="+", required=True, help=".txt files")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--vocab_size", type=int, default=2048, help="entries, special tokens included"
    )
    arguments = parser.parse_args()
    missing = [path for path in arguments.input if not path.is_file()]
    if missing:
        parser.error(f"--input {missing[0]}: no such file")
    if arguments.vocab_size < SMALLEST_VOCABULARY:
        parser.error(f"--vocab_size {arguments.vocab_size}: {SMALLEST_VOCABULARY} are the least")
    train(arguments.input, arguments.output, vocab_size=arguments.vocab_size)
    print(f"wrote {arguments.output}/tokenizer.json and tokenizer_config.json")


def train(inputs: list[Path], output: Path, *, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json of `vocab_size` entries into `output`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_lines(inputs), trainer)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "clean_up_tokenization_spaces": False,
        # Texts of any length: the model, not the tokenizer, knows the longest sequence.
        "model_max_length": 10**30,
    }
    text = json.dumps(config, indent=2) + "\n"
    (output / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _lines(inputs: list[Path]) -> Iterator[str]:
    for path in inputs:
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                yield line.replace(FORM_FEED, "")


if __name__ == "__main__":
    main()

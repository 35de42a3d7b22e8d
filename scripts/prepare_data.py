"""Tokenise a dataset ahead of a run: a folder of token shards for `training.dataset_path`.

    python scripts/prepare_data.py --input corpus.jsonl --output shards \\
        --hf_assets_path assets/tokenizer
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from torchtitan_lite.config import ConfigError
from torchtitan_lite.data.documents import find_source
from torchtitan_lite.data.prepare import tokenise
from torchtitan_lite.data.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="text -> token shards")
    parser.add_argument("--input", required=True, help=".txt, .jsonl, a folder, or a dataset")
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--hf_assets_path", required=True, help="folder with tokenizer.json")
    parser.add_argument("--text_column", default="text", help="field of jsonl or hf rows")
    parser.add_argument("--kind", default="auto", choices=["auto", "text", "jsonl", "hf"])
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        if arguments.output.exists():
            raise ConfigError(f"--output {arguments.output}: it exists; name another or remove it")
        tokenizer = load_tokenizer(arguments.hf_assets_path)
        source = find_source(
            arguments.kind, arguments.input, text_column=arguments.text_column, key="--input"
        )
        if source.kind == "tokens":
            raise ConfigError(f"--input {source.path}: it is a folder of token shards already")
        tokenise(source, tokenizer, arguments.output)
    except (ConfigError, OSError) as error:  # OSError: an input or output folder without access
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

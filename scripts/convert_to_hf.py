"""A step folder -> a folder that transformers loads; or the table of names of a model.

    python scripts/convert_to_hf.py --checkpoint outputs/run/checkpoint/step-500 --output <dir>
    python scripts/convert_to_hf.py --print_keys --hf_path <dir>

One process needs memory for one copy of the model; under torchrun each rank takes its share. The
tokenizer is the run's, or the one in --tokenizer.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from torchtitan_lite.checkpoint.weights import check_new_folder, export_files, find_weights
from torchtitan_lite.config import ConfigError
from torchtitan_lite.launch import Parser, process_group, told


def main(argv: list[str]) -> int:
    """Convert as `argv` says; return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("--checkpoint", help="step folder, or a folder of them for its newest")
    parser.add_argument("--output", type=Path, help="folder to make")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json")
    parser.add_argument(
        "--export_dtype", default="float32", choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument("--print_keys", action="store_true", help="our names beside those on disk")
    parser.add_argument("--hf_path", help="with --print_keys: folder with config.json")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    if options.print_keys:
        print_keys(options.hf_path, options.checkpoint)
        return 0
    for name in ("checkpoint", "output"):
        if getattr(options, name) is None:
            raise ConfigError(f"--{name}: needed, unless --print_keys --hf_path <dir> is asked for")
    weights = find_weights(options.checkpoint, key="--checkpoint")
    check_new_folder(options.output, key="--output")
    assets = options.tokenizer or weights.hf_assets_path
    export_files(weights.model, assets, dtype=options.export_dtype)  # a mistake shows here
    with process_group():
        from torchtitan_lite.convert import to_hugging_face

        to_hugging_face(weights, options.output, dtype=options.export_dtype, hf_assets_path=assets)
    return 0


def print_keys(hf_path: str | None, checkpoint: str | None) -> None:
    """A line for each block of a parameter: our name, its shape, the block on disk."""
    if (hf_path is None) == (checkpoint is None):
        raise ConfigError("--print_keys: name a model with --hf_path or with --checkpoint")
    key, path = ("--hf_path", hf_path) if hf_path is not None else ("--checkpoint", checkpoint)
    model = find_weights(str(path), key=key).model
    from torchtitan_lite.convert import key_table

    table = [(name, "x".join(map(str, shape)), theirs) for name, shape, theirs in key_table(model)]
    widths = [max(len(row[column]) for row in table) for column in (0, 1)]
    for name, shape, theirs in table:
        print(f"{name:{widths[0]}}  {shape:>{widths[1]}}  {theirs}")


if __name__ == "__main__":
    sys.exit(told(main, sys.argv[1:]))

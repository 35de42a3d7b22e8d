"""A Hugging Face folder -> a step folder that any mesh loads.

    python scripts/convert_from_hf.py --hf_path <dir> --output <dir>
    python train.py ... --model.name auto --model.hf_assets_path <hf dir> \\
        --checkpoint.enable --checkpoint.initial_load_path <dir>/step-0

One process needs memory for one copy of the model; under torchrun each rank takes its share.
Training can read the Hugging Face folder itself, too: checkpoint.initial_load_in_hf.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from torchtitan_lite.checkpoint.weights import check_new_folder, find_weights
from torchtitan_lite.config import ConfigError
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.launch import Parser, process_group, told


def main(argv: list[str]) -> int:
    """Convert as `argv` says; return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("--hf_path", required=True, help="folder with config.json and safetensors")
    parser.add_argument("--output", required=True, type=Path, help="folder that receives step-0")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    weights = find_weights(options.hf_path, key="--hf_path")
    if not weights.is_hf:
        raise ConfigError(f"--hf_path = {options.hf_path!r}: it is a step folder already")
    if (weights.hf_assets_path / "tokenizer.json").is_file():
        load_tokenizer(weights.hf_assets_path, key="--hf_path", vocab_size=weights.model.vocab_size)
    check_new_folder(options.output / "step-0", key="--output")
    with process_group():
        from torchtitan_lite.convert import to_step_folder

        to_step_folder(weights, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(told(main, sys.argv[1:]))

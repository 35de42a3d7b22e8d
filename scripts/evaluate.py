"""Loss, perplexity and bits per byte of a checkpoint on a text, on any mesh.

    python scripts/evaluate.py --checkpoint outputs/debug/checkpoint \\
        --dataset assets/text/validation.txt
    torchrun --nproc_per_node 4 scripts/evaluate.py --checkpoint hf_folder --dataset text.jsonl \\
        --parallelism.tensor_parallel_degree 2 --validation.local_batch_size 16 --json

Every other option is a key of the configuration, as in train.py: the mesh, the length of a row
(training.seq_len), the rows of a forward (validation.local_batch_size) ... Model and tokenizer come
with the checkpoint. docs/evaluation.md says what the numbers count.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import typing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lite.checkpoint.weights import Weights, find_weights
from torchtitan_lite.config import (
    Config,
    ConfigError,
    check_config,
    config_warnings,
    load_config,
    num_stages,
    resolve,
    validation_seq_len,
)
from torchtitan_lite.config.keys import Dataset
from torchtitan_lite.launch import Parser, process_group, told, world_size
from torchtitan_lite.observe.logging import init_logging, logger

if TYPE_CHECKING:
    from torchtitan_lite.data.sources import Source
    from torchtitan_lite.evaluate import Totals

SEQ_LEN = 2048  # where neither the user nor the run says how long a row is
KINDS = typing.get_args(Dataset)
# The keys that an evaluation reads.
READ = (
    "job.config_file",
    "model.hf_assets_path",
    "training.seq_len",
    "training.dtype",
    "training.mixed_precision_param",
    "training.dataset_text_column",
    "training.document_mask",
    "training.packing",
    "training.token_cache",
    "training.enable_cpu_offload",
    "loss.num_chunks",
    "parallelism.*",
    "comm.init_timeout_seconds",
    "debug.*",
    "validation.seq_len",
    "validation.local_batch_size",
)


def main(argv: list[str]) -> int:
    """Evaluate as `argv` says and print the numbers; return the exit code."""
    options, keys = parse(argv)
    rank = int(os.environ.get("RANK", "0"))
    init_logging(rank)
    weights = find_weights(options.checkpoint, key="--checkpoint")
    config = configure(options, load_config(keys), weights, world_size())
    # torch takes seconds to import: what was wrong so far is told without it.
    from torchtitan_lite.data.opening import open_held_out

    byte_lengths = byte_lengths_of(config, weights)
    rows = open_held_out(config, weights.model.vocab_size, to_the_end=True)
    if options.num_rows is not None and not 1 <= options.num_rows <= len(rows):
        raise ConfigError(f"--num_rows {options.num_rows}: the data has {len(rows)} rows")
    with process_group(
        timeout_seconds=config.comm.init_timeout_seconds,
        cpu_offload=config.training.enable_cpu_offload,
    ):
        totals = measure(
            config, weights, rows, num_rows=options.num_rows, byte_lengths=byte_lengths
        )
    if rank == 0:
        result = {
            "checkpoint": str(weights.folder),
            "dataset": config.validation.dataset_path or config.validation.dataset,
            "loss": totals.loss,
            "perplexity": totals.perplexity,
            "bits_per_byte": totals.bits_per_byte,
            "tokens": totals.num_tokens,
            "bytes": totals.num_bytes if byte_lengths else None,
            "rows": options.num_rows or len(rows),
            "rows_of_dataset": len(rows),
            "seq_len": validation_seq_len(config),
            "dtype": config.training.mixed_precision_param,
        }
        _show(result, as_json=options.json)
    return 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this script, and the words that are keys of the configuration."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--checkpoint", required=True, help="step folder, folder of steps, or Hugging Face folder"
    )
    kinds = ", ".join(KINDS)
    parser.add_argument("--dataset", required=True, help=f"a path, or a kind of data: {kinds}")
    parser.add_argument("--dataset_path", default="", help="the path, after a kind")
    parser.add_argument("--num_rows", type=int, help="only the first so many rows")
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="precision of the computation; auto: that of the weights on disk",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, keys = parser.parse_known_args(argv)
    given, path = options.dataset, options.dataset_path
    if given == "synthetic" and options.num_rows is None:
        raise ConfigError("--dataset synthetic: it has no end; give --num_rows")
    if given in KINDS and given != "synthetic" and not path:
        raise ConfigError(f"--dataset {given}: it is a kind of data; give --dataset_path too")
    if given not in KINDS and path:
        raise ConfigError(f"--dataset {given}: beside --dataset_path it must be one of {kinds}")
    if given not in KINDS:
        options.dataset, options.dataset_path = "auto", given
    return options, keys


def configure(
    options: argparse.Namespace, config: Config, weights: Weights, num_ranks: int
) -> Config:
    """`config` as the user gave it, completed to that of an evaluation, checked and resolved."""
    training, validation = config.training, config.validation
    if "validation.seq_len" in config.sources:
        training.seq_len = validation_seq_len(config)
    elif "training.seq_len" not in config.sources:
        training.seq_len = min(_seq_len_of_run(weights), weights.model.max_position_embeddings)
    if "training.mixed_precision_param" not in config.sources:
        training.mixed_precision_param = weights.precision(options.dtype)  # type: ignore[assignment]
    if "training.dtype" not in config.sources:  # nothing is updated: no need to store more
        training.dtype = training.mixed_precision_param
    if "model.hf_assets_path" not in config.sources:
        config.model.hf_assets_path = str(weights.hf_assets_path)
    training.dataset, validation.enable = "synthetic", True  # no row is trained on
    validation.dataset, validation.dataset_path = options.dataset, options.dataset_path
    flag = "--dataset_path" if options.dataset != "auto" else "--dataset"
    config.sources |= {"validation.dataset": "--dataset", "validation.dataset_path": flag}
    # A schedule runs in training alone: as many rows as any of them needs.
    stages = num_stages(config, weights.model.num_hidden_layers)
    training.local_batch_size = stages * config.parallelism.pipeline_parallel_microbatch_size
    training.global_batch_size = -1
    problems = check_config(config, weights.model, num_ranks)
    if problems:
        raise ConfigError("\n".join(problem.line for problem in problems))
    resolve(config, num_ranks)
    for warning in config_warnings(config, weights.model):
        logger.warning(warning)
    idle = [
        name
        for name, source in config.user_set.items()
        if source.startswith("--") and not any(fnmatchcase(name, read) for read in READ)
    ]
    if idle:
        logger.warning(f"no effect on an evaluation: {', '.join(idle)}")
    return config


def _seq_len_of_run(weights: Weights) -> int:
    """Tokens in a row of the run's own validation, if its config.toml lies where a run left it."""
    saved = weights.folder.parent.parent / "config.toml"
    if weights.is_hf or not saved.is_file():
        return SEQ_LEN
    return validation_seq_len(load_config([f"--job.config_file={saved}"]))


def byte_lengths_of(config: Config, weights: Weights) -> list[int] | None:
    """Bytes of text by token id, for every id of the model; None where there is no text to count.

    Raises ConfigError if the tokenizer knows more ids than the model.
    """
    from torchtitan_lite.data.tokenizer import FILE_NAME, load_tokenizer

    assets, vocab_size = Path(config.model.hf_assets_path), weights.model.vocab_size
    lengths = None
    if config.validation.dataset != "synthetic" and (assets / FILE_NAME).is_file():
        lengths = load_tokenizer(assets, vocab_size=vocab_size).byte_lengths()
    if lengths is None:
        logger.warning("no bits per byte: no tokenizer says how many bytes of text a token is")
        return None
    return lengths + [0] * (vocab_size - len(lengths))


def measure(
    config: Config,
    weights: Weights,
    rows: Source,
    *,
    num_rows: int | None = None,
    byte_lengths: list[int] | None = None,
) -> Totals:
    """The sums of `weights` over `rows`; a collective of the process group, which is up."""
    import torch.distributed as dist

    from torchtitan_lite import device as devices
    from torchtitan_lite.build import load_model
    from torchtitan_lite.evaluate import evaluate

    if config.debug.deterministic:
        devices.make_deterministic()
    model, mesh, device = load_model(config, weights)
    logger.info(f"mesh {mesh.degrees} on {dist.get_world_size()} x {devices.device_name()}")
    return evaluate(
        model,
        rows,
        mesh=mesh,
        device=device,
        local_batch_size=config.validation.local_batch_size,
        num_rows=num_rows,
        byte_lengths=byte_lengths,
    )


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:  # which knows no NaN
        odd = {name for name, v in result.items() if isinstance(v, float) and not math.isfinite(v)}
        print(json.dumps({name: None if name in odd else v for name, v in result.items()}))
        return
    print("{checkpoint} on {dataset}".format_map(result))
    print("loss           {loss:.6f} nats a token".format_map(result))
    print("perplexity     {perplexity:.4f}".format_map(result))
    if result["bytes"] is not None:
        print("bits per byte  {bits_per_byte:.6f}".format_map(result))
        print("over           {tokens:,} tokens, {bytes:,} bytes of text".format_map(result))
    else:
        print("over           {tokens:,} tokens".format_map(result))
    print("rows           {rows:,} of {rows_of_dataset:,}, of {seq_len} tokens".format_map(result))
    print("computed in    {dtype}".format_map(result))


if __name__ == "__main__":
    sys.exit(told(main, sys.argv[1:]))

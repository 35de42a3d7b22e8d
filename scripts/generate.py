"""Text out of a checkpoint: a step folder of a run, a folder of them, or a Hugging Face folder.

    python scripts/generate.py --checkpoint outputs/debug/checkpoint --prompt "The village"
    torchrun --nproc_per_node 2 scripts/generate.py ...        tensor parallel over 2 ranks

What the options mean and what is guaranteed: docs/generation.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from tokenizers.decoders import DecodeStream

from torchtitan_lite.checkpoint.weights import GENERATION_CONFIG, Weights, find_weights
from torchtitan_lite.config import Config, ConfigError, check_config, resolve
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.launch import Parser, process_group, told, world_size
from torchtitan_lite.observe.logging import init_logging, logger


@dataclasses.dataclass
class Row:
    """One text, as --json prints it."""

    prompt: str
    token_ids: list[int]  # without the prompt's
    text: str


def main(argv: list[str]) -> int:
    """Generate as `argv` says; return the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    init_logging(rank)
    options = parse(argv)
    weights = find_weights(options.checkpoint, key="--checkpoint")
    tokenizer = load_tokenizer(
        options.tokenizer or weights.hf_assets_path,
        key="--tokenizer",
        vocab_size=weights.model.vocab_size,
    )
    prompts = [
        (text, encode(text, tokenizer, is_hf=weights.step == 0)) for text in texts_of(options)
    ]
    eos_ids = find_eos_ids(weights, tokenizer)
    config = configure(weights, options.dtype, world_size())

    # torch takes seconds to import: what was wrong so far is told without it.
    from torchtitan_lite.build import load_model
    from torchtitan_lite.generate import check_prompts, generate

    check_prompts(weights.model, [ids for _, ids in prompts])
    with process_group():
        model, mesh, _ = load_model(config, weights)
        silent = options.json or rank > 0
        samples = Samples(prompts, options.n_samples, tokenizer, eos_ids, silent=silent)
        generate(
            model.parts[0],
            [ids for _, ids in prompts],
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p or 1.0,
            num_samples=options.n_samples,
            seed=options.seed or 0,
            eos_ids=eos_ids,
            cache=not options.no_cache,
            group=mesh.tp.get_group() if mesh.degrees.tp > 1 else None,
            on_token=samples.add,
        )
        samples.close()
    if options.json and rank == 0:
        print(json.dumps([dataclasses.asdict(row) for row in samples.rows]))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The options; ConfigError for a value that none of the models can take."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--checkpoint", required=True, help="step folder, folder of steps, Hugging Face folder")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", help="text to go on from; may be repeated")
    prompts.add_argument("--prompt_file", help="UTF-8 file with a prompt in each line")
    add("--tokenizer", help="folder with tokenizer.json; default: the checkpoint's")
    add("--max_new_tokens", type=int, default=64, help="most tokens of a text (default 64)")
    add("--temperature", type=float, default=1.0, help="0: the likeliest token (default 1)")
    add("--top_k", type=int, help="draw from the k likeliest tokens")
    add("--top_p", type=float, help="draw from the likeliest that have this probability together")
    add("--n_samples", type=int, default=1, help="texts for each prompt (default 1)")
    add("--seed", type=int, help="of what is drawn (default 0)")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="default: stored")
    add("--json", action="store_true", help="print one list of prompt, token_ids and text")
    add("--no_cache", action="store_true", help="compute the whole row again for each token")
    options = parser.parse_args(argv)
    for name in ("max_new_tokens", "n_samples", "top_k"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: it must be 1 or more")
    if not 0 <= options.temperature < math.inf:
        raise ConfigError(f"--temperature {options.temperature}: it must be 0 (greedy) or more")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise ConfigError(f"--top_p {options.top_p}: it must be above 0, and 1 at most")
    idle = [name for name in ("top_k", "top_p", "seed") if getattr(options, name) is not None]
    if options.temperature == 0 and (idle or options.n_samples > 1):
        names = ", ".join(f"--{name}" for name in idle + ["n_samples"] * (options.n_samples > 1))
        logger.warning(f"--temperature 0 takes the likeliest token: {names} make no difference")
    return options


def texts_of(options: argparse.Namespace) -> list[str]:
    """The prompts as text."""
    if options.prompt_file is None:
        return list(options.prompt)
    named = f"--prompt_file {options.prompt_file}"
    try:
        content = Path(options.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{named}: it cannot be read: {error}") from None
    if not content:
        raise ConfigError(f"{named}: it holds no prompt")
    return content.removesuffix("\n").split("\n")


def encode(text: str, tokenizer: Tokenizer, *, is_hf: bool) -> list[int]:
    """Token ids of a prompt, begun as the texts that the model was trained on.

    Rows of ours begin with bos, where the tokenizer has one. Of a Hugging Face folder, and of what
    was converted from one, the template in tokenizer.json knows.
    """
    if is_hf:
        ids = tokenizer.implementation.encode(text).ids
    else:
        ids = [*([] if tokenizer.bos_id is None else [tokenizer.bos_id]), *tokenizer.encode(text)]
    if not ids:
        raise ConfigError(
            f"prompt {text!r}: it has no tokens, and no token begins a text; give one (in a "
            "--prompt_file each line is a prompt)"
        )
    return list(ids)


def find_eos_ids(weights: Weights, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a text: the tokenizer's, and those of generation_config.json."""
    found = {tokenizer.eos_id} - {None}
    file = weights.folder / GENERATION_CONFIG
    if weights.is_hf and file.is_file():
        try:
            given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file}: it cannot be read: {error}") from None
        found |= set(given if isinstance(given, list) else [given]) - {None}
    return found  # type: ignore[return-value]


def configure(weights: Weights, dtype: str, num_ranks: int) -> Config:
    """The configuration of a model that is cut over all ranks and not trained."""
    config, key = Config(), "parallelism.tensor_parallel_degree"
    config.parallelism.tensor_parallel_degree = num_ranks
    config.sources[key] = "torchrun --nproc_per_node"
    config.parallelism.enable_sequence_parallel = False  # one token is no sequence to share
    config.training.dtype = weights.precision(dtype)  # type: ignore[assignment]
    config.training.mixed_precision_param = config.training.dtype
    config.training.dataset = "synthetic"  # none is read
    config.training.seq_len = weights.model.max_position_embeddings
    problems = check_config(config, weights.model, num_ranks)
    if problems:
        raise ConfigError("\n".join(problem.line for problem in problems))
    resolve(config, num_ranks)
    return config


class Samples:
    """The texts as they grow. A single one is printed as it comes, several whole and in order.

    Of a character that takes several tokens nothing is there before it is whole.
    """

    def __init__(
        self,
        prompts: Sequence[tuple[str, Sequence[int]]],
        n_samples: int,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        *,
        silent: bool,
    ) -> None:
        self.tokenizer, self.eos_ids, self.silent = tokenizer.implementation, eos_ids, silent
        pairs = [pair for pair in prompts for _ in range(n_samples)]
        self.rows = [Row(text, [], "") for text, _ in pairs]
        # Given the prompt, for the space before a word that begins a text is left out.
        self.streams = [DecodeStream(ids=list(ids), skip_special_tokens=True) for _, ids in pairs]
        self.finished: set[int] = set()
        self.num_shown = 0
        self.print(pairs[0][0] if len(pairs) == 1 else "")

    def add(self, row: int, token: int, last: bool) -> None:
        """The next token of a row; `last` says that it gets no other."""
        piece = ""
        if token not in self.eos_ids:
            piece = self.streams[row].step(self.tokenizer, token) or ""
        self.rows[row].token_ids.append(token)
        self.rows[row].text += piece
        if len(self.rows) == 1:
            self.print(piece)
        elif last:
            self.finished.add(row)
            self.show_finished()

    def show_finished(self) -> None:
        """Print the texts that are finished and have none before them that is not."""
        while self.num_shown in self.finished:
            row = self.rows[self.num_shown]
            self.num_shown += 1
            heading = f"--- {self.num_shown} of {len(self.rows)} ---"
            self.print(f"{heading}\n{row.prompt}{row.text}\n\n")

    def close(self) -> None:
        """No row gets another token."""
        if len(self.rows) == 1:
            self.print("\n")
        else:
            self.finished.update(range(len(self.rows)))
            self.show_finished()

    def print(self, text: str) -> None:
        if not self.silent:
            print(text, end="", flush=True)


if __name__ == "__main__":
    sys.exit(told(main, sys.argv[1:]))

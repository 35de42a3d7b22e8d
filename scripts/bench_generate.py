"""What the cache of generation saves, and how it stands beside transformers: one run, in turns.

    OMP_NUM_THREADS=1 PYTHONPATH=. python scripts/bench_generate.py --rounds 7

The debug model with fresh weights goes on greedily from a random prompt: with the cache, computing
the whole row for each token, and in `transformers.generate` with its cache. All three must give
the same tokens. Printed is CPU time a token (time.process_time), the median of the rounds, and the
median of the rounds' ratios, so that a busy machine tells the same as a quiet one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from torchtitan_lite.build import initialise
from torchtitan_lite.generate import generate
from torchtitan_lite.models.decoder import Decoder, parameter_shapes
from torchtitan_lite.models.families import config_to_hf, model_config, regions

CPU = torch.device("cpu")


def exported(decoder: Decoder) -> Any:
    """The model of transformers that has the weights of `decoder`."""
    content = config_to_hf(decoder.config, dtype="float32", bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content)).eval()
    theirs, ours = model.state_dict(), dict(decoder.named_parameters())
    for name, places in regions(decoder.config, parameter_shapes(decoder.config)).items():
        for place in places:
            assert not place.transposed
            theirs[place.tensor][place.theirs].copy_(ours[name].detach()[place.ours])
    return model


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="after one that warms up")
    parser.add_argument(
        "--prompt_tokens", type=int, default=128, help="default: a row of the debug recipe"
    )
    parser.add_argument("--max_new_tokens", type=int, default=256)
    options = parser.parse_args(argv)
    decoder = Decoder(model_config("llama3", "debugmodel", {}, ""))
    initialise(decoder, seed=0, device=CPU)
    theirs, length = exported(decoder), options.max_new_tokens
    prompt = torch.randint(decoder.config.vocab_size, (options.prompt_tokens,)).tolist()

    def ours(cache: bool) -> list[int]:
        return generate(decoder, [prompt], max_new_tokens=length, cache=cache)[0]

    def transformers() -> list[int]:
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        out = theirs.generate(
            tokens, attention_mask=mask, max_new_tokens=length, do_sample=False, use_cache=True
        )
        return list(out[0, len(prompt) :].tolist())

    contestants: dict[str, Callable[[], list[int]]] = {
        "cached": lambda: ours(True),
        "recomputed": lambda: ours(False),
        "transformers": transformers,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    texts: dict[str, list[int]] = {}
    for _ in range(options.rounds + 1):
        for name, run in contestants.items():
            begin = time.process_time()
            texts[name] = run()
            seconds[name].append(time.process_time() - begin)
    assert texts["cached"] == texts["recomputed"] == texts["transformers"]
    print(f"{length} tokens after {len(prompt)}, {torch.get_num_threads()} thread(s)")
    for name, taken in seconds.items():
        taken.pop(0)
        ratio = statistics.median(a / b for a, b in zip(taken, seconds["cached"], strict=True))
        median, best = statistics.median(taken) / length * 1e3, min(taken) / length * 1e3
        best_ratio = min(taken) / min(seconds["cached"])
        print(
            f"{name:13} {median:7.3f} CPU ms a token (best {best:.3f}), {ratio:5.2f} times the "
            f"cached (best rounds {best_ratio:.2f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

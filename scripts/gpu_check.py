"""Whether an accelerator computes what it should, and how fast, in ten minutes.

    scripts/gpu_check.sh [--device cpu] [--parts kernels,training,table] [--seconds 560]

    kernels    each kernel beside plain torch on the same device (gpu_kernels.py)
    training   the debug model from the same weights on the same rows: its losses on the device and
               on the CPU in fp32, to 1e-3; compiled; and in fewer bits, as near as these allow
    table      tokens a second and MFU (bench_gpu.py)

A check is a line: its error, and the bound that this must not pass. After a failure the others go
on. Each part has a process and a share of the time, and is ended with it. Of packages it needs
torch, triton, numpy, safetensors and tokenizers. Where $OUT is set, all lines lie in
$OUT/gpu_check.txt too.

Exit codes: 0 all holds, 1 something does not, 2 there is no accelerator. `--device cpu` checks the
kernels that a CPU has, and runs a small piece of the rest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from torchtitan_lite.device import HIDDEN, device_name, device_type

ROOT = Path(__file__).resolve().parent.parent
SHARES = {"kernels": 0.3, "training": 0.25, "table": 0.45}  # of the time
RUN = ["--job.config_file", "train_configs/debug.toml", "--validation.no_enable"]
RUN += ["--metrics.log_freq", "1", "--training.mixed_precision_param"]
FLOAT8 = ["bfloat16", "--compile.enable", "--quantize.linear.float8.recipe_name"]
# Flags, and how far the losses may be from the CPU's in fp32.
TRAININGS: dict[str, tuple[list[str], float]] = {
    "float32": (["float32"], 1e-3),
    "float32 compiled": (["float32", "--compile.enable"], 1e-3),
    "bfloat16": (["bfloat16"], 2e-2),
    "float8 tensorwise": ([*FLOAT8, "tensorwise"], 1e-1),
    "float8 rowwise": ([*FLOAT8, "rowwise"], 1e-1),
    "float8 blockwise": ([*FLOAT8, "blockwise"], 1e-1),
}
SMALL = ["--model.overrides.num_hidden_layers", "1", "--training.seq_len", "32"]
SMALL += ["--model.overrides.hidden_size", "64", "--model.overrides.intermediate_size", "64"]
SMALL += ["--model.overrides.num_attention_heads", "2", "--model.overrides.head_dim", "32"]
SMALL += ["--model.overrides.num_key_value_heads", "2", "--model.overrides.vocab_size", "256"]
SMALL += ["--training.mixed_precision_param", "float32"]


def start(flags: list[str], folder: str, *, on_cpu: bool) -> subprocess.Popen[str]:
    """train.py on the debug recipe, begun; its metrics will lie in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if on_cpu:
        environment |= HIDDEN
    return subprocess.Popen(
        [sys.executable, "train.py", *RUN, *flags, "--job.dump_folder", folder],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses_in(folder: str) -> list[float]:
    path = Path(folder) / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [record["loss"] for record in records if "loss" in record]


def train(*, on_cpu: bool) -> bool:
    """All trainings at once, each beside the CPU's; whether all are near enough.

    They begin from a checkpoint: kinds of devices draw different numbers from one seed.
    """
    begin, all_hold = time.monotonic(), True
    # On a CPU without compilation: g++ is not everywhere.
    names = ["bfloat16", "float8 rowwise"] if on_cpu else list(TRAININGS)
    with tempfile.TemporaryDirectory() as folder:
        said, _ = start(
            ["float32", "--training.steps", "1"], f"{folder}/first", on_cpu=True
        ).communicate()
        weights = f"{folder}/first/checkpoint/step-1"
        steps = ["--training.steps", "2" if on_cpu else "20"]
        if not Path(weights).is_dir():
            print(f"FAILED the first step of the CPU: {said[-2000:]}", flush=True)
            return False
        steps += ["--checkpoint.initial_load_path", weights]
        reference = start(["float32", *steps], f"{folder}/cpu", on_cpu=True)
        runs = {}
        for name in names:
            flags = [flag for flag in TRAININGS[name][0] if not (on_cpu and "compile" in flag)]
            runs[name] = start([*flags, *steps], f"{folder}/{name}", on_cpu=on_cpu)
        reference.communicate()
        expected = losses_in(f"{folder}/cpu")
        for name, run in runs.items():
            said, _ = run.communicate()
            found, bound = losses_in(f"{folder}/{name}"), TRAININGS[name][1]
            error = math.inf
            if len(found) == len(expected) > 0:
                error = max(abs(a - b) for a, b in zip(found, expected, strict=True))
            else:
                print(said[-2000:], flush=True)
            holds = error <= bound
            all_hold &= holds
            title = f"training, {name}: {len(expected)} losses"
            line = f"{error:8.1e} of {bound:7.1e} {time.monotonic() - begin:6.1f} s"
            print(f"{'ok' if holds else 'FAILED':6} {title:62} {line}", flush=True)
    return all_hold


def command_of(part: str, *, on_cpu: bool) -> list[str]:
    device = ["--device", "cpu"] if on_cpu else []
    if part == "training":
        return [str(Path(__file__).resolve()), "--only_training", *device]
    if part == "kernels":
        return [str(ROOT / "scripts" / "gpu_kernels.py"), *device]
    small = ["--of", "1B", "--modes", "eager", "--steps", "4", *SMALL]
    return [str(ROOT / "scripts" / "bench_gpu.py"), *(small if on_cpu else [])]


def run_part(part: str, log: Path | None, *, on_cpu: bool, limit_s: float) -> bool:
    """A part in a process of its own, which is ended after `limit_s`; whether all of it holds."""

    def say(line: str) -> None:
        print(line, flush=True)
        if log is not None:
            with log.open("a") as file:
                file.write(f"{line}\n")

    say(f"--- {part}, at most {limit_s:.0f} s")
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command_of(part, on_cpu=on_cpu)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # what it has started ends with it
    )
    timer = threading.Timer(limit_s, os.killpg, (process.pid, 9))
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        say(line.rstrip("\n"))
    code = process.wait()
    timer.cancel()
    word = "all holds" if code == 0 else "FAILED" if code > 0 else "ENDED: it took too long"
    say(f"--- {part}: {word}, {time.monotonic() - begin:.0f} s")
    return code == 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu"], help="another one than the accelerator")
    parser.add_argument("--parts", default=",".join(SHARES), help="in this order")
    parser.add_argument("--seconds", type=float, default=560, help="for all parts together")
    parser.add_argument("--only_training", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    on_cpu, parts = arguments.device == "cpu", arguments.parts.split(",")
    if unknown := [part for part in parts if part not in SHARES]:
        print(f"--parts: no {', '.join(unknown)}; there are {', '.join(SHARES)}", file=sys.stderr)
        return 2
    if not on_cpu and device_type() == "cpu":
        print("there is no accelerator here; --device cpu checks what a CPU can", file=sys.stderr)
        return 2
    if arguments.only_training:
        return 0 if train(on_cpu=on_cpu) else 1
    folder = os.environ.get("OUT")
    log = Path(folder) / "gpu_check.txt" if folder else None
    import torch

    print(f"{'cpu' if on_cpu else device_name()}, torch {torch.__version__}", flush=True)
    end, all_hold = time.monotonic() + arguments.seconds, True
    left = sum(SHARES[part] for part in parts)
    for part in parts:  # what one leaves is the others'
        limit_s = (end - time.monotonic()) * SHARES[part] / left
        left -= SHARES[part]
        all_hold &= run_part(part, log, on_cpu=on_cpu, limit_s=limit_s)
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Tokens a second and MFU of Llama's shapes on the accelerator of this machine.

    PYTHONPATH=. python scripts/bench_gpu.py [--of 1B,8B] [--modes eager,compiled,float8]
        [--steps 10] [--limit_s 120] [--section.key value ...]

Each row of the table is one run of train.py on synthetic rows, in bf16 with fp32 weights and
moments, in a process of its own: one that runs out of memory, or of time, is a row that says so.
Measured is the second half of its steps, by train.py's own metrics; what compiles is the first.
MFU counts the FLOPs of the layers that ran (observe/flops.py) against the device's bf16 peak, in
float8 too. Of the 8B shape, half of the layers run: weights, gradients and moments of all of them
take 120 GiB. Further flags are those of train.py, for all rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {
    "1B": ["--model.flavor", "1B", "--training.local_batch_size", "4"],
    "8B": ["--model.flavor", "8B", "--training.local_batch_size", "2"]
    + ["--model.overrides.num_hidden_layers", "16"],
}
COMMON = ["--model.name", "llama3", "--training.dataset", "synthetic", "--training.seq_len", "4096"]
COMMON += ["--activation_checkpoint.mode", "none", "--lr_scheduler.warmup_steps", "2"]
MODES = {
    "eager": [],
    "compiled": ["--compile.enable"],
    "float8": ["--compile.enable", "--quantize.linear.float8.recipe_name", "rowwise"],
}


def run(flags: list[str], *, steps: int, limit_s: float) -> dict[str, Any] | str:
    """The metrics of the last steps of a run of train.py, or what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        often = ["--training.steps", str(steps), "--metrics.log_freq", str(max(steps // 2, 1))]
        command = [sys.executable, str(ROOT / "train.py"), *flags, *often]
        try:
            done = subprocess.run(
                [*command, "--job.dump_folder", folder],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return f"not done in {limit_s:.0f} s"
        if done.returncode == 0:
            return json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[-1])
    if "OutOfMemoryError" in done.stdout:
        return "out of memory"
    return f"exit code {done.returncode}: {(done.stdout.strip().splitlines() or [''])[-1]}"


def line_of(result: dict[str, Any] | str) -> str:
    if isinstance(result, str):
        return result
    mfu = "     -" if result.get("mfu") is None else f"{result['mfu']:6.1%}"
    speed, memory = result["tokens_per_second"], result["memory_gib"]
    return f"{speed:10,.0f} {mfu} {memory:8.1f} {result['loss']:8.4f}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--of", default=",".join(SHAPES), help="shapes, in this order")
    parser.add_argument("--modes", default=",".join(MODES), help="of each shape, in this order")
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--limit_s", type=float, default=120, help="of each run, in seconds")
    arguments, rest = parser.parse_known_args(argv)
    rows = [(s, m) for s in arguments.of.split(",") for m in arguments.modes.split(",")]
    for shape, mode in rows:
        if shape not in SHAPES or mode not in MODES:
            print(f"there are {', '.join(SHAPES)} and {', '.join(MODES)}", file=sys.stderr)
            return 2
    print("shape  mode       tokens/s    MFU      GiB     loss    seconds of the run", flush=True)
    failed = False
    for shape, mode in rows:
        begin = time.monotonic()
        flags = [*COMMON, *SHAPES[shape], *MODES[mode], *rest]
        result = run(flags, steps=arguments.steps, limit_s=arguments.limit_s)
        failed |= isinstance(result, str)
        line, seconds = line_of(result), time.monotonic() - begin
        print(f"{shape:6} {mode:9} {line} {seconds:10.0f}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

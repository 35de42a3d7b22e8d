"""200 steps of the debug model on the text that ships: float8 learns what bfloat16 learns."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_lite.observe.metrics import read_metrics
from torchtitan_lite.precision.float8 import RECIPES

ROOT = Path(__file__).resolve().parents[2]
RUN = [
    "--job.config_file=train_configs/debug.toml",
    "--training.steps=200",
    "--training.seq_len=64",
    "--training.global_batch_size=2",
    "--checkpoint.enable=false",
    "--validation.enable=false",
    "--metrics.log_freq=1",
]
IN_BFLOAT16 = "--training.mixed_precision_param=bfloat16"
LAST = 20  # steps whose mean loss is compared


def losses(recipe: str, folder: Path, *more: str) -> list[float]:
    name = [f"--quantize.linear.float8.recipe_name={recipe}"] if recipe else []
    command = [sys.executable, "train.py", *RUN, *name, *more, f"--job.dump_folder={folder}"]
    environment = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def of_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses("", tmp_path_factory.mktemp("bfloat16"), IN_BFLOAT16)


DELAYED = "--quantize.linear.float8.scaling=delayed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"), [*((name, []) for name in RECIPES), ("tensorwise", [DELAYED])], ids=str
)
def test_200_steps_end_within_2_percent_of_bfloat16(
    recipe: str, more: list[str], of_bfloat16: list[float], tmp_path: Path
) -> None:
    ours = losses(recipe, tmp_path, IN_BFLOAT16, "--activation_checkpoint.mode=full", *more)
    assert len(ours) == len(of_bfloat16) == 200 and all(map(math.isfinite, ours))
    assert ours != of_bfloat16
    print(recipe, *more, ours[159::10], of_bfloat16[159::10])
    mean, expected = (sum(series[-LAST:]) / LAST for series in (ours, of_bfloat16))
    assert abs(mean - expected) < 0.02 * expected, (mean, expected)
    assert mean < 0.9 * ours[0]

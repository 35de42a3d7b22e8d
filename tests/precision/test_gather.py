"""Activations gathered in float8 under sequence parallelism: the same run, in counted bytes."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.config.cases import problems, warnings
from tests.parity.harness import (
    GLOBAL_BATCH_SIZE,
    SEQ_LEN,
    Mesh,
    RecordingTrainer,
    assert_equal,
    run,
)
from tests.parity.test_compile import COMPILED, LATENT
from tests.precision.test_meshes import MIXTURE, WIDE, options
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.precision.float8 import RECIPES
from torchtitan_lite.precision.gather import TP_ALL_GATHER

SLOW = pytest.mark.slow
FILTER = "quantize.linear.float8.filter_fqns"
LOW = {TP_ALL_GATHER: True}
FULL = {"activation_checkpoint.mode": "full"}
PER_OP = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
BFLOAT16 = {"training.mixed_precision_param": "bfloat16"}
LAYERS = {**COMPILED, "compile.components": ["model"]}
TP2 = Mesh(tp=2)
BIASED = dataclasses.replace(WIDE, attention_bias=True, attention_out_bias=True, mlp_bias=True)


class SentBytes(TorchDispatchMode):
    """What a rank gives to each kind of collective of tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("_c10d_functional::")
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            self.total[name] += args[0].numel() * args[0].itemsize
        return func(*args, **(kwargs or {}))


def train_and_count(trainer: RecordingTrainer) -> Counter[str]:
    with SentBytes() as sent:
        trainer.train()
    return sent.total


def row(name: str, mesh: Mesh, recipe: str, *more: dict[str, Any], quick: bool = False,
        gathers: int = 4, model: ModelConfig = WIDE) -> Any:  # fmt: skip
    """`gathers` of a layer that are in float8: into its two blocks, and backward into both."""
    merged = {key: value for some in more for key, value in some.items()}
    marks = () if quick else SLOW
    return pytest.param(mesh, recipe, merged, gathers, model, id=name, marks=marks)


ROWS = [
    row("tensorwise", TP2, "tensorwise", BFLOAT16, quick=True),
    row("rowwise-dp2", Mesh(dp_shard=2, tp=2), "rowwise", BFLOAT16, quick=True),
    row("blockwise", TP2, "blockwise", BFLOAT16),
    *(row(f"{name}-fp32", TP2, name) for name in RECIPES),
    row("bias", TP2, "rowwise", BFLOAT16, model=BIASED),
    row("recomputed", TP2, "tensorwise", BFLOAT16, FULL, gathers=6),
    row("per-op", TP2, "rowwise", BFLOAT16, PER_OP, gathers=6),
    row("delayed", TP2, "tensorwise", {"quantize.linear.float8.scaling": "delayed"}),
    row("left-down", TP2, "rowwise", BFLOAT16, {FILTER: ["down_proj"]}, gathers=3),
    row("left-k", TP2, "rowwise", BFLOAT16, {FILTER: ["k_proj"]}, gathers=3),
    row("experts", TP2, "rowwise", BFLOAT16, gathers=2, model=MIXTURE),
    row("latent", TP2, "rowwise", BFLOAT16, gathers=3,
        model=dataclasses.replace(WIDE, **LATENT)),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "recipe", "more", "gathers", "model"), ROWS)
def test_gathered_in_float8_it_is_the_same_in_fewer_bytes(
    mesh: Mesh, recipe: str, more: dict[str, Any], gathers: int, model: ModelConfig
) -> None:
    common = options(recipe) | more
    high = run(mesh, common, model, act=train_and_count)
    low = run(mesh, common | LOW, model, act=train_and_count)
    assert_equal(low, high, tolerance=1e-6)
    width = 2 if BFLOAT16.items() <= more.items() else 4
    rows = GLOBAL_BATCH_SIZE * SEQ_LEN // mesh.tp // mesh.dp_shard * model.num_hidden_layers
    saved = gathers * rows * ((width - 1) * model.hidden_size - 4)
    for ours, other in zip(low.returned, high.returned, strict=True):
        other["all_gather_into_tensor"] -= saved
        assert ours == other


@SLOW
@pytest.mark.parametrize(
    ("mesh", "more"), [(TP2, {}), (Mesh(dp_shard=2, tp=2), FULL), (TP2, PER_OP)], ids=str
)
def test_compiled_it_is_the_same(mesh: Mesh, more: dict[str, Any]) -> None:
    common = options("rowwise") | LOW | more | {"training.steps": 2}
    assert_equal(run(mesh, common | LAYERS, WIDE, timeout=300.0), run(mesh, common, WIDE))


def warned(trainer: RecordingTrainer) -> list[str]:
    return trainer.said  # type: ignore[attr-defined]


class Listening(RecordingTrainer):
    """Keeps the warnings of its building."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.said.append(  # type: ignore[method-assign]
            record.getMessage()
        )
        logging.getLogger("torchtitan_lite").addHandler(handler)
        super().__init__(*args, **kwargs)


def test_gathers_that_stay_high_are_told() -> None:
    left = {FILTER: ["layers.1.self_attn.k_proj", "down_proj"]}
    ours = run(TP2, options("rowwise") | LOW | left, WIDE, trainer=Listening, act=warned)
    for said in ours.returned:
        assert said == [
            f"{TP_ALL_GATHER} = true: 5 gathers stay in high precision, such as that of "
            "layers.0.mlp.down_proj: what arrives there is read by a linear that is not in float8"
        ]


FLAG, RECIPE = f"--{TP_ALL_GATHER}", "--quantize.linear.float8.recipe_name=rowwise"


def test_it_needs_scales_that_keep_digits() -> None:
    argv = [RECIPE, FLAG, "--parallelism.tensor_parallel_degree=2"]
    assert problems(argv, world=2) == []
    (line,) = problems([*argv, "--quantize.linear.float8.no_round_scales_to_power_of_2"], world=2)
    assert line == (
        f"{TP_ALL_GATHER} = true (from {FLAG}): rows are cast again where they arrive, which "
        "changes digits unless scales are powers of two; set "
        "quantize.linear.float8.round_scales_to_power_of_2 to true"
    )


def test_without_such_a_gather_it_does_nothing_and_says_so() -> None:
    (line,) = warnings([RECIPE, FLAG])
    assert line.startswith(f"{TP_ALL_GATHER} = true") and "has no effect" in line
    argv = [RECIPE, FLAG, "--parallelism.tensor_parallel_degree=2"]
    assert warnings(argv, world=2) == []
    (line,) = warnings([*argv, "--parallelism.no_enable_sequence_parallel"], world=2)
    assert line.startswith(f"{TP_ALL_GATHER} = true") and "has no effect" in line
